import dataclasses
import hashlib

import numpy as np
import pytest

from regionprep import scenes
from regionprep.scenes.layout import Scene, Thing


def test_drawn_images_are_the_same_everywhere():
    """A change of these bytes makes the shipped detector and every published score stale."""
    digest = hashlib.sha256()
    for index in range(8):
        digest.update(scenes.draw(scenes.scene(0, index)).tobytes())
    assert digest.hexdigest()[:16] == "78ac81f0c94dbc44"


def test_image_is_rgb_of_the_documented_size():
    image = scenes.draw(scenes.scene(0, 0))
    assert image.shape == (scenes.HEIGHT, scenes.WIDTH, 3)
    assert image.dtype == np.uint8


@pytest.mark.parametrize("index", range(40))
def test_true_boxes_hold_the_drawn_pixels_tightly(index):
    scene = scenes.scene(0, index)
    bare = scenes.draw(dataclasses.replace(scene, objects=()))
    for thing, (x1, y1, x2, y2) in zip(scene.objects, scenes.boxes(scene)[0], strict=True):
        alone = scenes.draw(dataclasses.replace(scene, objects=(thing,)))
        rows, columns = np.nonzero((alone != bare).any(axis=-1))
        drawn = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert np.abs(np.array(drawn) - (x1, y1, x2, y2)).max() <= 1
        assert drawn[0] >= x1 and drawn[1] >= y1 and drawn[2] <= x2 and drawn[3] <= y2


@pytest.mark.parametrize("shape", scenes.SHAPES)
def test_textures_and_colours_can_be_told_apart(shape):
    def painted(colour: str, texture: str) -> np.ndarray:
        thing = Thing(30, 30, 60, shape, colour, texture, "large", (0, 0, 0))
        image = scenes.draw(Scene(0, 0, (230, 230, 230), (thing,)))
        return image[30:90, 30:90].astype(int)

    by_texture = [painted("red", texture) for texture in scenes.TEXTURES]
    by_colour = [painted(colour, "plain") for colour in scenes.COLOURS]
    for images in (by_texture, by_colour):
        for number, image in enumerate(images):
            for other in images[:number]:
                assert np.abs(image - other).mean() > 3


def test_objects_in_front_cover_those_behind():
    behind = Thing(20, 20, 60, "square", "blue", "plain", "large", (0, 0, 0))
    front = Thing(40, 40, 24, "square", "red", "plain", "small", (0, 0, 0))
    image = scenes.draw(Scene(0, 0, (230, 230, 230), (behind, front)))
    red, _, blue = image[52, 52].astype(int)
    assert red > blue
    red, _, blue = image[30, 30].astype(int)
    assert blue > red
