"""Boxes without detection: cells and whole images."""

from __future__ import annotations

import numpy as np
import pytest

from regionprep import manifests
from regionprep.errors import InputError, ManifestError
from regionprep.pipeline import detectors
from regionprep.pipeline.detect import detect_batch
from regionprep.pipeline.detectors import Resources
from regionprep.pipeline.detectors.fixed import Grid, Whole
from regionprep.pipeline.selection import Selection


def image(width, height):
    return np.zeros((height, width, 3), np.uint8)


def test_cells_go_row_by_row_and_cover_the_image():
    [found] = Grid(rows=2, columns=3).detect([image(90, 40)], ["a"])
    assert found.boxes.tolist() == [
        [0, 0, 30, 20],
        [30, 0, 60, 20],
        [60, 0, 90, 20],
        [0, 20, 30, 40],
        [30, 20, 60, 40],
        [60, 20, 90, 40],
    ]
    assert found.boxes.dtype == np.float32


def test_cells_of_one_pixel_have_area():
    [found] = Grid(rows=7, columns=7).detect([image(1, 1)], ["a"])
    assert len(found.boxes) == 49
    assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()


def test_whole_is_one_box():
    found = Whole.from_manifest(manifests.load("detectors", "whole"), Resources())
    assert found.detect([image(5, 9)], ["a"])[0].boxes.tolist() == [[0, 0, 5, 9]]
    assert found.classes == ("image",)


def test_all_cells_become_regions_in_order():
    manifest = manifests.load("detectors", "grid")
    grid = detectors.load(manifest.model_copy(update={"options": {"rows": 14, "columns": 14}}))
    selection = Selection(manifest.min_boxes, manifest.max_boxes)
    [row] = detect_batch([image(28, 28)], grid, selection)
    assert len(row.boxes) == 196
    assert row.boxes[1].tolist() == [2, 0, 4, 2]


def test_a_grid_of_nothing_is_refused():
    with pytest.raises(InputError, match="a grid of 0 x 7 boxes has none"):
        Grid(rows=0)


def test_a_misspelt_option_is_told():
    manifest = manifests.load("detectors", "grid").model_copy(update={"options": {"row": 3}})
    with pytest.raises(ManifestError, match=r"unknown option 'row'. Did you mean 'rows'"):
        detectors.load(manifest)


@pytest.mark.parametrize("option", ["weights", "boxes"])
def test_what_it_has_no_use_for_is_refused(tmp_path, option):
    with pytest.raises(InputError, match=f"detector 'whole' takes no --{option}"):
        detectors.load(manifests.load("detectors", "whole"), Resources(**{option: tmp_path}))


def test_there_are_no_pooled_features():
    with pytest.raises(InputError, match="'grid' has no network"):
        Grid().feature_width  # noqa: B018
    with pytest.raises(InputError, match="other than 'roi'"):
        Whole(rows=1, columns=1).features([image(4, 4)], [np.zeros((1, 4), np.float32)])
