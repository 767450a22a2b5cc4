"""One part of a folder, written whole or not at all.

The rename is the commit. What is not yet flushed, checked and renamed has a temporary name, which
no reader looks at and the next run sweeps away.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regionprep.errors import StorageError
from regionprep.pipeline.parts import COUNTS, PROVENANCE, Footer, PartRecord, storage_guard
from regionprep.pipeline.shards import SCHEMA_VERSION, Columns, ImageRow, Plan, part_name, schema
from regionprep.workspace import sync_folder

GROUP_ROWS = 256
GROUP_BYTES = 16 * 2**20
# One page a column chunk, whatever its size; `mapped` says why.
LAYOUT: Mapping[str, Any] = {
    "compression": "none",
    "use_dictionary": False,
    "data_page_version": "1.0",
    "data_page_size": 2**40,
    "write_batch_size": 2**24,
    "write_page_checksum": True,
    "write_statistics": ["image_id"],
}


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
    """A file that hashes what is written to it, and swallows what comes after a failure."""

    closed = False

    def __init__(self, file: FileIO) -> None:
        self.file, self.hash, self.bytes, self.failed = file, hashlib.sha256(), 0, False

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has a buffer
        """Append `data`."""
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        if not self.failed:
            # Until it is done: an interrupt may cut it short.
            self.failed = True
            self.hash.update(view)
            self._append(view)
            self.failed = False
        return len(view)

    def _append(self, view: memoryview) -> None:
        # A file without a buffer may take less than it is given.
        while view:
            view = view[self.file.write(view) :]

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.bytes

    def flush(self) -> None:
        """Do nothing: the writer of the part flushes once, at the end."""

    def close(self) -> None:
        """Do nothing: the writer of the part closes the file."""


class PartWriter:
    """Writes the rows of one part, in the plan's order, and commits them by a rename.

    Used as a context manager: what is not committed at its end is removed. Memory: about 15 times
    `GROUP_BYTES`. Raises StorageError for a full or failing disk.
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
            described = schema(self.columns).with_metadata(self._provenance())
            self._writer = pq.ParquetWriter(self.sink, described, **LAYOUT)
            undo.callback(self._abandon)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _abandon(self) -> None:
        """Close the writer where it was not: its destructor would do so, and loudly."""
        self.sink.failed = True
        with suppress(Exception):
            self._writer.close()

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
            self._writer.add_key_value_metadata({COUNTS: json.dumps(self.counts.content())})
            self._writer.close()
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
                table = to_table(self._rows, self.columns)
                self._writer.write_table(table, row_group_size=len(self._rows))
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

    def _provenance(self) -> dict[bytes, bytes]:
        content = {
            "schema_version": SCHEMA_VERSION,
            "stage": self.plan.stage,
            "fingerprint": self.plan.fingerprint,
            "shard": self.shard,
            "shard_size": self.plan.shard_size,
            "settings": self.plan.settings,
        }
        return {PROVENANCE: json.dumps(content, ensure_ascii=False, sort_keys=True).encode()}

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


def to_table(rows: Sequence[ImageRow], columns: Columns) -> pa.Table:
    """Return rows as an Arrow table of the parts' schema."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row.boxes) for row in rows], out=offsets[1:])
    arrays = {
        "boxes": _joined([row.boxes for row in rows], np.float32),
        "scores": _joined([row.scores for row in rows], np.float32),
        "classes": _joined([row.classes for row in rows], np.int32),
    }
    if columns.feature_width is not None:
        arrays["features"] = _joined([row.features for row in rows], columns.dtype)
    target = schema(columns)
    filled = [
        _list_array(arrays[name], offsets, target.field(name).type)
        if name in arrays
        else _array([getattr(row, name) for row in rows], target.field(name).type)
        for name in target.names
    ]
    return pa.Table.from_arrays(filled, schema=target)


def _joined(arrays: Sequence[Any], dtype: Any) -> NDArray[Any]:  # noqa: ANN401
    return np.concatenate([np.asarray(array, dtype) for array in arrays])


# Arrow arrays from buffers: `pa.array` would import pandas wherever it is installed.


def _array(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Return integers or strings as an Arrow array."""
    if type_ == pa.int32():
        return _flat(np.array(values, np.int32), type_)
    encoded = [value.encode() for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(type_, len(values), buffers)


def _list_array(
    values: NDArray[Any], offsets: NDArray[np.int32], type_: pa.ListType
) -> pa.ListArray:
    element = type_.value_type
    if pa.types.is_fixed_size_list(element):
        vectors = _flat(values, element.value_type)
        children = pa.FixedSizeListArray.from_arrays(vectors, type=element)
    else:
        children = _flat(values, element)
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(type_, len(offsets) - 1, buffers, children=[children])


def _flat(values: NDArray[Any], type_: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(type_, values.size, [None, pa.py_buffer(values)])


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
