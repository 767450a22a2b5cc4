"""Regions cut out of images, and how a model's own transform then looks at them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Beyond this ratio of its sides, nearly all of a crop would be resized only to be cropped away: 1 x
# 20000 pixels become 256 x 5 million, 4 GB. Up to here the transform itself does it.
SLENDER = 128


def cut(image: NDArray[np.uint8], box: NDArray[np.float32]) -> Image.Image:
    """Return the pixels that `box`, x1 y1 x2 y2, touches: rounded outwards, at least 1 x 1."""
    height, width = image.shape[:2]
    left = min(max(math.floor(box[0]), 0), width - 1)
    top = min(max(math.floor(box[1]), 0), height - 1)
    right = min(max(math.ceil(box[2]), left + 1), width)
    bottom = min(max(math.ceil(box[3]), top + 1), height)
    return Image.fromarray(image[top:bottom, left:right])


@dataclass(frozen=True)
class View:
    """How a transform looks at an image: resized by `resize`, then the centre of it.

    `resize` is "shortest", "longest" or "squash": which side of the image becomes `resized` long
    (width, height). `size` is the input's (width, height).
    """

    resize: str
    resized: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, transform: Callable[[Image.Image], Any]) -> Self:
        """Return the view of a transform made of timm's, open_clip's and torchvision's steps."""
        steps = {type(step).__name__: step for step in getattr(transform, "transforms", ())}
        crop = steps.get("CenterCrop") or steps.get("CenterCropOrPad")
        if "ResizeKeepRatio" in steps:
            step = steps["ResizeKeepRatio"]
            resize, resized = ("longest" if step.longest else "shortest"), _pair(step.size)
        elif "Resize" in steps:
            step = steps["Resize"]
            short = isinstance(step.size, int) or len(step.size) == 1
            resize, resized = ("shortest" if short else "squash"), _pair(step.size)
        else:
            raise ValueError(f"a transform without a resize: {transform}")
        return cls(resize, resized, _pair(crop.size) if crop else resized)

    def narrow(self, crop: Image.Image) -> Image.Image:
        """Return a slender crop without what the transform would resize and then throw away.

        Where a transform pads, it is cut until its short side is a pixel of the input: the
        transform itself would leave none, and fail.
        """
        short, long = sorted(crop.size)
        ratio = {"shortest": SLENDER, "longest": min(self.resized), "squash": math.inf}[self.resize]
        if long <= ratio * short:
            return crop
        # The same parity keeps the centre where it is.
        keep = int(ratio) * short - (long - int(ratio) * short) % 2
        margin = (long - keep) // 2
        wide = crop.width == long
        edges = (margin, 0, margin + keep, short) if wide else (0, margin, short, margin + keep)
        return crop.crop(edges)

    def cells(self, width: int, height: int, across: int, down: int) -> NDArray[np.float32]:
        """Return the cells of an `across` x `down` map of an image as boxes (down * across, 4)."""
        x = self._edges(width, across, *self._scaled(width, height, 0))
        y = self._edges(height, down, *self._scaled(width, height, 1))
        left, top = np.meshgrid(x[:-1], y[:-1])
        right, bottom = np.meshgrid(x[1:], y[1:])
        return np.stack([left, top, right, bottom], axis=-1).reshape(-1, 4).astype(np.float32)

    def _scaled(self, width: int, height: int, axis: int) -> tuple[float, int]:
        """Return how long an axis is after the resize, and how much of it the input shows."""
        ratios = self.resized[0] / width, self.resized[1] / height
        scale = {"shortest": max(ratios), "longest": min(ratios), "squash": ratios[axis]}
        return (width, height)[axis] * scale[self.resize], self.size[axis]

    @staticmethod
    def _edges(length: int, cells: int, scaled: float, shown: int) -> NDArray[np.float64]:
        inside = np.linspace(0, shown, cells + 1) + (scaled - shown) / 2
        return np.clip(inside * length / scaled, 0, length)


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Return (width, height) of a size that torchvision gives as one number or (height, width)."""
    if isinstance(size, int):
        return size, size
    return int(size[-1]), int(size[0])
