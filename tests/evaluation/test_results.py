"""Captions on disk, in the format of COCO's own tools, and against a workspace's tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionprep.errors import InputError, MissingError
from regionprep.evaluation import evaluate, read_captions, read_references, write_captions
from regionprep.manifests import load
from regionprep.pipeline.tables import CaptionRecord, ImageRecord, write_tables
from regionprep.workspace import Workspace


def test_captions_come_back_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "captions.json"
    captions = {"42": "a dog", "007": "naïve “cat”", "scene-000001": ""}
    write_captions(file, captions)
    assert read_captions(file) == captions
    assert list(tmp_path.iterdir()) == [file]


def test_tokens_are_joined_and_order_does_not_matter(tmp_path: Path) -> None:
    write_captions(tmp_path / "one.json", {"1": ["a", "dog"], "2": "a cat"})
    write_captions(tmp_path / "two.json", {"2": ["a", "cat"], "1": "a dog"})
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_coco_tools_read_the_captions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pycocotools.coco import COCO

    annotations = {
        "info": {},
        "images": [{"id": 42}, {"id": 7}],
        "annotations": [{"id": 1, "image_id": 42, "caption": "a dog"}],
    }
    (tmp_path / "truth.json").write_text(json.dumps(annotations))
    write_captions(tmp_path / "captions.json", {"42": "a dog runs", "7": "a cat"})
    loaded = COCO(str(tmp_path / "truth.json")).loadRes(str(tmp_path / "captions.json"))
    assert loaded.imgToAnns[42][0]["caption"] == "a dog runs"


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=20)))
def test_any_id_and_text_survives(captions: dict[str, str]) -> None:
    import tempfile

    captions = {name: text for name, text in captions.items() if name.isprintable()}
    with tempfile.TemporaryDirectory() as folder:
        write_captions(Path(folder) / "captions.json", captions)
        assert read_captions(Path(folder) / "captions.json") == captions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not in COCO's results format: the whole"),
        ('[{"image_id": 1}]', r"\[0\]\['caption'\]: Field required"),
        ('[{"image_id": 1.5, "caption": "a"}]', r"\[0\]\['image_id'\]"),
        ('[{"image_id": 1, "caption": null}]', r"\[0\]\['caption'\]"),
        (
            '[{"image_id": 1, "caption": "a"},\n{"image_id": "1", "caption": "b"}]',
            "more than one.*'1'",
        ),
        ("[\n{]", "line 2"),
        ('[{"image_id": 1, "image_id": 1, "caption": "a"}]', "line 1.*twice"),
    ],
)
def test_other_files_are_refused_by_name_and_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "captions.json"
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_captions(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="prep caption"):
        read_captions(tmp_path / "captions.json")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace.create(tmp_path, load("datasets", "scenes"))
    images = [
        ImageRecord("one", "one.jpg", 4, 4, "test"),
        ImageRecord("two", "two.jpg", 4, 4, "test"),
        ImageRecord("three", "three.jpg", 4, 4, "train"),
    ]
    captions = [
        CaptionRecord("one", "1", "A dog's bowl.", ["a", "dogs", "bowl"]),
        CaptionRecord("one", "2", "The bowl", ["the", "bowl"]),
        CaptionRecord("three", "3", "A cat", ["a", "cat"]),
    ]
    order = sorted(range(3), key=lambda place: images[place].image_id)
    write_tables(workspace, [images[place] for place in order], captions)
    return workspace


def test_references_are_the_splits_texts_by_our_own_rule(workspace: Workspace) -> None:
    assert read_references(workspace, "test") == {
        "one": [["a", "dog", "'s", "bowl"], ["the", "bowl"]]
    }


def test_an_unknown_split_is_refused_with_the_nearest(workspace: Workspace) -> None:
    with pytest.raises(InputError, match=r"unknown split 'tset'\. Did you mean 'test'"):
        read_references(workspace, "tset")


def test_texts_and_tokens_score_the_same(workspace: Workspace) -> None:
    references = read_references(workspace, "test")
    by_text = evaluate({"one": "A dog's bowl!"}, references)
    by_tokens = evaluate({"one": ["a", "dog", "'s", "bowl"]}, references)
    assert by_text == by_tokens
    assert by_text.corpus["rouge_l"] == pytest.approx(1)
