from collections import Counter

import numpy as np
import pytest

from regionprep import scenes
from regionprep.errors import InputError
from regionprep.scenes.layout import SIZES, VISIBLE
from regionprep.scenes.shapes import silhouette
from regionprep.scenes.train import TEST_SCENES, TRAINING_SEED

SCENES = [scenes.scene(0, index) for index in range(300)]


def test_same_seed_and_index_give_the_same_scene():
    assert scenes.scene(3, 41) == scenes.scene(3, 41)
    assert scenes.scene(3, 41) != scenes.scene(3, 42)
    assert scenes.scene(3, 41).objects != scenes.scene(4, 41).objects


def test_negative_seed_is_refused_with_how_to_mend():
    with pytest.raises(InputError, match="must not be negative\n  Give a seed of 0 or more"):
        scenes.scene(-1, 0)


def test_scenes_have_three_to_seven_objects_of_every_look():
    assert {len(scene.objects) for scene in SCENES} == {3, 4, 5, 6, 7}
    things = [thing for scene in SCENES for thing in scene.objects]
    assert {thing.shape for thing in things} == set(scenes.SHAPES)
    assert {thing.colour for thing in things} == set(scenes.COLOURS)
    assert {thing.texture for thing in things} == set(scenes.TEXTURES)
    assert {thing.size for thing in things} == set(SIZES)


def test_objects_lie_in_the_image_and_partly_overlap():
    overlapping = 0
    for scene in SCENES:
        corners, _ = scenes.boxes(scene)
        assert (corners >= 0).all()
        assert (corners[:, 2] <= scenes.WIDTH).all()
        assert (corners[:, 3] <= scenes.HEIGHT).all()
        low = np.maximum(corners[:, None, :2], corners[None, :, :2])
        high = np.minimum(corners[:, None, 2:], corners[None, :, 2:])
        shared = (high > low).all(axis=-1)
        overlapping += bool(np.triu(shared, k=1).any())
    assert overlapping > len(SCENES) / 2


def test_every_object_is_left_uncovered_enough_to_be_recognised():
    for scene in SCENES:
        front = np.full((scenes.HEIGHT, scenes.WIDTH), -1)
        for number, thing in enumerate(scene.objects):
            ys, xs = np.nonzero(silhouette(thing.shape, thing.side))
            front[ys + thing.top, xs + thing.left] = number
        for number, thing in enumerate(scene.objects):
            whole = silhouette(thing.shape, thing.side).sum()
            assert (front == number).sum() >= VISIBLE * whole


def test_boxes_and_class_ids_follow_the_objects():
    scene = SCENES[0]
    corners, classes = scenes.boxes(scene)
    assert (corners.dtype, classes.dtype) == (np.float32, np.int32)
    assert [scenes.CLASSES[number] for number in classes] == [t.shape for t in scene.objects]
    assert (corners[:, 2] - corners[:, 0]).tolist() == [thing.side for thing in scene.objects]


def test_no_two_looks_of_a_scene_share_shape_and_colour():
    for scene in SCENES:
        looks = Counter((thing.shape, thing.colour) for thing in scene.objects)
        alike = sum(thing.size == "medium" for thing in scene.objects)
        assert sorted(looks.values())[:-1] == [1] * (len(looks) - 1)
        assert max(looks.values()) == alike


def test_image_ids_name_the_index():
    assert scenes.image_id(41) == "scene-000041"


def test_default_splits_hold_five_thousand_scenes_that_the_detector_never_saw():
    assert scenes.SPLITS == {"train": 4000, "val": 500, "test": 500}
    assert list(TEST_SCENES) == list(range(4500, sum(scenes.SPLITS.values())))
    assert TRAINING_SEED != 0
    trained_on = {scenes.scene(TRAINING_SEED, index).objects for index in range(300)}
    assert not trained_on & {scene.objects for scene in SCENES}
