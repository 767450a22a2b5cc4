"""Captions as people keep them: every format gives the same entries, and faults are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from regionprep.errors import InputError
from regionprep.pipeline.captions import Caption, Entry, detect, read

KARPATHY = {
    "dataset": "mine",
    "images": [
        {
            "filepath": "val2014",
            "filename": "a.jpg",
            "imgid": 0,
            "cocoid": 7,
            "split": "restval",
            "sentids": [1, 2],
            "sentences": [
                {"tokens": ["a", "cat"], "raw": "A cat.", "imgid": 0, "sentid": 1},
                {"tokens": ["two", "cats"], "raw": "Two cats!", "imgid": 0, "sentid": 2},
            ],
        },
        {"filename": "b.b.jpg", "split": "test", "sentences": [{"raw": "a dog"}]},
    ],
}
COCO: dict[str, Any] = {
    "info": {},
    "images": [
        {"id": 7, "file_name": "a.jpg", "width": 4, "height": 3},
        {"id": 8, "file_name": "b.jpg", "coco_url": "http://images.org/val2017/b.jpg"},
    ],
    "annotations": [
        {"id": 1, "image_id": 8, "caption": "a dog"},
        {"id": 2, "image_id": 7, "caption": "A cat."},
        {"id": 3, "image_id": 7, "caption": "Two cats!"},
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "captions_val2014.json"


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def entries(path: Path) -> list[Entry]:
    return read(detect(path), [path])


def test_karpathys_json_gives_ids_splits_and_tokens(file: Path):
    first, second = entries(write(file, KARPATHY))
    assert (first.image_id, first.folder, first.path, first.split) == (
        "7",
        "val2014",
        "a.jpg",
        "restval",
    )
    assert first.captions[1] == Caption("2", "Two cats!", ["two", "cats"])
    assert (second.image_id, second.split) == ("b.b", "test")
    assert second.captions == [Caption("b.b#0", "a dog", None)]


def test_coco_annotations_give_ids_sizes_and_the_split_of_their_name(file: Path, capsys):
    first, second = entries(write(file, COCO))
    assert (first.image_id, first.path, first.size, first.split) == ("7", "a.jpg", (4, 3), "val")
    assert first.captions == [Caption("2", "A cat."), Caption("3", "Two cats!")]
    assert (second.image_id, second.folder, second.size) == ("8", "val2017", None)
    assert capsys.readouterr() == ("", ""), "pycocotools prints its progress"


@pytest.mark.parametrize(
    ("name", "split"),
    [("captions_train2014.json", "train"), ("test.json", "test"), ("latest_contest.json", "")],
)
def test_only_whole_words_of_the_name_are_splits(tmp_path: Path, name: str, split: str):
    assert entries(write(tmp_path / name, COCO))[0].split == split


@pytest.mark.parametrize("path", ["path", "image", "file_name"])
@pytest.mark.parametrize("text", ["caption", "text"])
def test_json_lines_and_csv_give_the_same(tmp_path: Path, path: str, text: str):
    rows = [
        {path: "x/a.jpg", text: "A cat.", "split": "train", "image_id": 7, "more": 1},
        {path: "b.b.jpg", text: "a dog", "split": "dev", "image_id": "", "more": 2},
        {path: "x/a.jpg", text: "Two, cats!", "split": "train", "image_id": 7, "more": 3},
    ]
    lines = write(tmp_path / "table.txt", "\n".join(map(json.dumps, rows)))
    table = write(
        tmp_path / "table.csv",
        ",".join(rows[0]) + "\n" + "".join(
            ",".join(f'"{value}"' for value in row.values()) + "\n" for row in rows
        ),
    )  # fmt: skip
    assert detect(lines) == detect(table) == "table"
    for found in (entries(lines), entries(table)):
        assert [(e.image_id, e.path, e.split) for e in found] == [
            ("7", "x/a.jpg", "train"),
            ("b.b", "b.b.jpg", "val"),
        ]
        assert found[0].captions == [Caption("7#0", "A cat."), Caption("7#1", "Two, cats!")]


def test_json_lines_may_list_captions(file: Path):
    write(file, '{"path": "a.jpg", "caption": ["one", "two"]}')
    assert [caption.text for caption in entries(file)[0].captions] == ["one", "two"]


@pytest.mark.parametrize("indent", [None, 1])
def test_the_format_is_told_from_the_content_alone(tmp_path: Path, indent: int | None):
    for kind, data in (("karpathy", KARPATHY), ("coco", COCO)):
        path = write(tmp_path / "nameless", json.dumps(data, indent=indent))
        assert detect(path) == kind
    late = {"info": "x" * 100_000, **COCO}
    assert detect(write(tmp_path / "nameless", json.dumps(late, indent=indent))) == "coco"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ('{"a": 1}', "is JSON of no known kind, with keys a"),
        ("just some words\n", "has no column path or image or file_name in its first line"),
        ("path,label\na.jpg,cat\n", "has no column caption or text in its first line"),
        ('[{"image": "a.jpg", "caption": "x"}]', "has no column path"),
        ('{"images": [], "images": []}', "line 1: the key 'images' is there twice"),
        ("\0\1", "is no text"),
    ],
)
def test_an_unknown_format_is_refused_with_those_that_are_known(
    file: Path, content: str, reason: str
):
    with pytest.raises(InputError) as caught:
        detect(write(file, content))
    assert caught.value.what.startswith(reason)
    assert str(file) in str(caught.value)


def faults_of(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        entries(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("padding", [0, 100_000])
def test_boxes_are_not_taken_for_captions(file: Path, padding: int):
    boxes = [{"id": 1, "image_id": 7, "bbox": [0, 0, 1, 1]}] * 5
    data = {"info": "x" * padding, "images": COCO["images"], "annotations": boxes}
    with pytest.raises(InputError) as caught:
        detect(write(file, data))
    assert "these are boxes, not captions" in str(caught.value)
    assert f"prep detect --detector boxes --boxes {file}" in str(caught.value)


def test_annotations_without_captions_are_refused_with_their_places(file: Path):
    bare = [{"id": 1, "image_id": 7}] * 5
    write(file, {"images": COCO["images"], "annotations": bare})
    assert "annotations[0] has no 'caption'" in faults_of(file)
    write(file, {"images": COCO["images"], "annotations": [COCO["annotations"][0], *bare]})
    message = faults_of(file)
    assert "annotations[1].caption: Field required" in message
    assert "and 2 more" in message


def test_a_photograph_given_as_captions_is_no_text(tmp_path: Path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match=r"a\.jpg: is no text\n"):
        detect(tmp_path / "a.jpg")


def test_semicolons_between_columns_are_refused_with_the_reason(tmp_path: Path):
    path = write(tmp_path / "t.csv", "path;caption\na.jpg;a cat, a dog\n")
    with pytest.raises(InputError, match="by commas or tabs, not semicolons"):
        detect(path)


def test_an_id_that_is_there_twice_is_refused_with_both_names(file: Path):
    twice = [*COCO["images"], {"id": 7, "file_name": "other.jpg"}]
    message = faults_of(write(file, {**COCO, "images": twice}))
    assert "7 is there twice: 'a.jpg' and 'other.jpg'" in message
    karpathy = {"images": [KARPATHY["images"][0], {**KARPATHY["images"][0], "filename": "c.jpg"}]}
    message = faults_of(write(file, karpathy))
    assert "'7' is there twice" in message
    assert "'a.jpg'" in message
    assert "'c.jpg'" in message


def test_an_image_in_two_files_is_refused(tmp_path: Path):
    files = [write(tmp_path / f"captions_{split}.json", COCO) for split in ("train", "val")]
    with pytest.raises(InputError, match=r"is there twice.*captions_train.*captions_val"):
        read("coco", files)


def test_captions_of_images_that_are_not_listed_are_refused(file: Path):
    stray = [*COCO["annotations"], {"id": 9, "image_id": 99, "caption": "x"}]
    assert "such as id 99" in faults_of(write(file, {**COCO, "annotations": stray}))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["a.jpg,x,train", "a.jpg,y,val"], "two splits: 'train'"),
        (["a.jpg,x,train", "a.jpg,y,"], "two splits"),
        (["a.jpg,x,tain"], "unknown split 'tain'. Did you mean 'train'?"),
        ([",x,train"], "the path '' names no file"),
        (["/,x,train"], "the path '/' names no file"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(tmp_path: Path, rows: list[str], reason: str):
    path = write(tmp_path / "table.csv", "path,caption,split\n" + "\n".join(rows) + "\n")
    message = faults_of(path)
    assert reason in message
    assert "line" in message


def test_one_id_with_two_paths_is_refused_with_both_lines(tmp_path: Path):
    path = write(tmp_path / "t.csv", "image_id,path,caption\n1,a.jpg,x\n1,b.jpg,y\n")
    message = faults_of(path)
    assert "'a.jpg'" in message
    assert "line 2" in message
    assert "'b.jpg'" in message
    assert "line 3" in message


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"path": "a.jpg"}, "has no caption or text"),
        ({"path": "a.jpg", "image": "a.jpg", "caption": "x"}, "has both path and image"),
        ({"path": "a.jpg", "caption": 3}, "neither text nor a list"),
        ({"path": "a.jpg", "caption": ["x", None]}, "neither text nor a list"),
        ({"path": 3, "caption": "x"}, "no text"),
        ({"path": "a\ud800.jpg", "caption": "x"}, "cannot be written as UTF-8"),
        ({"path": "a.jpg", "caption": "x", "image_id": "\ud800"}, "cannot be written as UTF-8"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(file: Path, row: dict[str, object], reason: str):
    good = {"path": "z.jpg", "caption": "x"}
    message = faults_of(write(file, f"{json.dumps(good)}\n{json.dumps(row)}"))
    assert reason in message
    assert "line 2" in message


def test_half_a_surrogate_pair_in_a_caption_is_replaced(file: Path):
    write(file, '{"path": "a.jpg", "caption": "a \\ud800 cat \\ud83d\\ude00"}')
    assert entries(file)[0].captions[0].text == "a \ufffd cat \U0001f600"


def test_the_sample_of_coco_is_read_in_both_formats(shared_data: Path):
    folder = shared_data / "coco_sample"
    karpathy, coco = entries(folder / "karpathy.json"), entries(folder / "captions.json")
    splits = [entry.split for entry in karpathy]
    assert {name: splits.count(name) for name in set(splits)} == {
        "train": 60,
        "restval": 120,
        "val": 30,
        "test": 30,
    }
    texts = {entry.image_id: [caption.text for caption in entry.captions] for entry in coco}
    assert len(texts) == 240
    for entry in karpathy:
        assert [caption.text for caption in entry.captions] == texts[entry.image_id]
