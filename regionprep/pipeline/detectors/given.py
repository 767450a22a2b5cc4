"""Boxes made elsewhere: COCO results or COCO annotations."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, TypeAdapter, ValidationError

from regionprep.errors import InputError, MismatchError
from regionprep.manifests import DetectorManifest
from regionprep.pipeline.detectors.detector import (
    Candidates,
    Networkless,
    Pixels,
    Resources,
    options,
)
from regionprep.pipeline.documents import read_json
from regionprep.pipeline.tables import ImageRecord

log = logging.getLogger(__name__)

KNOWN = (
    "Give COCO results, a list of {image_id, category_id, bbox: [x, y, width, height], score}, "
    "or COCO annotations, {images, annotations, categories}."
)
SHOWN = 5

Key = TypeVar("Key")


class _Box(BaseModel):
    image_id: int | str
    category_id: int
    bbox: tuple[float, float, float, float]
    score: float = 1.0


class _Image(BaseModel):
    id: int | str
    file_name: str = ""
    width: int | None = None
    height: int | None = None


class _Category(BaseModel):
    id: int
    name: str


class _Annotations(BaseModel):
    annotations: list[_Box]
    images: list[_Image] = []
    categories: list[_Category] = []


@dataclass(frozen=True, eq=False)
class _Given:
    """An image's boxes as the file has them: xyxy (n, 4), scores (n,), class ids (n,)."""

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.intp]


class Boxes(Networkless):
    """The boxes of a COCO file, taken as they are, clipped to the image.

    Boxes outside their image, without area, or with NaN or infinite numbers are dropped and
    counted. An image's id in the file is its id in the table, or else the file's name for it, or
    the number that ends its id or file name there (COCO's 139 is `000000000139.jpg`). Class ids
    count the file's categories in the order of their ids. Images without boxes have 0 regions.

    Raises InputError for a file of another form or of other images, MismatchError where the file
    gives an image another size.
    """

    given = True
    batch_size = 32

    def __init__(self, file: Path, images: Sequence[ImageRecord]) -> None:
        self.file = file
        content = _read(file)
        numbers = sorted({box.category_id for box in content.annotations})
        numbers = sorted({*numbers, *(category.id for category in content.categories)})
        names = {category.id: category.name for category in content.categories}
        self.classes = tuple(names.get(number, str(number)) for number in numbers)
        places = {number: place for place, number in enumerate(numbers)}
        owners = _owners(content, images, file)
        sizes = {image.image_id: (image.width, image.height) for image in images if image.width}
        _check_sizes(content.images, owners, sizes, file)
        groups: dict[str, list[_Box]] = {}
        self.dropped = strangers = 0
        for box in content.annotations:
            owner = owners.get(box.image_id)
            if owner is None:
                strangers += 1
            elif _usable(box, sizes.get(owner)):
                groups.setdefault(owner, []).append(box)
            else:
                self.dropped += 1
        self._given = {owner: _columns(boxes, places) for owner, boxes in groups.items()}
        self._tell(len(content.annotations), strangers)

    @classmethod
    def from_manifest(cls, manifest: DetectorManifest, resources: Resources) -> Self:
        """Return the boxes of the file, or raise what is wrong with it."""
        resources.refuse(manifest, "weights")
        options(manifest)
        if resources.boxes is None:
            raise InputError(
                f"detector '{manifest.name}' takes its boxes from a file",
                mend=f"Give it with --boxes FILE. {KNOWN}",
            )
        return cls(resources.boxes, resources.images)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the boxes."""
        return {"boxes": {"sha256": hashlib.sha256(self.file.read_bytes()).hexdigest()}}

    def detect(self, images: Sequence[Pixels], image_ids: Sequence[str]) -> list[Candidates]:
        """Return each image's boxes, with the score in the column of their class."""
        return [
            self._candidates(image_id, *image.shape[:2])
            for image, image_id in zip(images, image_ids, strict=True)
        ]

    def _candidates(self, image_id: str, height: int, width: int) -> Candidates:
        given = self._given.get(image_id)
        if given is None:
            return Candidates(
                np.zeros((0, 4), np.float32), np.zeros((0, len(self.classes)), np.float32)
            )
        boxes = given.boxes.clip(0, np.array([width, height] * 2, np.float32))
        inside = (boxes[:, 2:] > boxes[:, :2]).all(1)
        scores = np.zeros((len(boxes), len(self.classes)), np.float32)
        scores[np.arange(len(boxes)), given.classes] = given.scores
        return Candidates(boxes[inside], scores[inside])

    def _tell(self, total: int, strangers: int) -> None:
        if self.dropped:
            log.warning(
                "%s: dropped %d of %d boxes: outside their image, without area or not finite",
                *(self.file, self.dropped, total),
            )
        if strangers:
            log.warning(
                "%s: left out %d of %d boxes: their images are not in images.parquet",
                *(self.file, strangers, total),
            )


