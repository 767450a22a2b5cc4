"""The embedded dataset: drawn scenes with true boxes and captions, and a detector trained on them.

Nothing is downloaded or stored: scene `index` of a `seed` is the same image everywhere.
"""

from regionprep.scenes.draw import draw
from regionprep.scenes.grammar import captions
from regionprep.scenes.layout import CLASSES, HEIGHT, WIDTH, Scene, boxes, image_id, scene
from regionprep.scenes.shapes import COLOURS, SHAPES, TEXTURES

SPLITS = {"train": 4000, "val": 500, "test": 500}
"""The default sizes of the splits, in the order in which they take scenes from index 0 on."""

__all__ = [
    "CLASSES",
    "COLOURS",
    "HEIGHT",
    "SHAPES",
    "SPLITS",
    "TEXTURES",
    "WIDTH",
    "Scene",
    "boxes",
    "captions",
    "draw",
    "image_id",
    "scene",
]
