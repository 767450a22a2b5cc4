"""Tables of images and captions: the same every time, or a refusal that says what and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from regionprep.errors import InputError, MissingError, StorageError
from regionprep.manifests import DatasetManifest, ImageSource, SplitRule
from regionprep.pipeline.captions import Entry
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.splits import (
    SplitsOutcome,
    _drawn,
    dataset_fingerprint,
    make_splits,
    read_captions,
    read_images,
)
from regionprep.workspace import Workspace


def photograph(path: Path, size: tuple[int, int] = (8, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path, format="PNG")


def karpathy(split: str, number: int, **more: Any) -> dict[str, Any]:
    sentences = [{"tokens": ["a", f"w{number}"], "raw": f"A w{number}.", "sentid": number}]
    image = {"filename": f"{number}.jpg", "cocoid": number, "split": split, "sentences": sentences}
    return image | more


class Place:
    """A folder with images and a caption file, and the workspace over them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = root / "images"
        self.captions = root / "captions.json"

    def karpathy(self, *images: dict[str, Any]) -> Workspace:
        for image in images:
            photograph(self.images / image.get("filepath", "") / image["filename"])
        self.captions.write_text(json.dumps({"images": images}))
        return self.workspace()

    def table(self, *rows: str) -> Workspace:
        for row in rows:
            photograph(self.images / row.split(",")[0])
        self.captions = self.root / "table.csv"
        self.captions.write_text("\n".join(["path,caption,split", *rows]) + "\n")
        return self.workspace()

    def workspace(self) -> Workspace:
        return initialise(self.root / "work", images=self.images, captions=[self.captions])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def bytes_of(workspace: Workspace) -> dict[str, bytes]:
    files = sorted(workspace.root.iterdir())
    return {file.name: file.read_bytes() for file in files if file.name != ".lock"}


FOUR = [karpathy(split, n) for n, split in enumerate(["train", "restval", "val", "test"], start=9)]


def test_karpathys_splits_are_kept_and_restval_joins_train(place: Place):
    outcome = make_splits(place.karpathy(*FOUR))
    images = read_images(outcome.workspace)
    assert [(i.image_id, i.path, i.width, i.height, i.split) for i in images] == [
        ("10", "10.jpg", 8, 6, "train"),
        ("11", "11.jpg", 8, 6, "val"),
        ("12", "12.jpg", 8, 6, "test"),
        ("9", "9.jpg", 8, 6, "train"),
    ], "sorted by image_id, which is text"
    assert outcome.images == Counter(train=2, val=1, test=1)
    assert "1 images of restval, now in train" in str(outcome)


def test_without_restval_its_images_are_left_out_and_counted(place: Place):
    outcome = make_splits(place.karpathy(*FOUR), restval=False)
    assert outcome.images == Counter(train=1, val=1, test=1)
    assert "left out: 1 images of restval" in str(outcome)
    assert {caption.image_id for caption in read_captions(outcome.workspace)} == {"9", "11", "12"}


def test_a_choice_is_kept_until_another_is_made(place: Place):
    workspace = place.karpathy(*FOUR)
    make_splits(workspace, restval=False)
    again = make_splits(Workspace.open(workspace.root))
    assert not again.changed
    assert make_splits(Workspace.open(workspace.root), restval=True).images["train"] == 2


def test_captions_keep_their_order_and_given_tokens(place: Place):
    sentences = [
        {"tokens": ["zebra"], "raw": "Raw is not read: tokens are given", "sentid": 5},
        {"raw": "Don't STOP!", "sentid": 4},
    ]
    workspace = place.karpathy(karpathy("train", 1, sentences=sentences))
    make_splits(workspace)
    captions = read_captions(workspace)
    assert [(c.caption_id, list(c.tokens)) for c in captions] == [
        ("5", ["zebra"]),
        ("4", ["do", "n't", "stop"]),
    ]
    assert captions[0].text == "Raw is not read: tokens are given"


def test_a_second_run_changes_no_byte_and_says_so(place: Place):
    workspace = place.karpathy(*FOUR)
    assert make_splits(workspace).changed
    before = bytes_of(workspace)
    stamps = [path.stat().st_mtime_ns for path in sorted(workspace.root.iterdir())]
    outcome = make_splits(workspace)
    assert not outcome.changed
    assert "nothing has changed" in str(outcome)
    assert bytes_of(workspace) == before
    assert [path.stat().st_mtime_ns for path in sorted(workspace.root.iterdir())] == stamps


