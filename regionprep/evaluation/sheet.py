"""A contact sheet: images with their boxes, captions and references on one page, as a PNG.

For looking: an image is scaled to its cell's width, small ones up, so that a mistake in boxes,
orientation or captions is seen at a glance.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from regionprep.errors import InputError
from regionprep.workspace import write_bytes

# Colours that stay apart for the colour-blind: Okabe and Ito, "Color universal design" (2008),
# less black, which dark photographs hide.
PALETTE = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
PAPER, CARD, INK, QUIET, FAINT = "#f2f2f0", "#ffffff", "#1a1a1a", "#5f5f5f", "#8a8a8a"

# All lengths are pixels of the sheet.
WIDTH, HEIGHT = 440, 330
MARGIN, PADDING = 18, 14
CAPTION_SIZE, REFERENCE_SIZE, SMALL_SIZE, LABEL_SIZE = 19, 15, 14, 14
CAPTION_LINES, REFERENCE_LINES = 4, 2
MOST_REFERENCES = 5
# Beyond so many boxes lines are thin, and only the first so many are labelled.
CROWD = 12

Color: TypeAlias = str
Corners: TypeAlias = tuple[int, int, int, int]
Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, eq=False)
class Entry:
    """What one cell of the sheet shows.

    `image` is uint8 (height, width, 3); `boxes` (r, 4) are `x1 y1 x2 y2` in its pixels, best first,
    with a label each where there are any; `score` is printed as it is, named by `score_name`.
    """

    image_id: str
    image: NDArray[np.uint8]
    boxes: NDArray[np.floating[Any]]
    caption: str
    labels: Sequence[str] | None = None
    references: Sequence[str] = ()
    score: float | None = None
    score_name: str = "CIDEr-D"


def contact_sheet(entries: Sequence[Entry], path: Path, columns: int = 4) -> None:
    """Draw the entries row by row into the PNG file `path`, whole or not at all.

    Raises InputError when there is nothing to draw.
    """
    if not entries:
        raise InputError("no images for a contact sheet", where=path)
    columns = min(columns, len(entries))
    colors = _colors(entries)
    cells = [_cell(entry, colors) for entry in entries]
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(cell.height for cell in row) for row in rows]
    cell_width = WIDTH + 2 * PADDING
    size = (
        MARGIN + columns * (cell_width + MARGIN),
        MARGIN + sum(height + MARGIN for height in heights),
    )
    sheet = Image.new("RGB", size, PAPER)
    top = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, cell in enumerate(row):
            left = MARGIN + column * (cell_width + MARGIN)
            sheet.paste(CARD, (left, top, left + cell_width, top + height))
            sheet.paste(cell, (left, top))
        top += height + MARGIN
    file = io.BytesIO()
    sheet.save(file, "PNG")
    write_bytes(path, file.getvalue())


def _colors(entries: Sequence[Entry]) -> dict[str, Color]:
    """Return a colour for every label of the sheet, in the order in which they appear."""
    labels = dict.fromkeys(label for entry in entries for label in entry.labels or ())
    return {label: PALETTE[place % len(PALETTE)] for place, label in enumerate(labels)}


def _cell(entry: Entry, colors: dict[str, Color]) -> Image.Image:
    """Return the card of one entry: the picture above, the texts below."""
    lines = [*_caption(entry), *_references(entry)]
    head = PADDING + HEIGHT + 10
    height = head + _line(SMALL_SIZE) + sum(line.height for line in lines) + PADDING
    cell = Image.new("RGB", (WIDTH + 2 * PADDING, height), CARD)
    cell.paste(_picture(entry, colors), (PADDING, PADDING))
    draw = ImageDraw.Draw(cell)
    _head(draw, entry, head)
    top = head + _line(SMALL_SIZE)
    for line in lines:
        bottom = top + line.height
        if line.indent:
            draw.rectangle((PADDING + 2, top + line.space, PADDING + 4, bottom), fill=PAPER)
        draw.text(
            (PADDING + line.indent, top + line.space), line.text, line.color, _font(line.size)
        )
        top = bottom
    return cell


@dataclass(frozen=True)
class _Line:
    """A line of text: its size, colour, distance from the left, and space above it."""

    text: str
    size: int
    color: Color
    indent: int
    space: int

    @property
    def height(self) -> int:
        return self.space + _line(self.size)


def _caption(entry: Entry) -> list[_Line]:
    lines = _wrapped(entry.caption or "(no caption)", CAPTION_SIZE, WIDTH, CAPTION_LINES)
    return [_Line(text, CAPTION_SIZE, INK, 0, 0 if n else 6) for n, text in enumerate(lines)]


def _references(entry: Entry) -> list[_Line]:
    found = []
    for reference in entry.references[:MOST_REFERENCES]:
        lines = _wrapped(reference, REFERENCE_SIZE, WIDTH - PADDING, REFERENCE_LINES)
        found += [
            _Line(text, REFERENCE_SIZE, QUIET, PADDING, 0 if n else 6)
            for n, text in enumerate(lines)
        ]
    if (hidden := len(entry.references) - MOST_REFERENCES) > 0:
        found.append(_Line(f"and {hidden} more", SMALL_SIZE, FAINT, PADDING, 6))
    return found


def _head(draw: ImageDraw.ImageDraw, entry: Entry, top: int) -> None:
    """Write the image's id on the left and its score on the right."""
    score = "" if entry.score is None else f"{entry.score_name} {entry.score:.2f}"
    font = _font(SMALL_SIZE)
    draw.text((PADDING + WIDTH, top), score, INK, font, anchor="ra")
    room = WIDTH - PADDING - math.ceil(font.getlength(score))
    for name in _wrapped(entry.image_id, SMALL_SIZE, room, 1):
        draw.text((PADDING, top), name, FAINT, font)


