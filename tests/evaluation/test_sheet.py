"""The contact sheet: everything is on it, nothing is cut, whatever the images and texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

from regionprep.errors import InputError
from regionprep.evaluation import Entry, contact_sheet
from regionprep.evaluation.sheet import HEIGHT, MARGIN, PADDING, PALETTE, WIDTH, _font, _wrapped

NO_BOXES = np.zeros((0, 4), np.float32)


def entry(image: np.ndarray | None = None, **given: object) -> Entry:
    image = np.full((90, 120, 3), 200, np.uint8) if image is None else image
    return Entry(**{"image_id": "7", "image": image, "boxes": NO_BOXES, "caption": "a dog"} | given)


def drawn(path: Path, entries: list[Entry], columns: int = 4) -> np.ndarray:
    contact_sheet(entries, path, columns=columns)
    return np.asarray(Image.open(path).convert("RGB"))


def picture(sheet: np.ndarray) -> np.ndarray:
    """Return the first cell's picture area."""
    start = MARGIN + PADDING
    return sheet[start : start + HEIGHT, start : start + WIDTH]


def count(pixels: np.ndarray, color: str) -> int:
    return int((pixels == ImageColor.getrgb(color)).all(axis=-1).sum())


def test_small_images_are_scaled_up_and_keep_their_shape(tmp_path: Path) -> None:
    image = np.zeros((3, 4, 3), np.uint8)
    image[:, 2:] = 255
    area = picture(drawn(tmp_path / "sheet.png", [entry(image)]))
    assert (area[:, : WIDTH // 3] < 60).all()
    assert (area[:, -WIDTH // 3 :] > 200).all()


def test_boxes_lie_on_what_they_are_boxes_of(tmp_path: Path) -> None:
    image = np.full((165, 220, 3), 30, np.uint8)
    boxes = np.array([[20, 40, 120, 140]], np.float32)
    area = picture(drawn(tmp_path / "sheet.png", [entry(image, boxes=boxes)]))
    rows, columns = np.nonzero((area == ImageColor.getrgb(PALETTE[0])).all(axis=-1))
    assert (columns.min(), rows.min(), columns.max(), rows.max()) == (40, 80, 240, 280)


def test_one_label_has_one_colour_on_the_whole_sheet(tmp_path: Path) -> None:
    boxes = np.array([[10, 30, 50, 80], [60, 30, 110, 80]], np.float32)
    first = entry(boxes=boxes, labels=["dog", "cat"])
    second = entry(boxes=boxes[:1], labels=["cat"])
    cells = drawn(tmp_path / "sheet.png", [first, second], columns=2)
    left, right = cells[:, : cells.shape[1] // 2], cells[:, cells.shape[1] // 2 :]
    assert count(left, PALETTE[0]) > 0
    assert count(left, PALETTE[1]) > 0
    assert count(right, PALETTE[0]) == 0
    assert count(right, PALETTE[1]) > 0


def test_entries_fill_rows_of_columns(tmp_path: Path) -> None:
    one = drawn(tmp_path / "sheet.png", [entry()])
    seven = drawn(tmp_path / "sheet.png", [entry()] * 7, columns=3)
    cell = one.shape[1] - MARGIN, one.shape[0] - MARGIN
    assert seven.shape[1] == MARGIN + 3 * cell[0]
    assert seven.shape[0] == MARGIN + 3 * cell[1]


def test_captions_references_and_scores_are_written(tmp_path: Path) -> None:
    bare = drawn(tmp_path / "sheet.png", [entry(caption="")])
    for more in (
        {"caption": "a dog runs"},
        {"caption": "", "score": 1.25},
        {"caption": "", "references": ["a cat"]},
        {"caption": "", "image_id": "8"},
    ):
        full = drawn(tmp_path / "sheet.png", [entry(**more)])
        assert full.shape != bare.shape or (full != bare).any(), more


@given(st.text(max_size=300), st.integers(1, 5))
def test_wrapped_lines_fit_and_lose_nothing_but_what_they_mark(text: str, most: int) -> None:
    lines = _wrapped(text, 19, WIDTH, most)
    assert len(lines) <= most
    assert all(_font(19).getlength(line) <= WIDTH for line in lines)
    whole = "".join(text.split())
    kept = "".join("".join(lines).split())
    assert kept == whole or (kept.endswith("…") and whole.startswith(kept[:-1]))


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (900, 1), (2000, 30)])
def test_odd_images_and_boxes_are_drawn(tmp_path: Path, shape: tuple[int, int]) -> None:
    image = np.full((*shape, 3), 90, np.uint8)
    boxes = np.array([[0, 0, shape[1], shape[0]], [-5, -5, 1e6, 1e6], [0, 0, 0, 0]], np.float32)
    sheet = drawn(tmp_path / "s.png", [entry(image, boxes=boxes, labels=["a" * 200, "b", ""])])
    assert sheet.shape[1] == 2 * MARGIN + WIDTH + 2 * PADDING


def test_the_same_entries_make_the_same_file(tmp_path: Path) -> None:
    entries = [entry(boxes=np.array([[5, 5, 50, 50]]), labels=["dog"], references=["a b"] * 9)]
    contact_sheet(entries, tmp_path / "one.png")
    contact_sheet(entries, tmp_path / "two.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_nothing_to_draw_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no images for a contact sheet"):
        contact_sheet([], tmp_path / "sheet.png")
    assert not list(tmp_path.iterdir())