def test_folders_that_the_file_hints_at_are_used_where_they_exist(place: Place):
    with_folder = [karpathy("train", 1, filepath="val2014"), karpathy("val", 2, filepath="val2014")]
    workspace = place.karpathy(*with_folder)
    make_splits(workspace)
    assert [image.path for image in read_images(workspace)] == ["val2014/1.jpg", "val2014/2.jpg"]
    inner = initialise(
        place.root / "inner", images=place.images / "val2014", captions=[place.captions]
    )
    make_splits(inner)
    assert [image.path for image in read_images(inner)] == ["1.jpg", "2.jpg"]


def test_sizes_come_from_the_files_and_annotations_that_differ_are_noted(place: Place):
    photograph(place.images / "a.jpg", (30, 20))
    images = [{"id": 1, "file_name": "a.jpg", "width": 20, "height": 30}]
    annotations = [{"id": 1, "image_id": 1, "caption": "a thing"}]
    place.captions.write_text(json.dumps({"images": images, "annotations": annotations}))
    outcome = make_splits(place.workspace(), val=0)
    [image] = read_images(outcome.workspace)
    assert (image.width, image.height) == (30, 20)
    assert "noted: 1 images of another size than their annotation" in str(outcome)


def test_missing_images_are_refused_with_count_names_and_advice(place: Place):
    workspace = place.karpathy(*[karpathy("train", n) for n in range(10, 20)])
    for number in range(10, 17):
        (place.images / f"{number}.jpg").unlink()
    with pytest.raises(InputError) as caught:
        make_splits(workspace)
    message = str(caught.value)
    assert "7 images with captions, but no such file (10.jpg, 11.jpg" in message
    assert "14.jpg, ...)" in message
    assert "--skip-unmatched" in message
    assert not workspace.images.exists()
    outcome = make_splits(workspace, skip_unmatched=True)
    assert outcome.images == Counter(train=3)
    assert "left out: 7 images with captions, but no such file" in str(outcome)


def test_a_wrong_folder_is_refused_even_when_unmatched_images_are_skipped(place: Place):
    workspace = place.karpathy(*FOUR)
    for image in place.images.iterdir():
        image.rename(image.with_name("other-" + image.name))
    with pytest.raises(InputError, match="4 images with captions") as caught:
        make_splits(workspace, skip_unmatched=True)
    assert "skip" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", "?!...", "\u200b", "\x07"])
def test_captions_without_a_word_are_dropped_and_counted(place: Place, text: str):
    images = [
        karpathy("train", 1, sentences=[{"raw": text}, {"raw": "a cat"}]),
        karpathy("train", 2, sentences=[{"raw": text}]),
    ]
    workspace = place.karpathy(*images)
    with pytest.raises(InputError, match=r"1 images without captions \(2.jpg\)"):
        make_splits(workspace)
    outcome = make_splits(workspace, skip_unmatched=True)
    assert outcome.left_out["captions without a word"] == 2
    assert outcome.images == Counter(train=1)


@pytest.mark.parametrize(
    "text",
    ["word " * 10_000, "一只猫", "кот на столе", "a cat 😀", "one\r\ntwo\rthree", "tab\tnull\0"],
)
def test_captions_of_any_script_and_length_are_kept(place: Place, text: str):
    workspace = place.karpathy(karpathy("train", 1, sentences=[{"raw": text}]))
    make_splits(workspace)
    [caption] = read_captions(workspace)
    assert caption.text == text
    assert caption.tokens
    assert not any(word.isspace() or not word for word in caption.tokens)


def test_files_that_a_table_does_not_mention_are_images_without_captions(place: Place):
    workspace = place.table("a.jpg,one,train", "sub/b.jpg,two,val")
    photograph(place.images / "c.jpg")
    photograph(place.images / "elsewhere/d.jpg")
    (place.images / "notes.txt").write_text("no image")
    with pytest.raises(InputError, match=r"1 files in the folder .* without captions \(c.jpg\)"):
        make_splits(workspace)
    assert make_splits(workspace, skip_unmatched=True).images == Counter(train=1, val=1)


def test_files_that_published_splits_leave_out_are_only_noted(place: Place):
    workspace = place.karpathy(*FOUR)
    photograph(place.images / "unlisted.jpg")
    assert "noted: 1 image files that the splits do not list" in str(make_splits(workspace))


def test_an_image_that_cannot_be_used_keeps_its_row_and_is_counted(place: Place):
    workspace = place.karpathy(*FOUR)
    (place.images / "9.jpg").write_bytes(b"no image")
    (place.images / "11.jpg").write_bytes(b"")
    outcome = make_splits(workspace)
    assert outcome.unusable == Counter(not_an_image=2)
    assert "2 not_an_image" in str(outcome)
    sizes = {image.image_id: (image.width, image.height) for image in read_images(workspace)}
    assert sizes == {"9": (0, 0), "10": (8, 6), "11": (0, 0), "12": (8, 6)}