def _picture(entry: Entry, colors: dict[str, Color]) -> Image.Image:
    """Return the image with its boxes, centred in an area of `WIDTH` x `HEIGHT`."""
    height, width = entry.image.shape[:2]
    scale = min(WIDTH / width, HEIGHT / height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.fromarray(entry.image).resize(size, Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(image)
    labels = entry.labels or [""] * len(entry.boxes)
    boxes = [
        (_scaled(box, size, scale), label, colors.get(label, PALETTE[place % len(PALETTE)]))
        for place, (box, label) in enumerate(zip(entry.boxes, labels, strict=True))
    ]
    thin = len(boxes) > CROWD
    for corners, _, color in reversed(boxes):  # the best come last, on top
        _outline(draw, corners, color, 2 if thin else 3)
    taken: list[Corners] = []
    for corners, label, color in boxes[:CROWD]:
        if label:
            taken.append(_label(draw, corners, label, color, taken, size))
    area = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
    area.paste(image, ((WIDTH - size[0]) // 2, (HEIGHT - size[1]) // 2))
    return area


def _scaled(box: NDArray[np.floating[Any]], size: tuple[int, int], scale: float) -> Corners:
    """Return a box's corners on the scaled image, inside it."""
    x1, y1, x2, y2 = (round(float(value) * scale) for value in box)
    left, top = min(max(x1, 0), size[0] - 1), min(max(y1, 0), size[1] - 1)
    return left, top, max(min(x2, size[0] - 1), left), max(min(y2, size[1] - 1), top)


def _outline(draw: ImageDraw.ImageDraw, corners: Corners, color: Color, width: int) -> None:
    """Draw a box with a dark edge inside its line, so that it shows on any ground."""
    left, top, right, bottom = corners
    if min(right - left, bottom - top) > 2 * width + 1:
        inner = (left + width, top + width, right - width, bottom - width)
        draw.rectangle(inner, outline=INK, width=1)
    draw.rectangle(corners, outline=color, width=width)


def _label(
    draw: ImageDraw.ImageDraw,
    corners: Corners,
    label: str,
    color: Color,
    taken: Sequence[Corners],
    size: tuple[int, int],
) -> Corners:
    """Draw a label at its box, where it covers no other one if there is such a place."""
    width, height = math.ceil(_font(LABEL_SIZE).getlength(label)) + 8, _line(LABEL_SIZE)
    left, top, right, bottom = corners
    places = [
        (left, top - height),
        (left, top),
        (right - width, top - height),
        (right - width, bottom - height),
        (left, bottom - height),
        (left, bottom),
        (left, top + height),
    ]
    tags = [_moved_inside(x, y, width, height, size) for x, y in places]
    free = (tag for tag in tags if not any(_overlap(tag, other) for other in taken))
    tag = next(free, tags[0])
    draw.rectangle(tag, fill=color)
    ink = "#ffffff" if color in ("#0072b2", "#009e73", "#d55e00") else INK
    draw.text((tag[0] + 4, tag[1] + 1), label, ink, _font(LABEL_SIZE))
    return tag


def _moved_inside(x: int, y: int, width: int, height: int, size: tuple[int, int]) -> Corners:
    x, y = max(0, min(x, size[0] - width)), max(0, min(y, size[1] - height))
    return x, y, x + width - 1, y + height - 1


def _overlap(one: Corners, two: Corners) -> bool:
    across = one[0] <= two[2] and two[0] <= one[2]
    return across and one[1] <= two[3] and two[1] <= one[3]


def _wrapped(text: str, size: int, width: int, most: int) -> list[str]:
    """Return the text in at most `most` lines of at most `width` pixels; "…" ends what is cut."""
    font = _font(size)
    lines: list[str] = []
    # No caption that long is drawn whole; the bound keeps the work small for one that has no end.
    for word in text[:2000].split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        lines += _broken(word, font, width)
        if len(lines) > most:
            break
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while last and font.getlength(f"{last}…") > width:
        last = last[:-1]
    return [*lines[: most - 1], f"{last.rstrip()}…"]


def _broken(word: str, font: Font, width: int) -> list[str]:
    """Return the word in pieces that fit the width."""
    pieces = [""]
    for character in word:
        if pieces[-1] and font.getlength(pieces[-1] + character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


@functools.cache
def _font(size: int) -> Font:
    return ImageFont.load_default(size)


def _line(size: int) -> int:
    """Return the height of a line of text."""
    return round(size * 1.3)
