"""Every shipped manifest loads, and a faulty one says all that is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from regionprep import manifests
from regionprep.errors import ManifestError
from regionprep.manifests import KINDS, DatasetManifest, load, names

SHIPPED = [(kind, name) for kind in KINDS for name in names(kind)]


@pytest.mark.parametrize(("kind", "name"), SHIPPED)
def test_every_shipped_manifest_loads_by_its_name(kind: str, name: str):
    manifest = load(kind, name)
    assert isinstance(manifest, KINDS[kind])
    assert manifest.name == name
    assert manifest.summary


def test_no_file_lies_beside_the_manifests_that_is_none():
    known = {manifests.root() / kind / f"{name}.yaml" for kind, name in SHIPPED}
    files = {path for path in manifests.root().rglob("*") if path.is_file()}
    strangers = {path for path in files - known if path.parent.name in KINDS}
    assert not strangers


def test_the_four_datasets_are_shipped():
    assert names("datasets") == ["coco", "flickr30k", "flickr8k", "scenes"]


@pytest.mark.parametrize("name", names("datasets"))
def test_downloads_have_an_address_and_facts_of_the_right_form(name: str):
    dataset: DatasetManifest = load("datasets", name)
    assert dataset.licence
    for download in dataset.downloads:
        assert re.match(r"https?://", download.url)
        assert download.bytes is None or download.bytes > 0
        assert download.md5 is None or re.fullmatch("[0-9a-f]{32}", download.md5)
        assert download.sha256 is None or re.fullmatch("[0-9a-f]{64}", download.sha256)


def test_scenes_take_the_sizes_of_the_embedded_dataset():
    from regionprep.scenes import SPLITS

    rule = load("datasets", "scenes").splits
    assert {"train": rule.train, "val": rule.val, "test": rule.test} == SPLITS


def test_the_defaults_of_datasets_name_manifests_that_are_there():
    for name in names("datasets"):
        defaults = load("datasets", name).defaults
        assert defaults.detector in names("detectors")
        assert defaults.backbone is None or defaults.backbone in names("backbones")
        assert defaults.model in names("models")
        assert defaults.preset in ("base", *load("models", defaults.model).presets)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def fault(file: Path, text: str, kind: str = "datasets") -> str:
    file.write_text(text)
    with pytest.raises(ManifestError) as caught:
        load(kind, str(file))
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_a_file_of_ones_own_takes_its_name(file: Path):
    file.write_text("summary: Mine.\nimages: {root: here}\n")
    assert load("datasets", str(file)).name == "mine"


def test_all_faults_are_told_together(file: Path):
    message = fault(file, "sumary: x\nimages: {root: 3, max_pixels: 0}\ncaptions: {kind: cocoa}\n")
    for place in ("sumary", "summary", "images.root", "images.max_pixels", "captions.kind"):
        assert place in message


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("summary: x\nlicense: y\n", "licence"),
        ("summary: x\nimages: {rot: y}\n", "root"),
        ("summary: x\ncaptions: {file: [y]}\n", "files"),
        ("summary: x\ndownloads: [{file: x, url: y, md: z}]\n", "md5"),
    ],
)
def test_an_unknown_key_names_the_nearest(file: Path, text: str, nearest: str):
    assert f"Did you mean '{nearest}'" in fault(file, text)


def test_an_unknown_name_names_the_nearest_and_all():
    with pytest.raises(ManifestError, match=r"unknown dataset 'flicker8k'.*'flickr8k'.*coco"):
        load("datasets", "flicker8k")


def test_a_missing_file_is_named(file: Path):
    with pytest.raises(ManifestError, match=r"mine\.yaml: no such file"):
        load("datasets", str(file))


@pytest.mark.parametrize(
    "text",
    [
        "summary: !!python/object/apply:os.system ['true']\n",
        "summary: !!python/name:os.system\n",
        "summary: [unclosed\n",
        "- a\n- list\n",
        "",
        "\x00",
    ],
)
def test_what_is_no_plain_mapping_is_refused_and_nothing_executed(file: Path, text: str):
    fault(file, text)


def test_a_path_is_no_name():
    for name in ("../datasets/coco", "datasets/coco", ""):
        with pytest.raises(ManifestError, match="unknown dataset"):
            load("datasets", name)


def test_manifests_come_back_from_what_a_workspace_writes():
    for name in names("datasets"):
        dataset = load("datasets", name)
        text = yaml.safe_dump(dataset.model_dump(mode="json"))
        assert manifests.parse(DatasetManifest, yaml.safe_load(text), where="x") == dataset
