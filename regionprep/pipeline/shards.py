"""What a folder of shards is: one row an image, the plan of its parts, the Parquet schema.

A folder of regions or features holds

- `plan.json`: which image goes to which part, under which settings; written first, never changed;
- `part-00000.parquet` ...: the rows, sorted by image id, `shard_size` images a part;
- `manifest.json`: what the parts hold and their checksums; written last, only when all are there.

A part is an ordinary Parquet file whose layout lets a reader map the values instead of decoding
them: see `regionprep.pipeline.mapped`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from regionprep import __version__
from regionprep.errors import InputError, MismatchError, StorageError
from regionprep.workspace import write_text

SCHEMA_VERSION = 1
PLAN = "plan.json"
MANIFEST = "manifest.json"
SHARD_SIZE = 2048
UNBOUND = ("versions", "notes")

StageName = Literal["regions", "features"]
DType = Literal["float16", "float32"]

_ARROW = {"float16": pa.float16(), "float32": pa.float32()}


@dataclass(frozen=True)
class Columns:
    """Which columns a stage fills: regions alone, or features of a width and type too."""

    feature_width: int | None = None
    dtype: DType = "float16"


# Not frozen, though nobody changes one: making a frozen row takes 1.5 µs more, a fifth of a read.
@dataclass(eq=False, slots=True)
class ImageRow:
    """One image's row: what a stage returns and what a reader gives.

    `boxes` (r, 4) float32 x1 y1 x2 y2 in pixels of the upright image; `scores` (r,) float32;
    `classes` (r,) int32; `features` (r, D) float16 or float32, or None for regions alone. Of a
    grid, r = grid_height * grid_width, row by row; both are 0 when it is none. `status` is "ok",
    or why the image has no regions, with the reason in `error`.
    """

    image_id: str
    width: int
    height: int
    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    features: NDArray[Any] | None = None
    status: str = "ok"
    error: str = ""
    grid_height: int = 0
    grid_width: int = 0

    @classmethod
    def failed(
        cls,
        image_id: str,
        status: str,
        error: str,
        *,
        width: int = 0,
        height: int = 0,
        feature_width: int | None = None,
        dtype: DType = "float16",
    ) -> ImageRow:
        """Return the row of an image that cannot be used: no regions, a status and a reason."""
        features = None if feature_width is None else np.zeros((0, feature_width), dtype)
        return cls(
            image_id,
            width,
            height,
            np.zeros((0, 4), np.float32),
            np.zeros(0, np.float32),
            np.zeros(0, np.int32),
            features,
            status,
            error,
        )

    @property
    def ok(self) -> bool:
        """Tell whether the image could be used."""
        return self.status == "ok"


@dataclass(frozen=True)
class Plan:
    """Which images go to which part, under which settings.

    The shards depend on the ids and the shard size only. `settings` is provenance that JSON can
    hold; its keys `versions` (of libraries) and `notes` (device, paths) are recorded but bind
    nobody: they have no part in the fingerprint, and a run goes on under newer libraries.
    """

    stage: StageName
    settings: Mapping[str, Any] = field(hash=False)
    shard_size: int
    image_ids: tuple[str, ...] = field(repr=False)

    @classmethod
    def make(
        cls,
        image_ids: Iterable[str],
        *,
        stage: StageName,
        settings: Mapping[str, Any],
        shard_size: int = SHARD_SIZE,
    ) -> Plan:
        """Return the plan over `image_ids`, sorted.

        Raises InputError for no ids, ids twice, ids that UTF-8 cannot hold, or a size below 1.
        """
        if shard_size < 1:
            raise InputError(f"a shard holds at least 1 image, not {shard_size}")
        ids = tuple(sorted(image_ids))
        _check_ids(ids)
        versions = {"numpy": np.__version__, "pyarrow": pa.__version__, "regionprep": __version__}
        settings = {**settings, "versions": {**versions, **settings.get("versions", {})}}
        return cls(stage, json.loads(_canonical(settings)), shard_size, ids)

    @classmethod
    def read(cls, folder: Path) -> Plan | None:
        """Return the plan of a folder, None where there is none; StorageError if it is damaged."""
        content = read_json(folder / PLAN)
        if content is None:
            return None
        try:
            plan = cls(
                content["stage"],
                content["settings"],
                content["shard_size"],
                tuple(content["image_ids"]),
            )
            whole = plan.fingerprint == content["fingerprint"]
        except (KeyError, TypeError, AttributeError):
            whole = False
        if not whole:
            raise StorageError(
                "the plan was altered: its fingerprint is not that of its content",
                where=folder / PLAN,
                mend="Start over with --force.",
            )
        return plan

    def write(self, folder: Path) -> None:
        """Write the plan into a folder, whole or not at all."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "shard_size": self.shard_size,
            "image_ids": self.image_ids,
        }
        write_text(folder / PLAN, json.dumps(content, ensure_ascii=False) + "\n")

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of all that decides the parts' content."""
        binding = {key: value for key, value in self.settings.items() if key not in UNBOUND}
        content = [SCHEMA_VERSION, self.stage, binding, self.shard_size, self.image_ids]
        return hashlib.sha256(_canonical(content).encode()).hexdigest()

    @property
    def shard_count(self) -> int:
        """Return the number of parts."""
        return -(-len(self.image_ids) // self.shard_size)

    def shard(self, number: int) -> tuple[str, ...]:
        """Return the image ids of a part."""
        return self.image_ids[number * self.shard_size : (number + 1) * self.shard_size]

    def require_same(self, other: Plan, folder: Path) -> None:
        """Raise MismatchError naming what differs from `other`, the plan that a folder has."""
        if self.fingerprint == other.fingerprint:
            return
        raise MismatchError(
            "was made by another plan: " + "; ".join(_differences(other, self)),
            where=folder,
            mend="Start over with --force, or give the options that it was made with.",
        )


def shard_size_of(folder: Path, *, anew: bool) -> int:
    """Return how many images a shard of `folder` is to hold: as its plan says, if it goes on."""
    plan = None if anew else Plan.read(folder)
    return SHARD_SIZE if plan is None else plan.shard_size


def part_name(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:05d}.parquet"


def command(stage: str, folder: Path) -> str:
    """Return the command that makes a folder, as a workspace lays folders out."""
    verb = {"regions": "prep detect", "features": "prep extract"}.get(stage, f"prep {stage}")
    if stage == "regions" and folder.parent.name == "regions":
        return f"{verb} --detector {folder.name}"
    if stage == "features" and folder.parent.parent.name == "features":
        return f"{verb} --detector {folder.parent.name} --backbone {folder.name}"
    return verb


def schema(columns: Columns) -> pa.Schema:
    """Return the Arrow schema of a part: every field and element required, nothing nullable."""
    fields = [
        _required("image_id", pa.string()),
        *(_required(name, pa.int32()) for name in ("width", "height")),
        *(_required(name, pa.string()) for name in ("status", "error")),
        *(_required(name, pa.int32()) for name in ("grid_height", "grid_width")),
        _required("boxes", _lists(_vectors(pa.float32(), 4))),
        _required("scores", _lists(pa.float32())),
        _required("classes", _lists(pa.int32())),
    ]
    if columns.feature_width is not None:
        vectors = _vectors(_ARROW[columns.dtype], columns.feature_width)
        fields.append(_required("features", _lists(vectors)))
    return pa.schema(fields)


def columns_of(schema: pa.Schema) -> Columns:
    """Return which columns a part of ours has, from its schema."""
    if "features" not in schema.names:
        return Columns()
    vectors = schema.field("features").type.value_type
    dtype: DType = "float16" if vectors.value_type == pa.float16() else "float32"
    return Columns(vectors.list_size, dtype)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, None where there is none; StorageError if damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", where=path) from error
    except (ValueError, RecursionError) as error:
        raise StorageError(
            "is damaged: no JSON", where=path, mend="Start over with --force."
        ) from error
    if not isinstance(content, dict):
        raise StorageError("is damaged: no object", where=path, mend="Start over with --force.")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise MismatchError(
            f"has format version {version!r}; this regionprep reads version {SCHEMA_VERSION}",
            where=path,
            mend="Use the regionprep that made it, or make it again with --force.",
        )
    return content


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one level, their keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


def _lists(value: pa.DataType) -> pa.DataType:
    return pa.list_(_required("element", value))


def _vectors(value: pa.DataType, width: int) -> pa.DataType:
    return pa.list_(_required("element", value), width)


def _canonical(content: object) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_ids(ids: Sequence[str]) -> None:
    if not ids:
        raise InputError("there are no images to plan", mend="Make the table: `prep splits`.")
    twice = sorted({first for first, second in pairwise(ids) if first == second})
    if twice:
        raise InputError(
            f"{len(twice)} image ids occur more than once: {_some(twice)}",
            mend="Give every image an id of its own.",
        )
    odd = [name for name in ids if not _encodable(name)]
    if odd:
        raise InputError(f"{len(odd)} image ids are no valid text: {_some(map(ascii, odd))}")


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _some(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def _differences(old: Plan, new: Plan) -> list[str]:
    before, now = (
        flat({**old.settings, "stage": old.stage}),
        flat({**new.settings, "stage": new.stage}),
    )
    before["shard_size"], now["shard_size"] = old.shard_size, new.shard_size
    told = [
        f"{key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key.partition(".")[0] not in UNBOUND
    ]
    gone = sorted(set(old.image_ids) - set(new.image_ids))
    come = sorted(set(new.image_ids) - set(old.image_ids))
    told += [f"{len(gone)} images are gone ({_some(gone)})"] if gone else []
    told += [f"{len(come)} images are new ({_some(come)})"] if come else []
    return told