@pytest.mark.parametrize("path", ["../out.jpg", "/etc/passwd", "a/../../out.jpg", "a\0.jpg"])
def test_a_path_out_of_the_folder_is_refused_with_its_line(place: Place, path: str):
    place.images.mkdir()
    photograph(place.images / "a.jpg")
    place.captions.write_text(json.dumps({"path": path, "caption": "x"}))
    with pytest.raises(InputError, match="leads out of the folder of images") as caught:
        make_splits(place.workspace())
    assert "line 1" in str(caught.value)


def test_absolute_paths_inside_the_folder_become_relative(place: Place):
    photograph(place.images / "sub/a.jpg")
    row = {"path": str(place.images / "sub/a.jpg"), "caption": "x", "split": "train"}
    place.captions.write_text(json.dumps({**row, "image_id": "one"}))
    workspace = place.workspace()
    make_splits(workspace)
    assert [image.path for image in read_images(workspace)] == ["sub/a.jpg"]


@pytest.mark.parametrize(
    ("first", "second"), [("7", "007"), ("caf\u00e9", "cafe\u0301"), ("0", "00")]
)
def test_ids_that_are_the_same_once_written_alike_are_refused(
    place: Place, first: str, second: str
):
    for number, name in enumerate((first, second)):
        photograph(place.images / str(number) / f"{name}.png")
    rows = [
        {"path": f"{number}/{name}.png", "image_id": name, "caption": "x", "split": "train"}
        for number, name in enumerate((first, second))
    ]
    place.captions.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError) as caught:
        make_splits(place.workspace())
    assert f"'{first}' is '0/{first}.png'" in str(caught.value)
    assert f"'{second}' is '1/{second}.png'" in str(caught.value)


def test_one_file_under_two_ids_is_refused_for_it_could_be_in_two_splits(place: Place):
    photograph(place.images / "a.jpg")
    rows = [
        {"path": path, "image_id": number, "caption": "x", "split": split}
        for number, path, split in ((1, "a.jpg", "train"), (2, "./a.jpg", "test"))
    ]
    place.captions.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError, match=r"'a.jpg' has two ids: '1' \(.*line 1\) and '2' \("):
        make_splits(place.workspace())


def test_a_source_without_splits_asks_to_draw_them(place: Place):
    workspace = place.table("a.jpg,one,", "b.jpg,two,")
    with pytest.raises(InputError, match=r"2 of 2 images have no split .*\n.*--val N --test N"):
        make_splits(workspace)
    with pytest.raises(InputError, match="a seed alone draws neither"):
        make_splits(workspace, seed=1)
    outcome = make_splits(workspace, val=1, seed=1)
    assert outcome.images == Counter(train=1, val=1)
    assert not make_splits(Workspace.open(workspace.root)).changed


def test_drawing_more_than_there_is_is_refused_and_changes_no_choice(place: Place):
    workspace = place.karpathy(*FOUR)
    before = bytes_of(workspace)
    with pytest.raises(InputError, match="from 4"):
        make_splits(workspace, val=3, test=2)
    assert bytes_of(workspace) == before


@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=40, unique=True),
    st.integers(0, 10),
    st.integers(0, 10),
    st.integers(0, 3),
    st.randoms(),
)
def test_drawn_splits_part_the_images_whatever_their_order(ids, val, test, seed, random):
    entries = [Entry(image_id, image_id, "here") for image_id in ids]
    rule = SplitRule(kind="drawn", seed=seed, val=val, test=test)
    if val + test > len(ids):
        with pytest.raises(InputError):
            _drawn(entries, rule)
        return
    drawn = {entry.image_id: entry.split for entry in _drawn(entries, rule)}
    sizes = Counter(drawn.values())
    assert (sizes["val"], sizes["test"], sizes.total()) == (val, test, len(ids))
    random.shuffle(entries)
    assert {entry.image_id: entry.split for entry in _drawn(entries, rule)} == drawn


def test_another_seed_draws_other_splits():
    entries = [Entry(str(n), str(n), "here") for n in range(100)]
    held = [
        {e.image_id for e in _drawn(entries, SplitRule(seed=s, val=50)) if e.split == "val"}
        for s in (0, 1)
    ]
    assert held[0] != held[1]


def test_train_can_be_limited(place: Place):
    outcome = make_splits(place.karpathy(*FOUR), train=1, val=1)
    assert outcome.images == Counter(train=1, val=1)
    assert outcome.left_out["images that no split drew"] == 2


