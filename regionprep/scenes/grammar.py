"""Five captions a scene, all true of it and all about what stands out.

The large object is the subject of every caption; the middling ones are its partner; a small one
that lies inside the large one, or between it and its partner, comes first where there is one.
So the captions say the same in other words, each says how objects lie to each other, and only
who reads sizes, looks, counts and places off the image gets any of them right.
"""

from __future__ import annotations

from collections.abc import Sequence

from regionprep.scenes.layout import Scene, Thing
from regionprep.scenes.relations import OPPOSITE, between, direction, inside

COUNTS = ("no", "a", "two", "three", "four", "five", "six", "seven")
LONGEST = 16
"""No caption has more words than this."""


def captions(scene: Scene) -> list[str]:
    """Return the five captions of a scene, the most telling first."""
    large, *_ = things = scene.objects
    medium = [thing for thing in things if thing.size == "medium"]
    small = [thing for thing in things if thing.size == "small"]
    place = direction(large, medium)
    assert place is not None, "a layout leaves no doubt about where the large object is"
    subject, partner = describe([large]), describe(medium)
    smaller = f"{partner} {OPPOSITE[place]} {subject}"
    larger = f"{subject} is larger than {partner} and {place} {'them' if medium[1:] else 'it'}"
    there = f"there is {subject} {_spelt_out(place)} {partner}"

    for thing in small:
        guest = describe([thing])
        if inside(thing, large):
            return [
                f"{guest} inside {subject} {place} {partner}",
                f"{guest} inside {subject} with {partner}",
                f"there is {guest} inside {subject}",
                smaller,
                larger,
            ]
        if between(thing, large, medium):
            return [
                f"{guest} between {subject} and {partner}",
                f"{guest} between {partner} and {subject}",
                there,
                smaller,
                larger,
            ]
    return [
        f"{subject} {place} {partner}",
        f"{subject} {place} {partner} with {describe(small)}",
        there,
        smaller,
        larger,
    ]


def describe(things: Sequence[Thing]) -> str:
    """Return what objects of one size are called: "two striped red circles", "a small star".

    Small objects go without their texture, and several of them are just "small shapes".
    """
    first, count = things[0], len(things)
    if first.size == "small" and count > 1:
        return f"{COUNTS[count]} small shapes"
    words = [] if first.size == "medium" else [first.size]
    if first.size != "small" and first.texture != "plain":
        words.append(first.texture)
    words += [first.colour, first.shape if count == 1 else plural(first.shape)]
    article = "an" if count == 1 and words[0][0] in "aeiou" else COUNTS[count]
    return " ".join([article, *words])


def plural(shape: str) -> str:
    """Return the plural of a shape's name."""
    return shape + ("es" if shape.endswith("s") else "s")


def _spelt_out(place: str) -> str:
    return f"to the {place}" if place.endswith(" of") else place
