"""Regions cut as PIL cuts them; cells where a model's own transform leaves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from timm.data.transforms_factory import create_transform

from regionprep.pipeline.backbones.cutting import View, cut

IMAGE = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)

TRANSFORMS = {
    "timm centre": create_transform(64, crop_pct=0.8),
    "timm squash": create_transform(64, crop_pct=0.8, crop_mode="squash"),
    "timm border": create_transform(64, crop_pct=1.0, crop_mode="border"),
    "timm wide": create_transform((48, 64), crop_pct=0.9),
    "open_clip shortest": image_transform_v2(PreprocessCfg(64), is_train=False),
    "open_clip longest": image_transform_v2(
        PreprocessCfg(64, resize_mode="longest"), is_train=False
    ),
    "open_clip squash": image_transform_v2(PreprocessCfg(64, resize_mode="squash"), is_train=False),
}

PADDING = ("timm border", "open_clip longest")


def box(*numbers):
    return np.array(numbers, np.float32)


def test_a_crop_of_whole_pixels_is_pils():
    ours = np.asarray(cut(IMAGE, box(3, 4, 20, 17)))
    np.testing.assert_array_equal(ours, np.asarray(Image.fromarray(IMAGE).crop((3, 4, 20, 17))))


def test_a_crop_holds_every_pixel_that_the_box_touches():
    assert cut(IMAGE, box(3.2, 4.9, 20.1, 17)).size == (18, 13)


@pytest.mark.parametrize(
    "numbers", [(10, 10, 10, 10), (49.9, 29.9, 50, 30), (60, 40, 70, 50), (-5, -5, -1, -1)]
)
def test_a_crop_has_a_pixel_at_least(numbers):
    assert cut(IMAGE, box(*numbers)).size == (1, 1)


@given(st.lists(st.floats(-20, 70, width=32), min_size=4, max_size=4))
def test_a_crop_lies_inside_the_image(numbers):
    left, right = sorted(numbers[:2])
    top, bottom = sorted(numbers[2:])
    width, height = cut(IMAGE, box(left, top, right, bottom)).size
    assert 1 <= width <= 50
    assert 1 <= height <= 30


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("size", [(96, 96), (160, 90), (70, 150), (31, 57)])
def test_cells_lie_where_the_transform_puts_them(name, size):
    """A bright spot in a cell's middle is brightest in that cell of the transformed image."""
    width, height = size
    transform = TRANSFORMS[name]
    view = View.of(transform)
    across, down = 4, 3
    boxes = view.cells(width, height, across, down).reshape(down, across, 4)
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    for row, column in np.ndindex(down, across):
        left, top, right, bottom = boxes[row, column]
        if right - left < 3 or bottom - top < 3:  # a border that pads, not a part of the image
            continue
        spot = np.exp(-((x - (left + right) / 2) ** 2 + (y - (top + bottom) / 2) ** 2) / 8)
        pixels = (spot[..., None] * 255).astype(np.uint8).repeat(3, axis=2)
        seen = transform(Image.fromarray(pixels)).sum(0)
        at = divmod(int(seen.argmax()), seen.shape[1])
        assert int(at[0] * down / seen.shape[0]) == row
        assert int(at[1] * across / seen.shape[1]) == column


def test_squashed_cells_cover_the_image():
    cells = View.of(TRANSFORMS["open_clip squash"]).cells(100, 40, 4, 2)
    assert cells[0].tolist() == [0, 0, 25, 20]
    assert cells[-1].tolist() == [75, 20, 100, 40]
    assert cells.dtype == np.float32


def test_cells_of_a_centre_crop_leave_the_border_out():
    cells = View.of(TRANSFORMS["timm centre"]).cells(160, 80, 2, 2)
    assert cells[0].tolist() == [48, 8, 80, 40]


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in PADDING])
@pytest.mark.parametrize("size", [(3, 400), (401, 3), (1, 257), (2, 301), (5, 1000), (1001, 5)])
def test_a_slender_crop_gives_what_the_transform_alone_gives(name, size):
    coarse = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8))
    crop = coarse.resize(size, Image.Resampling.BICUBIC)
    transform = TRANSFORMS[name]
    ours, theirs = transform(View.of(transform).narrow(crop)), transform(crop)
    # The resized length is rounded to whole pixels: another one shifts by a part of a pixel.
    cosine = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
    assert cosine > 0.9999


@pytest.mark.parametrize("name", PADDING)
def test_a_crop_too_slender_for_a_transform_that_pads_is_cut(name):
    transform = TRANSFORMS[name]
    with pytest.raises(ValueError, match="must be > 0"):
        transform(Image.new("RGB", (400, 2)))
    crop = View.of(transform).narrow(Image.new("RGB", (400, 2), (255, 255, 255)))
    assert crop.size == (128, 2)
    seen = transform(crop)
    # One line of the input, and no more, is the crop: the rest is padding.
    assert int((seen[0] == seen[0].max()).any(dim=1).sum()) == 1


def test_the_most_slender_crop_takes_little_memory():
    transform = TRANSFORMS["timm centre"]
    crop = View.of(transform).narrow(Image.new("RGB", (20_000, 1)))
    assert crop.size == (128, 1)
    assert transform(crop).shape == (3, 64, 64)


def test_a_transform_without_a_resize_is_the_programmers_slip():
    with pytest.raises(ValueError, match="without a resize"):
        View.of(lambda image: image)
