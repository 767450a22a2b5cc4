"""What each shape, texture and colour looks like: masks are made once a size and then kept.

Every mask comes from comparisons on a grid of sample points, with no function but + - * /, and
counts the samples of each pixel: the same integers on every platform.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, UInt8

SAMPLES = 4
"""Sample points a pixel, along each side."""
FULL = SAMPLES * SAMPLES
"""The coverage of a pixel that lies wholly inside."""

OUTLINE = 5
"""Width of the outline, in sample points."""

Points = Float[np.ndarray, "rows columns"]
Samples = Bool[np.ndarray, "rows columns"]


def _polygon(*corners: tuple[float, float]) -> Callable[[Points, Points], Samples]:
    """Return the test whether points lie inside a polygon, by the parity of crossed edges."""

    def inside(x: Points, y: Points) -> Samples:
        odd = np.zeros(np.broadcast_shapes(x.shape, y.shape), dtype=bool)
        for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True):
            if y1 != y2:
                odd ^= ((y1 > y) != (y2 > y)) & (x < x1 + (y - y1) * (x2 - x1) / (y2 - y1))
        return odd

    return inside


def _heart(x: Points, y: Points) -> Samples:
    """The curve (x² + y² - 1)³ = x² y³, stretched to fill the square."""
    x, y = 1.139 * x, 0.118 - 1.118 * y
    bulge = x * x + y * y - 1
    return bulge * bulge * bulge <= x * x * y * y * y


_STAR = (
    (0.0, -1.0), (0.309, -0.342), (1.0, -0.236), (0.5, 0.277), (0.618, 1.0),
    (0.0, 0.658), (-0.618, 1.0), (-0.5, 0.277), (-1.0, -0.236), (-0.309, -0.342),
)  # fmt: skip

_SHAPES: dict[str, Callable[[Points, Points], Samples]] = {
    "circle": lambda x, y: x * x + y * y <= 1,
    "square": lambda x, y: (abs(x) <= 1) & (abs(y) <= 1),
    "triangle": lambda x, y: 2 * abs(x) <= y + 1,
    "diamond": lambda x, y: abs(x) + abs(y) <= 1,
    "star": _polygon(*_STAR),
    "cross": lambda x, y: (abs(x) <= 0.36) | (abs(y) <= 0.36),
    "heart": _heart,
    "ring": lambda x, y: (x * x + y * y <= 1) & (x * x + y * y >= 0.3),
}

# Textures repeat by the pixel, whatever the object's size; x and y count pixels from its middle.
_TEXTURES: dict[str, Callable[[Points, Points], Samples]] = {
    "plain": lambda x, y: np.zeros(np.broadcast_shapes(x.shape, y.shape), dtype=bool),
    "striped": lambda x, y: (x + y) % 9 < 3.5,
    "dotted": lambda x, y: (x % 8 - 4) * (x % 8 - 4) + (y % 8 - 4) * (y % 8 - 4) < 6.5,
    "checkered": lambda x, y: (x % 12 < 6) != (y % 12 < 6),
}

PALETTE = {
    "red": (214, 40, 45),
    "orange": (247, 134, 24),
    "yellow": (245, 208, 30),
    "green": (50, 155, 65),
    "blue": (42, 98, 214),
    "purple": (132, 58, 178),
    "pink": (246, 130, 186),
    "brown": (122, 78, 46),
}
"""The red, green and blue of each colour."""

SHAPES = tuple(_SHAPES)
TEXTURES = tuple(_TEXTURES)
COLOURS = tuple(PALETTE)


@functools.cache
def silhouette(shape: str, side: int) -> Bool[np.ndarray, "side side"]:
    """Return the pixels that a shape covers by half or more."""
    covered: Bool[np.ndarray, "side side"] = 2 * _count(_samples(shape, side)) >= FULL
    covered.flags.writeable = False
    return covered


@functools.cache
def inks(shape: str, side: int, texture: str) -> UInt8[np.ndarray, "side side 3"]:
    """Return how many samples of each pixel are outline, fill and pattern; their sum is <= FULL."""
    shaped = _samples(shape, side)
    body = _erode(shaped)
    x = _grid(side) * side / 2
    pattern = body & _TEXTURES[texture](x[None, :], x[:, None])
    counts = np.stack(
        [_count(shaped & ~body), _count(body & ~pattern), _count(pattern)], axis=-1
    ).astype(np.uint8)
    counts.flags.writeable = False
    return counts


def _grid(side: int) -> Float[np.ndarray, " samples"]:
    """Return the sample points along a side, as -1 .. 1."""
    samples = side * SAMPLES
    return (2 * np.arange(samples) + 1 - samples) / samples


def _samples(shape: str, side: int) -> Samples:
    grid = _grid(side)
    return _SHAPES[shape](grid[None, :], grid[:, None])


def _erode(samples: Samples) -> Samples:
    """Return the samples whose neighbours up to OUTLINE away, along both sides, are all set."""
    for axis in (0, 1):
        padding = [(0, 0), (0, 0)]
        padding[axis] = (OUTLINE, OUTLINE)
        padded = np.pad(samples, padding)
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * OUTLINE + 1, axis=axis)
        samples = np.asarray(windows.all(axis=-1))
    return samples


def _count(samples: Samples) -> UInt8[np.ndarray, "side side"]:
    side = len(samples) // SAMPLES
    pixels = samples.reshape(side, SAMPLES, side, SAMPLES)
    counts: UInt8[np.ndarray, "side side"] = pixels.sum(axis=(1, 3)).astype(np.uint8)
    return counts