def bare(tmp_path: Path, *names: str) -> Workspace:
    for name in names:
        photograph(tmp_path / "images" / name)
    return initialise(tmp_path / "work", images=tmp_path / "images")


def test_a_bare_folder_is_one_split_and_has_no_captions(tmp_path: Path):
    names = ("b.JPG", "sub/deep/a.png", "no ending", "page.html", ".hidden.png", ".git/x.png")
    workspace = bare(tmp_path, *names)
    outcome = make_splits(workspace)
    images = read_images(workspace)
    assert [(i.image_id, i.path, i.split) for i in images] == [
        ("b", "b.JPG", "all"),
        ("sub/deep/a", "sub/deep/a.png", "all"),
    ]
    assert outcome.left_out == Counter({"files that are not named like images": 2})
    assert not workspace.captions.exists()
    with pytest.raises(MissingError, match="images only, and no captions"):
        read_captions(workspace)


def test_a_bare_folder_can_be_split_by_a_seed(tmp_path: Path):
    outcome = make_splits(bare(tmp_path, *(f"{n}.png" for n in range(10))), val=2, test=3)
    assert outcome.images == Counter(train=5, val=2, test=3)


def test_two_files_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"'x/a' is 'x/a.jpg' .* 'x/a' is 'x/a.png'"):
        make_splits(bare(tmp_path, "x/a.jpg", "x/a.png"))


def test_a_folder_without_images_is_refused(tmp_path: Path):
    workspace = bare(tmp_path, "a.jpg")
    (tmp_path / "images/a.jpg").rename(tmp_path / "images/a.txt")
    with pytest.raises(InputError, match=r"holds no images\n.*\.jpg"):
        make_splits(workspace)
    (tmp_path / "images").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="no such folder of images"):
        make_splits(workspace)


def test_links_and_odd_names_in_a_folder_get_a_row_each(tmp_path: Path):
    workspace = bare(tmp_path, "a b'c\"\n.png", os.fsdecode(b"latin-\xe9.png"), "good.png")
    outside = tmp_path / "secret.png"
    photograph(outside)
    (tmp_path / "images/out.png").symlink_to(outside)
    (tmp_path / "images/dangling.png").symlink_to("nowhere.png")
    (tmp_path / "images/again").symlink_to(tmp_path / "images")
    outcome = make_splits(workspace)
    assert outcome.images == Counter(all=5)
    assert outcome.unusable == Counter(outside_root=1, missing=1)
    assert outcome.left_out == Counter({"files that are not named like images": 1})
    assert "bytes:latin-%E9.png" in [image.path for image in read_images(workspace)]


def test_a_bomb_and_several_frames_are_told_apart(tmp_path: Path):
    workspace = bare(tmp_path, "bomb.png", "good.png")
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "images/film.gif", save_all=True, append_images=frames[1:])
    photograph(tmp_path / "images/bomb.png", (100, 100))
    small = ImageSource(root=workspace.dataset.images.root, max_pixels=1000)
    workspace = replace(workspace, dataset=workspace.dataset.model_copy(update={"images": small}))
    outcome = make_splits(workspace)
    assert outcome.unusable == Counter(too_large=1)
    assert "noted: 1 images of several frames or pages" in str(outcome)


def test_scenes_take_their_splits_in_order_and_need_no_files(tmp_path: Path):
    workspace = initialise(tmp_path / "work", dataset="scenes")
    outcome = make_splits(workspace, train=5, val=2, test=1)
    assert [(i.image_id, i.split) for i in read_images(workspace)] == [
        (f"scene-{n:06d}", split) for n, split in enumerate(["train"] * 5 + ["val"] * 2 + ["test"])
    ]
    assert outcome.captions == 40
    assert all(caption.tokens for caption in read_captions(workspace))
    with pytest.raises(InputError, match=r"images\.seed"):
        make_splits(workspace, seed=1)


def test_tables_are_plain_parquet_without_nulls(place: Place):
    workspace = place.karpathy(*FOUR)
    make_splits(workspace)
    images, captions = pq.read_table(workspace.images), pq.read_table(workspace.captions)
    assert images.schema.names == ["image_id", "path", "width", "height", "split"]
    assert captions.schema.names == ["image_id", "caption_id", "text", "tokens"]
    for table in (images, captions):
        assert not any(field.nullable for field in table.schema)
        assert table["image_id"].to_pylist() == sorted(table["image_id"].to_pylist())


def test_readers_name_the_command_that_is_missing(place: Place):
    workspace = place.karpathy(*FOUR)
    for reader in (read_images, read_captions, dataset_fingerprint):
        with pytest.raises(MissingError, match="prep splits"):
            reader(workspace)


