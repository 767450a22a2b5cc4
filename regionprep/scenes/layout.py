"""Scenes: which objects there are, and where they lie.

A scene has one large object, one to three middling ones that look alike, and one to four small
ones, one of which may lie inside the large one or between it and the middling ones. Captions
follow what can be seen, not how the scene came about: `grammar` reads the objects alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

from regionprep.scenes.dice import Dice
from regionprep.scenes.relations import Square, between, direction, inside
from regionprep.scenes.shapes import COLOURS, SHAPES, TEXTURES, silhouette

WIDTH, HEIGHT = 192, 144
SIZES = {"large": (56, 70), "medium": (32, 42), "small": (20, 26)}
"""The sides of an object of each size, in pixels."""
CLASSES = SHAPES
"""The detector's classes; an object's class id is its shape's place here."""

VISIBLE = 0.6
"""The part of an object's pixels that others leave uncovered, at least."""

_TRIES = 40


@dataclass(frozen=True)
class Thing(Square):
    """An object: its square and its look."""

    shape: str
    colour: str
    texture: str
    size: str
    tint: tuple[int, int, int]
    """What sets its red, green and blue apart from others of its colour."""


@dataclass(frozen=True)
class Scene:
    """A backdrop (its red, green and blue) and objects, those behind first."""

    seed: int
    index: int
    backdrop: tuple[int, int, int]
    objects: tuple[Thing, ...]


def scene(seed: int, index: int) -> Scene:
    """Return scene `index` of the endless row of scenes that `seed` stands for."""
    dice = Dice(seed, index)
    while (things := _arrange(dice)) is None:
        pass
    grey = dice.within(222, 244)
    red, green, blue = (grey + dice.within(-8, 8) for _ in range(3))
    return Scene(seed, index, (red, green, blue), tuple(things))


def boxes(scene: Scene) -> tuple[Float32[np.ndarray, "n 4"], Int32[np.ndarray, " n"]]:
    """Return the objects' boxes (x1 y1 x2 y2, pixels; hidden parts count) and class ids."""
    corners = [
        (thing.left, thing.top, thing.left + thing.side, thing.top + thing.side)
        for thing in scene.objects
    ]
    classes = [CLASSES.index(thing.shape) for thing in scene.objects]
    return np.array(corners, dtype=np.float32), np.array(classes, dtype=np.int32)


def image_id(index: int) -> str:
    """Return the image id of scene `index`."""
    return f"scene-{index:06d}"


def _arrange(dice: Dice) -> list[Thing] | None:
    """Return the objects of a scene, or None where no room was found for one of them."""
    looks = _looks(dice)
    medium_count = dice.choice((1, 1, 2, 2, 3))
    small_count = dice.within(1, 4 if medium_count < 3 else 3)
    role = dice.choice(("inside", "between", "apart"))
    large = _thing(dice, next(looks), "large", _anywhere(dice, "large"))
    medium = _place_medium(dice, next(looks), large, medium_count)
    if medium is None:
        return None
    things = [large, *medium]
    for number in range(small_count):
        small = _place_small(dice, next(looks), things, role if number == 0 else "apart")
        if small is None:
            return None
        things.append(small)
    return things


Look = tuple[str, str, str]


def _looks(dice: Dice) -> itertools.chain[Look]:
    """Return looks of a shape, colour and texture; no two share both shape and colour."""
    pairs = dice.sample([(shape, colour) for shape in SHAPES for colour in COLOURS], 7)
    return itertools.chain((shape, colour, dice.choice(TEXTURES)) for shape, colour in pairs)


def _thing(dice: Dice, look: Look, size: str, square: Square) -> Thing:
    tint = (dice.within(-10, 10), dice.within(-10, 10), dice.within(-10, 10))
    return Thing(square.left, square.top, square.side, *look, size, tint)


def _anywhere(dice: Dice, size: str) -> Square:
    side = dice.within(*SIZES[size])
    return Square(dice.within(1, WIDTH - side - 1), dice.within(1, HEIGHT - side - 1), side)


def _place_medium(dice: Dice, look: Look, large: Thing, count: int) -> list[Thing] | None:
    """Return `count` objects of one look, all on the same side of the large one."""
    things: list[Thing] = []
    for _ in range(_TRIES * count):
        thing = _thing(dice, look, "medium", _anywhere(dice, "medium"))
        apart = all(_shared(thing, other) < 0.15 for other in things)
        if apart and _stands_out(thing, [large]) and _seen([large, *things, thing]):
            things.append(thing)
        if len(things) == count:
            return things if direction(large, things) is not None else None
    return None


def _place_small(dice: Dice, look: Look, things: Sequence[Thing], role: str) -> Thing | None:
    """Return a small object that plays `role`, and plays it clearly."""
    large = things[0]
    medium = [thing for thing in things if thing.size == "medium"]
    for _ in range(_TRIES):
        square = _within(dice, large) if role == "inside" else _anywhere(dice, "small")
        thing = _thing(dice, look, "small", square)
        if role == "inside":
            fits = inside(square, large)
        elif role == "between":
            fits = between(square, large, medium) and _shared(square, large) < 0.3
        else:
            fits = not between(square, large, medium, slack=8) and _shared(square, large) < 0.3
        if fits and _stands_out(thing, things) and _seen([*things, thing]):
            return thing
    return None


def _within(dice: Dice, large: Square) -> Square:
    """Return a small square about the middle of a large one."""
    side = dice.within(*SIZES["small"])
    margin = (large.side - side) // 2
    return Square(
        large.left + margin + dice.within(-3, 3), large.top + margin + dice.within(-1, 5), side
    )


def _shared(square: Square, other: Square) -> float:
    """Return the part of `square` that lies in `other`."""
    width = min(square.left + square.side, other.left + other.side) - max(square.left, other.left)
    height = min(square.top + square.side, other.top + other.side) - max(square.top, other.top)
    return max(width, 0) * max(height, 0) / (square.side * square.side)


def _stands_out(thing: Thing, others: Sequence[Thing]) -> bool:
    """Return whether no other object of the same colour touches a new one."""
    return all(thing.colour != other.colour or not _shared(thing, other) for other in others)


def _seen(things: Sequence[Thing]) -> bool:
    """Return whether enough of every object is left uncovered by those in front of it."""
    owner = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
    for number, thing in enumerate(things, start=1):
        area = owner[thing.top : thing.top + thing.side, thing.left : thing.left + thing.side]
        area[silhouette(thing.shape, thing.side)] = number
    left = np.bincount(owner.ravel(), minlength=len(things) + 1)[1:]
    whole = [silhouette(thing.shape, thing.side).sum() for thing in things]
    return bool((left >= VISIBLE * np.array(whole)).all())
