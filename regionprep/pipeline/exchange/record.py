"""What every format gives: one image's arrays, checked; or why they cannot be used."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError, MissingError
from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.shards import ImageRow


@dataclass(frozen=True, eq=False)
class Record:
    """One image's arrays as its source has them.

    `features` (r, D) of any float type; `boxes` (r, 4) x1 y1 x2 y2 in pixels, `scores` (r,) and
    `classes` (r,), or None where the source has none. `width` and `height` are 0 where it does not
    tell them; so is `grid` (height, width) where the regions are no grid. `left_out` names what
    else the source has, for which our tables have no column.
    """

    features: NDArray[Any]
    boxes: NDArray[Any] | None = None
    scores: NDArray[Any] | None = None
    classes: NDArray[Any] | None = None
    width: int = 0
    height: int = 0
    grid: tuple[int, int] = (0, 0)
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        regions = len(self.features)
        shapes = {"boxes": (regions, 4), "scores": (regions,), "classes": (regions,)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array is None:
                continue
            if array.shape != shape:
                raise damaged(f"its {name} have shape {array.shape} in place of {shape}")
            if array.dtype.kind not in ("iu" if name == "classes" else "fiu"):
                raise damaged(f"its {name} are {array.dtype}, no numbers of their kind")
        if self.classes is not None and (self.classes != self.classes.astype(np.int32)).any():
            raise damaged("its classes are beyond 32 bits")


class Source(Protocol):
    """A file or folder of features: which ids it has, and one image's record at a time.

    It holds an index of where the records lie, never their values. `read` is called in threads.
    """

    @property
    def ids(self) -> Collection[str]:
        """Return the ids of the source's records."""

    @property
    def stamp(self) -> str:
        """Return the SHA-256 that tells the source from others."""

    def read(self, source_id: str) -> Record:
        """Return an image's record, or raise ImageFault for one that is damaged."""

    def close(self) -> None:
        """Let go of the files."""


class Sink(Protocol):
    """A file or folder that is being written, an image at a time."""

    def write(self, row: ImageRow, *, boxes: bool) -> None:
        """Append an image; without `boxes` its boxes are no part of what was made."""

    def close(self) -> None:
        """Write what is pending."""


def record_of(features: NDArray[Any], **fields: Any) -> Record:  # noqa: ANN401 - as Record has them
    """Return the record of a vector (D), of regions (r, D), or of a grid (height, width, D)."""
    if features.dtype.kind != "f":
        raise damaged(f"its features are {features.dtype}, no floats")
    if features.ndim == 1:
        features = features[None]
    if features.ndim == 3:
        height, width = features.shape[:2]
        fields["grid"] = (height, width)
        features = features.reshape(height * width, -1) if features.size else features[0]
    if features.ndim != 2:
        raise damaged(f"its features have {features.ndim} dimensions")
    return Record(features, **fields)


def damaged(what: str) -> ImageFault:
    """Return the fault of a record that does not say what it should."""
    return ImageFault("damaged", what)


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Make whatever a library raises at a record's bytes the fault of that record.

    None of them says what damage makes it raise: one flipped bit draws a RuntimeError (for it seems
    encrypted), an OSError or an LZMAError from zipfile, a TokenError from numpy's npy headers.
    """
    try:
        yield
    except ImageFault:
        raise
    except Exception as error:
        raise damaged(f"{what} cannot be read: {error}") from error


def stamp(ids: Iterable[str], files: Iterable[Path]) -> str:
    """Return the SHA-256 of which records a source has and how large its files are."""
    sizes = sorted(path.stat().st_size for path in files)
    return hashlib.sha256(json.dumps([sorted(ids), sizes]).encode()).hexdigest()


def files_of(paths: Sequence[Path], *endings: str) -> list[Path]:
    """Return the files meant: each path itself, or those with such endings in a folder, sorted."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError("there is no such file or folder", where=path)
        inside = [file for ending in endings for file in path.rglob(f"*{ending}")]
        found = sorted(file for file in inside if file.is_file()) if path.is_dir() else [path]
        if not found:
            raise InputError(f"holds no file that ends in {' or '.join(endings)}", where=path)
        files += found
    return files


def once(ids: Iterable[str], where: object) -> None:
    """Raise InputError that names ids which a source has twice."""
    twice = [name for name, count in Counter(ids).items() if count > 1]
    if twice:
        raise InputError(
            f"{len(twice)} ids occur more than once: {', '.join(sorted(twice)[:5])}",
            where=where,
            mend="Import the files one by one, or remove what is there twice.",
        )


def optional(name: str) -> Any:  # noqa: ANN401 - a module
    """Return a library that not everybody has, or raise MissingError with the command to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingError(
            f"this format needs the library {name}",
            mend="Install it: pip install 'regionprep[exchange]'.",
        ) from error
