"""`prep import`: features made elsewhere become tables like those of `prep extract`.

The source is indexed once; then the executor runs a plan over the workspace's images whose stage
looks each one up, so that a killed import goes on as every stage does. The plan's fingerprint holds
the ids and the sizes of the source's files, and the values of its first usable record.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError
from regionprep.pipeline.exchange.formats import open_source
from regionprep.pipeline.exchange.matching import Matches, RuleName, match
from regionprep.pipeline.exchange.record import Record, Source
from regionprep.pipeline.executor import Outcome, run_plan
from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.shards import SHARD_SIZE, Columns, DType, ImageRow, Plan, StageName
from regionprep.pipeline.tables import ImageRecord, images_fingerprint, read_images
from regionprep.workspace import Workspace

_NAME = re.compile(r"\w[\w.+-]*", re.ASCII)


@dataclass(frozen=True)
class Imported:
    """What an import came to; `regions` is None for a source without boxes."""

    regions: Outcome | None
    features: Outcome
    notes: tuple[str, ...]

    @property
    def failed(self) -> int:
        """Return how many images could not be used."""
        return self.features.failed

    def __str__(self) -> str:
        outcomes = [str(outcome) for outcome in (self.regions, self.features) if outcome]
        return "\n".join([*outcomes, *(f"  noted: {note}" for note in self.notes)])


def run_import(
    workspace: Workspace,
    format_name: str,
    paths: Sequence[Path],
    *,
    detector: str,
    backbone: str,
    ids: RuleName = "exact",
    skip_missing: bool = False,
    dtype: DType | None = None,
    shard_size: int | None = None,
    force: bool = False,
    progress: bool = True,
    **options: object,
) -> Imported:
    """Bring features of another project into `features/DETECTOR/BACKBONE/` of the workspace.

    Where the source has boxes, `regions/DETECTOR/` is made too. `dtype` is the source's unless it
    is given (float64 becomes float32). `ids` is the rule by which records belong to images;
    `options` are the format's own. Raises MissingError where images have no record, unless
    `skip_missing` makes them rows with that status, InputError for a source that cannot be
    opened, and what `executor.run_plan` raises.
    """
    _check_names(detector=detector, backbone=backbone)
    images = read_images(workspace)
    with closing(open_source(format_name, paths, **options)) as source:
        where = ", ".join(map(str, paths))
        matches = match(images, source.ids, ids, skip_missing=skip_missing, where=where)
        first = _first_usable(source, matches, where)
        stored: DType = dtype or ("float16" if first.features.dtype == np.float16 else "float32")
        has_boxes = first.boxes is not None
        about = {
            "format": format_name,
            "stamp": source.stamp,
            "first": _digest(first),
            "ids": ids,
            "boxes": has_boxes,
        }
        common = {
            "detector": detector,
            "classes": [],
            "images": images_fingerprint(workspace, images),
            "source": about,
            "notes": {"paths": [str(path.absolute()) for path in paths]},
        }
        names = [image.image_id for image in images]
        records = {image.image_id: image for image in images}

        def plan(stage: StageName, **settings: object) -> Plan:
            settings, size = {**common, **settings}, shard_size or SHARD_SIZE
            return Plan.make(names, stage=stage, settings=settings, shard_size=size)

        def run(made: Plan, folder: Path, columns: Columns) -> Outcome:
            lookup = Lookup(source, matches.of_image, records, columns, has_boxes=has_boxes)
            return run_plan(made, folder, lambda: lookup, force=force, progress=progress)

        regions, boxes = None, ""
        if has_boxes:
            of_boxes = plan("regions", adapter={"kind": "boxes"}, boxes={"sha256": source.stamp})
            regions = run(of_boxes, workspace.regions(detector), Columns())
            boxes = of_boxes.fingerprint
        width = first.features.shape[1]
        of_features = plan(
            "features",
            backbone=backbone,
            boxes=boxes,
            grid=any(first.grid),
            dtype=stored,
            width=width,
        )
        features = run(of_features, workspace.features(detector, backbone), Columns(width, stored))
    return Imported(regions, features, tuple(_notes(first, matches, stored)))


class Lookup:
    """The stage that looks an image's record up: rows in, rows out."""

    batch_size = 16

    def __init__(
        self,
        source: Source,
        source_ids: Mapping[str, str],
        images: Mapping[str, ImageRecord],
        schema: Columns,
        *,
        has_boxes: bool,
    ) -> None:
        self.source, self.source_ids, self.images = source, source_ids, images
        self.schema, self.has_boxes = schema, has_boxes

    def read(self, image_id: str) -> ImageRow:
        """Return the row of an image, or raise ImageFault with its size."""
        image = self.images[image_id]
        try:
            source_id = self.source_ids.get(image_id)
            if source_id is None:
                raise ImageFault("missing", "the imported source has no features of it")
            return self._row(image, self.source.read(source_id))
        except ImageFault as fault:
            raise ImageFault(
                fault.status, fault.error, width=image.width, height=image.height
            ) from None

    def __call__(self, items: list[ImageRow]) -> list[ImageRow]:
        """Return the rows as they were read."""
        return items

    def _row(self, image: ImageRecord, record: Record) -> ImageRow:
        regions = len(record.features)
        width, height = record.width or image.width, record.height or image.height
        if (record.boxes is not None) != self.has_boxes:
            raise ImageFault("damaged", "only some of the source's records have boxes")
        boxes = _cells(record, width, height) if record.boxes is None else record.boxes
        return ImageRow(
            image.image_id,
            width,
            height,
            np.ascontiguousarray(boxes, np.float32),
            _or(record.scores, np.ones(regions, np.float32)),
            _or(record.classes, np.zeros(regions, np.int32)),
            self._features(record.features),
            grid_height=record.grid[0],
            grid_width=record.grid[1],
        )

    def _features(self, features: NDArray[Any]) -> NDArray[Any] | None:
        width = self.schema.feature_width
        if width is None:
            return None
        if len(features) and features.shape[1] != width:
            raise ImageFault(
                "damaged", f"its features are {features.shape[1]} wide, those of others {width}"
            )
        with np.errstate(over="ignore"):  # the executor marks the row that overflows
            return features.astype(self.schema.dtype).reshape(len(features), width)


