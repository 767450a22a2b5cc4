"""Which record of a source belongs to which image of the workspace: three plain rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from regionprep.errors import InputError, MissingError
from regionprep.pipeline.names import decode_path
from regionprep.pipeline.tables import ImageRecord

RuleName = Literal["exact", "stem", "number"]

_DIGITS = re.compile(r"[0-9]+")


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    known = (".jpg", ".jpeg", ".png", ".webp")
    return path.stem if path.suffix.lower() in known else path.name


def _number(name: str) -> str | None:
    """Return the last number in a name without its zeros: COCO_val2014_000000000139 is 139."""
    found = _DIGITS.findall(name)
    return found[-1].lstrip("0") or "0" if found else None


# What of an image and what of a source's id have to be the same; None belongs to nothing.
Rule = tuple[Callable[[ImageRecord], str | None], Callable[[str], str | None]]
RULES: dict[RuleName, Rule] = {
    "exact": (lambda image: image.image_id, lambda name: name),
    "stem": (lambda image: PurePosixPath(decode_path(image.path)).stem, _stem),
    "number": (lambda image: _number(image.image_id), _number),
}


@dataclass(frozen=True)
class Matches:
    """The source's id of each image that has one, and how many on either side have no partner."""

    of_image: dict[str, str]
    missing: int
    surplus: int


def match(
    images: Sequence[ImageRecord],
    source_ids: Collection[str],
    rule: RuleName,
    *,
    skip_missing: bool = False,
    where: object = None,
) -> Matches:
    """Return which record belongs to which image by `rule`.

    Raises MissingError that counts the images without one, unless `skip_missing` and some have
    one; InputError where two images or two records come to the same.
    """
    found = _matched(images, source_ids, rule, where)
    missing = len(images) - len(found)
    if missing and not (skip_missing and found):
        raise MissingError(
            f"{missing:,} of the {len(images):,} images have no features there: {len(found):,} ids "
            f"match by the rule '{rule}'. Images are called {_some(images)}; the source's "
            f"{len(source_ids):,} ids are {', '.join(map(repr, sorted(source_ids)[:3])) or 'none'}",
            where=where,
            mend=_mend(images, source_ids, rule, len(found)),
        )
    return Matches(found, missing, len(source_ids) - len(found))


def _matched(
    images: Sequence[ImageRecord], source_ids: Collection[str], rule: RuleName, where: object
) -> dict[str, str]:
    of_image, of_source = RULES[rule]
    wanted: dict[str, str] = {}
    for image in images:
        key = of_image(image)
        if key is None:
            continue
        if key in wanted:
            raise _twice("images", rule, key, wanted[key], image.image_id, where)
        wanted[key] = image.image_id
    found: dict[str, str] = {}
    for source_id in source_ids:
        key = of_source(source_id)
        image_id = None if key is None else wanted.get(key)
        if key is None or image_id is None:
            continue
        if image_id in found:
            raise _twice("ids of the source", rule, key, found[image_id], source_id, where)
        found[image_id] = source_id
    return found


def _mend(
    images: Sequence[ImageRecord], source_ids: Collection[str], rule: RuleName, matched: int
) -> str:
    counts: dict[RuleName, int] = {}
    for other in RULES:
        try:
            counts[other] = len(_matched(images, source_ids, other, None))
        except InputError:
            counts[other] = 0
    best = max(counts, key=lambda name: counts[name])
    hints = [f"`--ids {best}` matches {counts[best]:,}."] if counts[best] > matched else []
    if matched:
        hints.append("`--skip-missing` makes the others rows with the status 'missing'.")
    return " ".join(hints) or "No rule of --ids matches any: is this the source of these images?"


def _twice(
    what: str, rule: RuleName, key: str, first: str, second: str, where: object
) -> InputError:
    return InputError(
        f"two {what} are both '{key}' by the rule '{rule}': {first!r} and {second!r}",
        where=where,
        mend="Choose another rule with --ids: " + ", ".join(RULES) + ".",
    )


def _some(images: Sequence[ImageRecord]) -> str:
    return ", ".join(repr(image.image_id) for image in images[:3])
