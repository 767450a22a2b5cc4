"""Scenes as images: flat colours, outlines and textures over a backdrop that darkens downwards."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32, UInt8

from regionprep.scenes.layout import HEIGHT, WIDTH, Scene, Thing
from regionprep.scenes.shapes import FULL, PALETTE, inks

_PATTERN = 246
_FADE = 14
"""How much darker the backdrop is at the bottom than at the top."""


def draw(scene: Scene) -> UInt8[np.ndarray, "height width 3"]:
    """Return the scene as an RGB image; integer arithmetic throughout, so the same everywhere."""
    fade = np.arange(HEIGHT, dtype=np.int32) * _FADE // HEIGHT
    image = np.empty((HEIGHT, WIDTH, 3), dtype=np.int32)
    image[:] = np.array(scene.backdrop, dtype=np.int32) - fade[:, None, None]
    for thing in scene.objects:
        _paint(image, thing)
    return image.astype(np.uint8)


def _paint(image: Int32[np.ndarray, "height width 3"], thing: Thing) -> None:
    area = image[thing.top : thing.top + thing.side, thing.left : thing.left + thing.side]
    counts = inks(thing.shape, thing.side, thing.texture).astype(np.int32)
    bare = FULL - counts.sum(axis=-1, keepdims=True)
    painted = counts @ _colours(thing)
    area[:] = (painted + bare * area + FULL // 2) // FULL


def _colours(thing: Thing) -> Int32[np.ndarray, "3 3"]:
    """Return the colours of the outline, the fill and the pattern."""
    fill = np.array(PALETTE[thing.colour], dtype=np.int32) + np.array(thing.tint, dtype=np.int32)
    fill = fill.clip(0, 255)
    return np.stack([fill * 3 // 5, fill, np.full(3, _PATTERN, dtype=np.int32)])