def test_the_fingerprint_follows_the_content_and_not_the_time(place: Place):
    first = make_splits(place.karpathy(*FOUR)).workspace
    before = dataset_fingerprint(first)
    second = initialise(place.root / "copy", images=place.images, captions=[place.captions])
    make_splits(second)
    assert dataset_fingerprint(second) == before
    make_splits(second, restval=False)
    assert dataset_fingerprint(second) != before


def test_tables_of_two_runs_are_not_read_together(place: Place):
    workspace = place.karpathy(*FOUR)
    make_splits(workspace)
    old = workspace.captions.read_bytes()
    make_splits(workspace, restval=False)
    workspace.captions.write_bytes(old)
    with pytest.raises(StorageError, match=r"for other images .*\n.*prep splits"):
        read_captions(workspace)
    assert make_splits(Workspace.open(workspace.root)).changed
    assert len(read_captions(workspace)) == 3


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_table_is_refused_or_reads_the_same(place: Place, data):
    if not (place.root / "work/images.parquet").exists():
        make_splits(place.karpathy(*FOUR))
    workspace = Workspace.open(place.root / "work")
    whole = workspace.images.read_bytes()
    expected = read_images(workspace)
    torn = bytearray(whole)
    if data.draw(st.booleans()):
        del torn[data.draw(st.integers(0, len(torn) - 1)) :]
    else:
        torn[data.draw(st.integers(0, len(torn) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    workspace.images.write_bytes(torn)
    try:
        assert read_images(workspace) == expected
    except StorageError as error:
        assert "prep splits" in str(error)
    finally:
        workspace.images.write_bytes(whole)


KILL_AND_FINISH = """
import hashlib, os, signal, sys, time
from pathlib import Path
import pyarrow
from PIL import Image
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.vocab import make_vocabulary
from regionprep.workspace import Workspace

root, kills = Path(sys.argv[1]), int(sys.argv[2])
# What is imported on first use is imported once, not by every child.
pyarrow.array([0])
Image.preinit()

def run(restval):
    make_splits(Workspace.open(root), restval=restval)
    make_vocabulary(Workspace.open(root), min_count=1)

def run_for_ever():
    while True:
        run(False)
        run(True)

def start(action, *arguments):
    process = os.fork()
    if process == 0:
        action(*arguments)
        os._exit(0)
    return process

for kill in range(kills + 1):
    if kill:
        process = start(run_for_ever)
        time.sleep(0.003 * kill)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert os.waitpid(start(run, True), 0)[1] == 0
    content = [(file.name, file.read_bytes()) for file in sorted(root.iterdir())
        if file.name != ".lock"]
    print([name for name, _ in content], hashlib.sha256(repr(content).encode()).hexdigest())
"""


def test_killed_at_any_moment_and_run_again_gives_the_same_bytes(place: Place):
    """Every kill hits a run that writes all files over and over, at a moment of its own."""
    workspace = place.karpathy(*FOUR)
    kills = 25
    command = [sys.executable, "-c", KILL_AND_FINISH, str(workspace.root), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    undisturbed, *disturbed = done.stdout.splitlines()
    assert "['captions.parquet', 'images.parquet', 'vocab.json', 'workspace.yaml']" in undisturbed
    assert disturbed == [undisturbed] * kills


def test_the_real_sample_gives_its_published_splits(shared_data: Path, tmp_path: Path):
    folder = shared_data / "coco_sample"
    captions = [folder / "karpathy.json"]
    workspace = initialise(tmp_path / "k", images=folder / "images", captions=captions)
    outcome: SplitsOutcome = make_splits(workspace)
    assert outcome.images == Counter(train=180, val=30, test=30)
    assert make_splits(workspace, restval=False).images == Counter(train=60, val=30, test=30)
    assert not outcome.unusable
    coco = initialise(tmp_path / "c", images=folder / "images", captions=[folder / "captions.json"])
    drawn = make_splits(coco, val=40, test=20)
    assert drawn.images == Counter(train=180, val=40, test=20)
    assert not drawn.notes, "every size in the annotations is the file's"
    assert drawn.captions == outcome.captions


def test_a_manifest_of_scenes_without_captions_makes_images_only(tmp_path: Path):
    source = ImageSource(kind="scenes")
    manifest = DatasetManifest(name="x", summary="x", images=source, splits=SplitRule(train=3))
    workspace = Workspace.create(tmp_path / "work", manifest)
    outcome = make_splits(workspace)
    assert outcome.images == Counter(train=3)
    assert outcome.captions == 0
