"""Boxes made elsewhere: whose they are, which are dropped, what is told."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from regionprep import manifests
from regionprep.errors import InputError, MismatchError, StorageError
from regionprep.pipeline import detectors
from regionprep.pipeline.detect import detect_batch
from regionprep.pipeline.detectors.given import Boxes
from regionprep.pipeline.selection import Selection
from regionprep.pipeline.tables import ImageRecord

IMAGES = [
    ImageRecord("139", "val2017/000000000139.jpg", 100, 80, "train"),
    ImageRecord("COCO_val2014_000000000285", "COCO_val2014_000000000285.jpg", 100, 80, "train"),
    ImageRecord("dog", "pets/dog.png", 100, 80, "train"),
]


def pixels(count=1):
    return [np.zeros((80, 100, 3), np.uint8)] * count


def box(image_id, bbox=(10, 20, 30, 40), score=0.5, category=3):
    return {"image_id": image_id, "category_id": category, "bbox": list(bbox), "score": score}


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "boxes.json"
        path.write_text(json.dumps(content))
        return path

    return write


def found(boxes, image_id):
    [candidates] = boxes.detect(pixels(), [image_id])
    return candidates


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (139, "139"),
        ("139", "139"),
        ("000000000139.jpg", "139"),
        (285, "COCO_val2014_000000000285"),
        ("dog", "dog"),
        ("dog.png", "dog"),
    ],
)
def test_ids_of_the_file_find_the_tables_images(write, theirs, ours):
    boxes = Boxes(write([box(theirs)]), IMAGES)
    assert found(boxes, ours).boxes.tolist() == [[10, 20, 40, 60]]


def test_a_number_that_two_images_end_in_finds_neither(write):
    images = [
        *IMAGES,
        ImageRecord("a7", "a7.jpg", 100, 80, ""),
        ImageRecord("b7", "b7.jpg", 100, 80, ""),
    ]
    boxes = Boxes(write([box(7), box(139)]), images)
    assert len(found(boxes, "a7").boxes) == len(found(boxes, "b7").boxes) == 0


def test_an_image_listed_by_another_id_is_found_by_its_file_name(write):
    content = {
        "images": [{"id": 1, "file_name": "pets/dog.png", "width": 100, "height": 80}],
        "annotations": [box(1)],
        "categories": [{"id": 3, "name": "dog"}, {"id": 1, "name": "cat"}],
    }
    boxes = Boxes(write(content), IMAGES)
    assert boxes.classes == ("cat", "dog")
    assert found(boxes, "dog").scores.tolist() == [[0, 0.5]]
    assert len(found(boxes, "139").boxes) == 0


def test_an_image_without_boxes_has_no_regions(write):
    boxes = Boxes(write([box(139)]), IMAGES)
    [row] = detect_batch(pixels(), boxes, Selection(0, 100), ["dog"])
    assert row.ok
    assert row.boxes.shape == (0, 4)


def test_boxes_without_area_outside_or_not_finite_are_dropped_and_counted(write, caplog):
    bad = [
        box(139, (10, 10, 0, 5)),
        box(139, (10, 10, -5, 5)),
        box(139, (100, 10, 5, 5)),
        box(139, (-9, 10, 5, 5)),
        box(139, (float("nan"), 10, 5, 5)),
        box(139, (10, 10, float("inf"), 5)),
        box(139, (10, 10, 1e39, 5)),
        box(139, score=float("nan")),
    ]
    with caplog.at_level(logging.WARNING):
        boxes = Boxes(write([*bad, box(139)]), IMAGES)
    assert boxes.dropped == len(bad)
    assert "dropped 8 of 9 boxes" in caplog.text
    assert found(boxes, "139").boxes.tolist() == [[10, 20, 40, 60]]


def test_boxes_that_stand_out_are_clipped(write):
    boxes = Boxes(write([box(139, (-5, 70, 200, 50))]), IMAGES)
    assert boxes.dropped == 0
    assert found(boxes, "139").boxes.tolist() == [[0, 70, 100, 80]]


def test_boxes_are_taken_as_they_are_up_to_the_most(write):
    many = [box(139, (0, 0, 10 + i % 3, 10), score=(i % 7) / 7) for i in range(300)]
    boxes = Boxes(write(many), IMAGES)
    [row] = detect_batch(pixels(), boxes, Selection(0, 100), ["139"])
    assert len(row.boxes) == 100
    assert row.scores.min() >= np.float32(4 / 7)
    [row] = detect_batch(pixels(), boxes, Selection(0, 10_000), ["139"])
    assert len(row.boxes) == 300


def test_boxes_of_strangers_are_left_out_and_counted(write, caplog):
    with caplog.at_level(logging.WARNING):
        Boxes(write([box(139), box(999), box(998)]), IMAGES)
    assert "left out 2 of 3 boxes" in caplog.text


def test_a_file_of_other_images_is_refused(write):
    with pytest.raises(InputError, match=r"none of its images.*999, \.\.\. there, 139"):
        Boxes(write([box(999)]), IMAGES)


def test_boxes_of_another_size_are_refused(write):
    content = {
        "images": [{"id": 139, "file_name": "", "width": 80, "height": 100}],
        "annotations": [box(139)],
    }
    with pytest.raises(MismatchError, match="139 is 80 x 100 there, 100 x 80 here"):
        Boxes(write(content), IMAGES)


@pytest.mark.parametrize(
    "content",
    [
        {},
        [1],
        [{"image_id": 1}],
        [box(139, (1, 2, 3))],
        [box(139) | {"bbox": "wide"}],
        {"annotations": 3},
        "boxes",
    ],
)
def test_other_forms_are_told_what_is_known(write, content):
    with pytest.raises(InputError, match=r"in no known form(.|\n)*COCO results"):
        Boxes(write(content), IMAGES)


def test_what_is_no_json_is_told_with_its_line(tmp_path):
    (tmp_path / "boxes.json").write_text("[\n{]")
    with pytest.raises(InputError, match="line 2"):
        Boxes(tmp_path / "boxes.json", IMAGES)
    with pytest.raises(StorageError, match=r"gone\.json"):
        Boxes(tmp_path / "gone.json", IMAGES)


def test_without_a_file_the_option_is_told():
    with pytest.raises(InputError, match="--boxes FILE"):
        detectors.load(manifests.load("detectors", "boxes"))


def test_the_official_boxes_of_real_photographs(shared_data):
    folder = shared_data / "coco_sample"
    truth = json.loads((folder / "instances.json").read_text())
    images = [
        ImageRecord(str(image["id"]), image["file_name"], image["width"], image["height"], "")
        for image in truth["images"]
    ]
    boxes = Boxes(folder / "instances.json", images)
    names = {category["id"]: category["name"] for category in truth["categories"]}
    image = truth["images"][3]
    expected = [a for a in truth["annotations"] if a["image_id"] == image["id"]]
    [candidates] = boxes.detect(
        [np.zeros((image["height"], image["width"], 3), np.uint8)], [str(image["id"])]
    )
    assert len(candidates.boxes) == len(expected) > 0
    labels = [boxes.classes[label] for label in candidates.scores.argmax(1)]
    assert labels == [names[annotation["category_id"]] for annotation in expected]
    x, y, width, height = expected[0]["bbox"]
    np.testing.assert_allclose(candidates.boxes[0], [x, y, x + width, y + height], atol=0.01)