def _first_usable(source: Source, matches: Matches, where: str) -> Record:
    """Return the record that says how wide features are, of the first image that has any."""
    reason = "none has any region"
    for image_id in sorted(matches.of_image):
        try:
            found = source.read(matches.of_image[image_id])
        except ImageFault as fault:
            reason = f"{image_id}: {fault.error}"
            continue
        if found.features.size:
            return found
    raise InputError(f"not one record can be used; the last: {reason}", where=where)


def _digest(record: Record) -> str:
    digest = hashlib.sha256(str((record.features.dtype, record.features.shape)).encode())
    digest.update(np.ascontiguousarray(record.features).tobytes())
    return digest.hexdigest()


def _cells(record: Record, width: int, height: int) -> NDArray[np.float32]:
    """Return boxes where the source has none: a grid's cells, else the whole image each."""
    rows, columns = record.grid
    if not rows * columns:
        return np.tile(np.array([0, 0, width, height], np.float32), (len(record.features), 1))
    y, x = np.linspace(0, height, rows + 1), np.linspace(0, width, columns + 1)
    top, left = np.meshgrid(y[:-1], x[:-1], indexing="ij")
    bottom, right = np.meshgrid(y[1:], x[1:], indexing="ij")
    return np.stack([left, top, right, bottom], axis=-1).reshape(-1, 4).astype(np.float32)


def _or(array: NDArray[Any] | None, default: NDArray[Any]) -> NDArray[Any]:
    return default if array is None else np.ascontiguousarray(array, default.dtype)


def _notes(first: Record, matches: Matches, stored: DType) -> list[str]:
    notes = []
    if matches.surplus:
        notes.append(f"{matches.surplus:,} records of the source belong to no image here")
    if first.boxes is None:
        kind = "its grid's cells" if any(first.grid) else "the whole image"
        notes.append(f"the source has no boxes: a region's box is {kind}")
    elif first.boxes.dtype != np.float32:
        notes.append(f"boxes were {first.boxes.dtype} and are stored as float32")
    if first.features.dtype.itemsize > np.dtype(stored).itemsize:
        notes.append(f"features were {first.features.dtype} and are stored as {stored}")
    if first.left_out:
        notes.append(f"left out, for no column holds it: {', '.join(first.left_out)}")
    if not first.width:
        notes.append("image sizes are those of images.parquet: the source has none")
    return notes


def _check_names(**names: str) -> None:
    for option, name in names.items():
        if not _NAME.fullmatch(name):
            raise InputError(
                f"--{option} {name!r} is no name for a folder",
                mend="Take letters, digits, '.', '_', '+' and '-'.",
            )
