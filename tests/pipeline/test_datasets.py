"""Making a workspace: from a name, a YAML or a folder, and every way in which that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from regionprep.errors import InputError, ManifestError, MissingError
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.splits import make_splits, read_images
from regionprep.workspace import Workspace

TABLE = "path,caption,split\na.jpg,a cat,train\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    """A folder with images and captions, which is the current one."""
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 6)).save(tmp_path / "photos/a.jpg")
    (tmp_path / "table.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_of_images_is_enough(here: Path):
    workspace = initialise(Path("work"), images=Path("photos"))
    assert workspace.root == here / "work"
    assert workspace.dataset.name == "photos"
    assert workspace.dataset.captions is None
    assert workspace.image_root() == here / "photos"


def test_relative_paths_work_from_everywhere_later(here: Path, monkeypatch):
    workspace = initialise(Path("work"), images=Path("photos"), captions=[Path("table.csv")])
    monkeypatch.chdir("/")
    make_splits(Workspace.find(here / "work"))
    assert [image.path for image in read_images(workspace)] == ["a.jpg"]


def test_a_workspace_with_its_files_inside_can_be_moved(here: Path):
    workspace = initialise(here, images=Path("photos"), captions=[Path("table.csv")])
    assert workspace.dataset.images.root == "photos"
    assert workspace.dataset.captions is not None
    assert workspace.dataset.captions.files == ("table.csv",)
    moved = here.parent / "moved"
    here.rename(moved)
    assert make_splits(Workspace.open(moved)).images.total() == 1


def test_the_users_yaml_counts_from_its_own_folder(here: Path, monkeypatch):
    yaml = here / "mine.yaml"
    yaml.write_text(
        "summary: Mine.\nimages: {root: photos}\ncaptions: {files: [table.csv]}\n"
        "splits: {kind: drawn, val: 0}\n"
    )
    monkeypatch.chdir("/")
    workspace = initialise(here / "work", dataset=str(yaml))
    assert workspace.image_root() == here / "photos"
    assert workspace.dataset.name == "mine"
    assert workspace.dataset.captions is not None
    assert workspace.dataset.captions.kind == "table"
    assert make_splits(workspace).images.total() == 1


def test_options_take_the_place_of_what_the_manifest_names(here: Path):
    (here / "dataset_coco.json").write_text(
        '{"images": [{"filename": "a.jpg", "split": "train", "sentences": [{"raw": "a cat"}]}]}'
    )
    workspace = initialise(
        Path("work"), dataset="coco", images=Path("photos"), captions=[Path("dataset_coco.json")]
    )
    assert workspace.dataset.name == "coco"
    assert workspace.dataset.defaults.min_count == 6
    assert make_splits(workspace).images.total() == 1


def test_scenes_need_nothing_and_take_no_files(here: Path):
    assert initialise(Path("work"), dataset="scenes").dataset.images.kind == "scenes"
    with pytest.raises(InputError, match="is drawn"):
        initialise(Path("other"), dataset="scenes", images=Path("photos"))


@pytest.mark.parametrize("name", ["coco", "flickr8k", "flickr30k"])
def test_absent_files_of_a_known_dataset_are_listed_with_address_and_place(here: Path, name: str):
    with pytest.raises(MissingError) as caught:
        initialise(Path("work"), dataset=name)
    message = str(caught.value)
    assert f"dataset_{name}.json" in message
    assert "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip" in message
    assert "36,745,453 bytes" in message
    assert f"-> {here / 'work'}" in message
    assert "--images FOLDER --captions FILE" in message
    assert "Licence: " in message
    assert not Path("work").exists()


def test_the_same_dataset_may_be_made_again_and_another_not(here: Path):
    first = initialise(Path("work"), images=Path("photos"))
    before = (here / "work/workspace.yaml").stat().st_mtime_ns
    assert initialise(Path("work"), images=Path("photos")) == first
    assert (here / "work/workspace.yaml").stat().st_mtime_ns == before
    with pytest.raises(InputError, match="holds another workspace already"):
        initialise(Path("work"), dataset="scenes")


def test_nothing_to_start_from_names_what_there_is(here: Path):
    with pytest.raises(InputError, match=r"--dataset NAME \(coco, flickr30k, flickr8k, scenes"):
        initialise(Path("work"))
    with pytest.raises(InputError, match="--images FOLDER"):
        initialise(Path("work"), captions=[Path("table.csv")])


def test_a_misspelt_dataset_names_the_nearest(here: Path):
    with pytest.raises(ManifestError, match="Did you mean 'scenes'"):
        initialise(Path("work"), dataset="scense")


@pytest.mark.parametrize("images", ["nowhere", "table.csv", "empty", "hidden"])
def test_a_folder_that_is_none_or_empty_is_refused(here: Path, images: str):
    (here / "empty/inner").mkdir(parents=True)
    (here / "hidden/.git").mkdir(parents=True)
    (here / "hidden/.git/x.jpg").touch()
    with pytest.raises((InputError, MissingError), match=images):
        initialise(Path("work"), images=Path(images))
    assert not Path("work").exists()


def test_missing_captions_are_named(here: Path):
    with pytest.raises(MissingError, match=r"nowhere.json\n.*Check --images and --captions"):
        initialise(Path("work"), images=Path("photos"), captions=[Path("nowhere.json")])


def test_a_file_for_a_folder_and_a_folder_for_a_file_are_told_as_such(here: Path):
    with pytest.raises(InputError, match=r"table\.csv: is a file, not a folder\n.*--images"):
        initialise(Path("work"), images=Path("table.csv"))
    with pytest.raises(InputError, match=r"photos: is a folder, not a file\n.*--captions"):
        initialise(Path("work"), images=Path("photos"), captions=[Path("photos")])
    assert not Path("work").exists()


def test_captions_of_no_known_format_are_refused(here: Path):
    Path("notes.txt").write_text("just notes\n")
    with pytest.raises(InputError, match=r"notes.txt: has no column .*\n.*Known: Karpathy"):
        initialise(Path("work"), images=Path("photos"), captions=[Path("notes.txt")])
    assert not Path("work").exists()


def test_captions_of_two_formats_are_refused(here: Path):
    Path("c.json").write_text('{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": []}')
    with pytest.raises(InputError, match=r"'.*table.csv' is table, '.*c.json' is coco"):
        initialise(
            Path("work"), images=Path("photos"), captions=[Path("table.csv"), Path("c.json")]
        )


def test_a_format_other_than_the_manifests_is_refused(here: Path):
    yaml = here / "mine.yaml"
    yaml.write_text(
        "summary: Mine.\nimages: {root: photos}\ncaptions: {kind: coco, files: [table.csv]}\n"
    )
    with pytest.raises(InputError, match="is table, not coco as the manifest says"):
        initialise(Path("work"), dataset=str(yaml))


MINE = "summary: Mine.\nimages: {root: photos}\n"


def test_unknown_names_among_the_defaults_are_told_together(here: Path):
    yaml = here / "mine.yaml"
    yaml.write_text(
        f"{MINE}defaults: {{detector: boxs, backbone: convnext_lage, model: zodiak, preset: x}}\n"
    )
    with pytest.raises(ManifestError) as caught:
        initialise(Path("work"), dataset=str(yaml))
    message = str(caught.value)
    assert message.startswith(f"{yaml}: defaults.detector: unknown detector 'boxs'. Did you mean")
    assert "defaults.backbone: unknown backbone 'convnext_lage'. Did you mean" in message
    assert "defaults.model: unknown model 'zodiak'. Did you mean 'zodiac'" in message
    assert not Path("work").exists()


@pytest.mark.parametrize(
    ("defaults", "fault"),
    [
        ("model: zodiac, preset: smal", "unknown preset 'smal'. Did you mean 'small'"),
        ("backbone: 'tim:resnet18'", "'tim:resnet18' names no backbone"),
    ],
)
def test_a_preset_or_library_that_is_none_is_refused(here: Path, defaults: str, fault: str):
    yaml = here / "mine.yaml"
    yaml.write_text(f"{MINE}defaults: {{{defaults}}}\n")
    with pytest.raises(ManifestError) as caught:
        initialise(Path("work"), dataset=str(yaml))
    assert fault in str(caught.value)


def test_names_that_later_commands_know_are_accepted_as_defaults(here: Path):
    yaml = here / "mine.yaml"
    names = "detector: mine/boxes.yaml, backbone: 'timm:resnet18', model: zodiac, preset: small"
    yaml.write_text(f"{MINE}defaults: {{{names}}}\n")
    assert initialise(Path("work"), dataset=str(yaml)).dataset.defaults.preset == "small"


def test_a_yaml_without_images_asks_for_them(here: Path):
    yaml = here / "mine.yaml"
    yaml.write_text("summary: Mine.\n")
    with pytest.raises(InputError, match="--images FOLDER"):
        initialise(Path("work"), dataset=str(yaml))


@pytest.mark.parametrize("folder", ["été 2024", "_x", "...", "-", "a b"])
def test_any_folder_name_gives_a_manifest_that_loads_again(here: Path, folder: str):
    images = here / "in" / folder
    images.mkdir(parents=True)
    Image.new("RGB", (8, 6)).save(images / "a.jpg")
    workspace = initialise(Path("work"), images=images)
    assert Workspace.open(workspace.root) == workspace


def test_a_folder_whose_name_is_no_utf8_works(here: Path):
    images = Path(str(here / "in") + "\udce9")
    images.mkdir()
    Image.new("RGB", (8, 6)).save(images / "a.jpg")
    initialise(Path("work"), images=images)
    assert make_splits(Workspace.open(here / "work")).images.total() == 1
