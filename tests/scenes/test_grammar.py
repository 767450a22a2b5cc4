"""Captions are read back by a reader of its own and held against the true boxes."""

import hashlib
import re
from collections import Counter

import numpy as np
import pytest

from regionprep import scenes
from regionprep.scenes.grammar import LONGEST

COUNTS = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4, "five": 5}
PLURALS = {"crosses": "cross"} | {f"{shape}s": shape for shape in scenes.SHAPES if shape != "cross"}
NAME = (
    rf"(?:{'|'.join(COUNTS)})(?: large| small)?(?: {'| '.join(scenes.TEXTURES)})?"
    rf"(?: {'| '.join(scenes.COLOURS)})? (?:{'|'.join([*scenes.SHAPES, *PLURALS, 'shapes'])})"
)
FORMS = [
    rf"(?P<a>{NAME}) (?P<relation>left of|right of|above|below) (?P<b>{NAME})",
    rf"(?P<a>{NAME}) (?P<relation>left of|right of|above|below) (?P<b>{NAME}) with (?P<c>{NAME})",
    rf"there is (?P<a>{NAME}) (?:to the )?(?P<relation>left of|right of|above|below) (?P<b>{NAME})",
    rf"(?P<a>{NAME}) is (?P<relation>larger than) (?P<b>{NAME})"
    rf" and (?P<also>left of|right of|above|below) (?P<pronoun>it|them)",
    rf"(?:there is )?(?P<a>{NAME}) (?P<relation>inside) (?P<b>{NAME})",
    rf"(?P<a>{NAME}) (?P<relation>inside) (?P<b>{NAME}) with (?P<c>{NAME})",
    rf"(?P<a>{NAME}) (?P<relation>inside) (?P<b>{NAME})"
    rf" (?P<second>left of|right of|above|below) (?P<c>{NAME})",
    rf"(?P<a>{NAME}) (?P<relation>between) (?P<b>{NAME}) and (?P<c>{NAME})",
]
SCENES = [scenes.scene(seed, index) for seed in (0, 7) for index in range(400)]
SIDES = {"large": (50, 80), "small": (10, 30)}


def parse(caption):
    """Return the parts of a caption by the one form that it has."""
    found = [match for form in FORMS if (match := re.fullmatch(form, caption))]
    assert len(found) == 1, caption
    return found[0].groupdict()


def meant(name, scene):
    """Return the boxes of what a name stands for, and check that the count is right."""
    corners, _ = scenes.boxes(scene)
    words = name.split()
    shape = PLURALS.get(words[-1], words[-1])
    picked = []
    for thing, box in zip(scene.objects, corners, strict=True):
        size = next((word for word in words if word in SIDES), None)
        low, high = SIDES[size] if size else (0, 200)
        texture = next((word for word in words if word in scenes.TEXTURES), None)
        colour = next((word for word in words if word in scenes.COLOURS), None)
        if (
            shape in ("shapes", thing.shape)
            and colour in (None, thing.colour)
            and texture in (None, thing.texture)
            and low <= box[2] - box[0] <= high
        ):
            picked.append(box)
    assert len(picked) == COUNTS[words[0]], (name, scene.index)
    return np.stack(picked)


def holds(relation, first, others):
    """Return whether all of `first` are so placed towards all of `others`; boxes (n, 4)."""
    x, y = (first[:, 0] + first[:, 2]) / 2, (first[:, 1] + first[:, 3]) / 2
    other_x, other_y = (others[:, 0] + others[:, 2]) / 2, (others[:, 1] + others[:, 3]) / 2
    return {
        "left of": lambda: x.max() + 10 < other_x.min(),
        "right of": lambda: x.min() - 10 > other_x.max(),
        "above": lambda: y.max() + 10 < other_y.min(),
        "below": lambda: y.min() - 10 > other_y.max(),
        "larger than": lambda: areas(first).min() > 1.3 * areas(others).max(),
        "inside": lambda: (
            (first[:, :2] >= others[:, :2]).all() and (first[:, 2:] <= others[:, 2:]).all()
        ),
    }[relation]()


def areas(corners):
    return (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])


def lies_between(middle, first, others):
    """Return whether one box lies between another and each of the rest, along x or along y."""
    either = [
        (one, other)
        for one, other in (("left of", "right of"), ("above", "below"))
        for one, other in ((one, other), (other, one))
    ]
    return any(holds(one, middle, others) and holds(other, middle, first) for one, other in either)


def check(parts, scene):
    first, second = meant(parts["a"], scene), meant(parts["b"], scene)
    third = meant(parts["c"], scene) if parts.get("c") else None
    if parts["relation"] == "between":
        assert lies_between(first, second, third) or lies_between(first, third, second)
    else:
        assert holds(parts["relation"], first, second)
    if parts.get("second"):
        assert holds(parts["second"], second, third)
    if parts.get("also"):
        assert holds(parts["also"], first, second)
        assert parts["pronoun"] == ("it" if len(second) == 1 else "them")


def test_every_caption_is_true_of_its_scene():
    for scene in SCENES:
        for caption in scenes.captions(scene):
            check(parse(caption), scene)


@pytest.mark.parametrize(
    ("swap", "by"),
    [("left", "right"), ("above", "below"), ("large ", "small "), ("two ", "three ")],
)
def test_reader_finds_a_false_caption(swap, by):
    """The check above can fail: claims turned round are found out."""
    turned = [
        (scene, caption.replace(swap, by, 1))
        for scene in SCENES[:100]
        for caption in scenes.captions(scene)
        if swap in caption
    ]
    assert turned
    for scene, caption in turned:
        with pytest.raises(AssertionError):
            check(parse(caption), scene)


def test_scene_has_five_different_captions_of_at_most_sixteen_words():
    for scene in SCENES:
        captions = scenes.captions(scene)
        assert len(set(captions)) == 5
        assert all(5 <= len(caption.split()) <= LONGEST for caption in captions)
        assert all(re.fullmatch("[a-z ]+", caption) for caption in captions)


def test_every_caption_says_how_objects_lie_to_each_other():
    """None can be told by who sees what there is and not where."""
    places = {"left", "right", "above", "below", "inside", "between"}
    for scene in SCENES:
        for caption in scenes.captions(scene):
            assert places & set(caption.split()), caption


def test_vocabulary_is_small_and_every_relation_is_common():
    words = Counter(
        word for scene in SCENES for caption in scenes.captions(scene) for word in caption.split()
    )
    assert 40 <= len(words) <= 60
    relations = ["left", "right", "above", "below", "inside", "between", "larger"]
    assert min(words[relation] for relation in relations) > len(SCENES) / 10


def test_hidden_small_object_is_always_what_the_first_caption_opens_with():
    for scene in SCENES:
        large, *others = scenes.boxes(scene)[0]
        guests = [box for box in others if holds("inside", box[None], large[None])]
        opening = parse(scenes.captions(scene)[0])
        assert (opening["relation"] == "inside") == bool(guests)
        if guests:
            assert (meant(opening["a"], scene) == guests).all()


def test_captions_are_the_same_everywhere():
    text = "\n".join(caption for scene in SCENES[:50] for caption in scenes.captions(scene))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "35ca13b4bcab06cb"