def _read(file: Path) -> _Annotations:
    content = read_json(file, allow_nan=True)  # such boxes are dropped and counted
    try:
        if isinstance(content, list):
            return _Annotations(annotations=TypeAdapter(list[_Box]).validate_python(content))
        return _Annotations.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(step) for step in fault["loc"])
        raise InputError(
            f"is in no known form: {place or 'the whole'}: {fault['msg']}", where=file, mend=KNOWN
        ) from None


def _owners(
    content: _Annotations, images: Sequence[ImageRecord], file: Path
) -> dict[int | str, str]:
    """Return the table's image id for each of the file's that it has."""
    ids = {image.image_id for image in images}
    names = _only((name, image.image_id) for image in images for name in _names(image))
    numbers = _only(
        (number, image.image_id)
        for image in images
        for number in {_number(image.image_id), _number(PurePosixPath(image.path).stem)}
    )
    files = {image.id: image.file_name for image in content.images}
    owners: dict[int | str, str] = {}
    for theirs in {box.image_id for box in content.annotations} | files.keys():
        named = PurePosixPath(files.get(theirs) or str(theirs))
        ours = str(theirs) if str(theirs) in ids else names.get(named.name)
        ours = ours or names.get(named.stem) or numbers.get(_number(str(theirs)))
        if ours:
            owners[theirs] = ours
    if content.annotations and not owners:
        some = ", ".join(str(box.image_id) for box in content.annotations[:SHOWN])
        raise InputError(
            f"none of its images is in images.parquet: {some}, ... there, "
            f"{', '.join(image.image_id for image in images[:SHOWN])}, ... here",
            where=file,
            mend="Give the boxes of this dataset's images.",
        )
    return owners


def _names(image: ImageRecord) -> set[str]:
    path = PurePosixPath(image.path)
    return {path.name, path.stem}


def _number(name: str) -> int | None:
    digits = re.search(r"[0-9]{1,18}$", name)
    return int(digits[0]) if digits else None


def _only(pairs: Iterable[tuple[Key, str]]) -> dict[Key, str]:
    """Return the image id of each key that belongs to one image alone."""
    found: dict[Key, set[str]] = {}
    for key, image_id in pairs:
        found.setdefault(key, set()).add(image_id)
    return {key: ids.pop() for key, ids in found.items() if key is not None and len(ids) == 1}


def _check_sizes(
    theirs: Sequence[_Image],
    owners: Mapping[int | str, str],
    sizes: Mapping[str, tuple[int, int]],
    file: Path,
) -> None:
    wrong = [
        f"{image.id} is {image.width} x {image.height} there, {wide} x {high} here"
        for image in theirs
        if image.width and image.height and image.id in owners
        for wide, high in [sizes.get(owners[image.id], (image.width, image.height))]
        if (wide, high) != (image.width, image.height)
    ]
    if wrong:
        raise MismatchError(
            f"its boxes belong to other pixels: {len(wrong)} images have another size: "
            + "; ".join(wrong[:SHOWN]),
            where=file,
            mend="Give boxes of these images as they are, upright and not resized.",
        )


def _columns(found: Sequence[_Box], places: Mapping[int, int]) -> _Given:
    boxes = np.array([box.bbox for box in found], np.float64)
    boxes[:, 2:] += boxes[:, :2]
    return _Given(
        boxes.astype(np.float32),
        np.array([box.score for box in found], np.float32),
        np.array([places[box.category_id] for box in found], np.intp),
    )


def _usable(box: _Box, size: tuple[int, int] | None) -> bool:
    """Tell whether a box is finite and has area inside the image, if its size is known."""
    with np.errstate(over="ignore"):
        x, y, wide, high, score = np.array([*box.bbox, box.score], np.float32)
    if not np.isfinite([x, y, x + wide, y + high, score]).all():
        return False
    width, height = size or (np.inf, np.inf)
    return bool(min(x + wide, width) > max(x, 0) and min(y + high, height) > max(y, 0))
