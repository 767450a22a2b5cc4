"""One part of a folder, written whole or not at all.

The rename is the commit. What is not yet flushed, checked and renamed has a temporary name, which
no reader looks at and the next run sweeps away.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from regionprep.errors import StorageError
from regionprep.pipeline.parquet import Writer
from regionprep.pipeline.parts import COUNTS, PROVENANCE, Footer, PartRecord, storage_guard
from regionprep.pipeline.shards import SCHEMA_VERSION, Columns, ImageRow, Plan, part_name, schema
from regionprep.workspace import sync_folder

GROUP_ROWS = 256
GROUP_BYTES = 16 * 2**20


@dataclass
class Counts:
    """What is in the rows written so far."""

    rows: int = 0
    regions: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    grids: set[tuple[int, int]] = field(default_factory=set)

    def add(self, row: ImageRow) -> None:
        """Count a row."""
        self.rows += 1
        self.regions += len(row.boxes)
        self.statuses[row.status] += 1
        if row.ok:
            self.grids.add((row.grid_height, row.grid_width))

    def content(self) -> dict[str, Any]:
        """Return the counts as a footer and a manifest hold them, always in the same order."""
        return {
            "regions": self.regions,
            "statuses": dict(sorted(self.statuses.items())),
            "grids": [list(grid) for grid in sorted(self.grids)],
        }


class Sink:
    """A file that hashes what is written to it."""

    def __init__(self, file: FileIO) -> None:
        self.file, self.hash, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data)
        self.hash.update(view)
        self._append(view)
        self.bytes += len(view)

    def _append(self, view: memoryview) -> None:
        # A file without a buffer may take less than it is given.
        while view:
            view = view[self.file.write(view) :]


class PartWriter:
    """Writes the rows of one part, in the plan's order, and commits them by a rename.

    Used as a context manager: what is not committed at its end is removed. Memory: a row
    group twice. Raises StorageError for a full or failing disk.
    """

    def __init__(self, folder: Path, plan: Plan, shard: int, columns: Columns) -> None:
        self.plan, self.shard, self.columns = plan, shard, columns
        self.ids = plan.shard(shard)
        self.final = folder / part_name(shard)
        self.temporary = folder / f".{self.final.name}.{os.getpid()}.tmp"
        self.counts = Counts()
        self._rows: list[ImageRow] = []
        self._bytes = 0

    def __enter__(self) -> PartWriter:
        with ExitStack() as undo, self._guard():
            undo.callback(self.temporary.unlink, missing_ok=True)
            self.sink = Sink(undo.enter_context(self.temporary.open("wb", buffering=0)))
            self._parquet = Writer(self.sink.write, schema(self.columns))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def add(self, row: ImageRow) -> None:
        """Append the next row of the plan."""
        expected = self.ids[self.counts.rows]
        if row.image_id != expected:
            raise ValueError(f"the stage returned {row.image_id!r} in place of {expected!r}")
        _check_shapes(row, self.columns)
        size = 0 if row.features is None else row.features.nbytes
        if self._rows and (len(self._rows) == GROUP_ROWS or self._bytes + size > GROUP_BYTES):
            self._flush()
        self._rows.append(row)
        self._bytes += size
        self.counts.add(row)

    def commit(self) -> PartRecord:
        """Flush the part to disk, open it again, check it, and give it its final name."""
        if self.counts.rows != len(self.ids):
            raise ValueError(f"{self.counts.rows} rows of {len(self.ids)} in {self.final.name}")
        self._flush()
        with self._guard():
            told = {PROVENANCE: self._provenance(), COUNTS: self.counts.content()}
            texts = {key: json.dumps(value, ensure_ascii=False) for key, value in told.items()}
            self._parquet.finish(texts)
            os.fsync(self.sink.file.fileno())
            self._check()
            self.temporary.replace(self.final)
            sync_folder(self.final.parent)
        return PartRecord(
            self.final.name,
            self.counts.rows,
            self.sink.bytes,
            self.sink.hash.hexdigest(),
            **self.counts.content(),
        )

    def _flush(self) -> None:
        if self._rows:
            with self._guard():
                lengths = np.array([len(row.boxes) for row in self._rows], np.int64)
                self._parquet.write_group(_columns(self._rows, self.columns), lengths)
        self._rows, self._bytes = [], 0

    def _check(self) -> None:
        footer = Footer.read(self.temporary)
        size = self.temporary.stat().st_size
        if size != self.sink.bytes or footer is None or not footer.is_of(self.plan, self.shard):
            raise StorageError("was not written as it was meant to be", where=self.temporary)
        with pq.ParquetFile(self.temporary, pre_buffer=False) as parquet:
            ids = parquet.read(["image_id"], use_threads=False)
        if tuple(ids["image_id"].to_pylist()) != self.ids:
            raise StorageError("was not written as it was meant to be", where=self.temporary)

    def _provenance(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "stage": self.plan.stage,
            "fingerprint": self.plan.fingerprint,
            "shard": self.shard,
            "shard_size": self.plan.shard_size,
            "settings": self.plan.settings,
        }

    @contextmanager
    def _guard(self) -> Iterator[None]:
        with storage_guard(self.temporary, self._estimate):
            yield

    def _estimate(self) -> int:
        """Return about how many bytes the whole part takes."""
        written = self.counts.rows - len(self._rows)
        pending = self._bytes + sum(row.boxes.nbytes * 2 + 64 for row in self._rows)
        known = max(self.sink.bytes if written else 0, 0) + pending
        return known * len(self.ids) // max(self.counts.rows, 1)


def _columns(rows: Sequence[ImageRow], columns: Columns) -> dict[str, Any]:
    """Return the rows' columns: a list of each field, an array of all elements of each list."""
    dtypes = {"boxes": "float32", "scores": "float32", "classes": "int32"}
    if columns.feature_width is not None:
        dtypes["features"] = columns.dtype
    filled: dict[str, Any] = {}
    for name in schema(columns).names:
        filled[name] = [getattr(row, name) for row in rows]
    for name, dtype in dtypes.items():
        filled[name] = np.concatenate([np.asarray(array, dtype) for array in filled[name]])
    return filled


def _check_shapes(row: ImageRow, columns: Columns) -> None:
    regions = len(row.boxes)
    wanted: dict[str, tuple[int, ...]] = {
        "boxes": (regions, 4),
        "scores": (regions,),
        "classes": (regions,),
    }
    if columns.feature_width is not None:
        wanted["features"] = (regions, columns.feature_width)
    for name, shape in wanted.items():
        found = np.shape(getattr(row, name))
        if found != shape:
            raise ValueError(f"{row.image_id}: {name} have shape {found} in place of {shape}")
    cells = row.grid_height * row.grid_width
    if cells and cells != regions:
        raise ValueError(f"{row.image_id}: a grid of {cells} cells with {regions} regions")
