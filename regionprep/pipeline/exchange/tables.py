"""Any Parquet with a column of vectors: a row an image, (D), (r, D) or (height, width, D).

The rows are copied once into an Arrow file without a name, in the temporary folder, from where any
of them is read without decoding its neighbours; it needs as much room as the values take.
"""

from __future__ import annotations

import bisect
import mmap
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regionprep.errors import InputError
from regionprep.pipeline.exchange.record import Record, damaged, files_of, once, record_of, stamp
from regionprep.pipeline.images import ImageFault

IDS = ("image_id", "id", "key", "__key__", "image", "image_name", "file_name", "filename", "path")
ROWS = 64
"""Rows that are copied together: at 36 x 2048 float32 they take 19 MB."""
_NUMBERS = ("width", "height", "grid_height", "grid_width")
_ARRAYS = ("boxes", "scores", "classes")
_TEXTS = ("status", "error")


class TableSource:
    """Parquet files by image id."""

    def __init__(
        self, paths: Sequence[Path], *, column: str | None = None, id_column: str | None = None
    ) -> None:
        files = files_of(paths, ".parquet")
        schema = _schema(files[0])
        self._ids = _id_column(schema, id_column, files[0])
        self._vectors = _vector_column(schema, column, files[0])
        extra = [name for name in (*_NUMBERS, *_ARRAYS, *_TEXTS) if name in schema.names]
        columns = list(dict.fromkeys([self._ids, self._vectors, *extra]))
        self._lock = threading.Lock()
        self._batches, self._ends, names = _copied(files, columns, self._ids)
        once(names, ", ".join(map(str, files)))
        self._rows = {name: row for row, name in enumerate(names)}
        self.ids = self._rows.keys()
        self.stamp = stamp([f"{self._vectors}/{name}" for name in names], files)

    def read(self, source_id: str) -> Record:
        """Return the record of a row."""
        row = self._rows[source_id]
        number = bisect.bisect_right(self._ends, row)
        with self._lock:
            batch = self._batches.get_batch(number)
        place = row - (self._ends[number - 1] if number else 0)
        told = {name: batch.column(name)[place] for name in batch.schema.names}
        status = told["status"].as_py() if "status" in told else "ok"
        if status != "ok":
            raise ImageFault(status, str(told["error"].as_py()) if "error" in told else "")
        features = _values(told[self._vectors])
        width, height, rows, columns = (_number(told.get(name)) for name in _NUMBERS)
        arrays = {name: _values(told[name]) for name in _ARRAYS if name in told}
        if rows * columns == len(features) and rows:
            features = features.reshape(rows, columns, -1)
        return record_of(features, width=width, height=height, **arrays)

    def close(self) -> None:
        """Let go of the copy; its room is free then."""
        del self._batches


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"is no Parquet file that can be read: {error}", where=path) from None


def _id_column(schema: pa.Schema, named: str | None, path: Path) -> str:
    found = next((name for name in IDS if name in schema.names), None) if named is None else named
    if found not in schema.names:
        raise InputError(
            f"which column holds the ids? There are: {', '.join(schema.names)}",
            where=path,
            mend="Name it with --id-column.",
        )
    return str(found)


def _vector_column(schema: pa.Schema, named: str | None, path: Path) -> str:
    lists = [field.name for field in schema if _holds_floats(field.type)]
    known = [name for name in lists if name not in _ARRAYS]
    found = "features" if "features" in known else known[0] if len(known) == 1 else None
    found = found if named is None else named
    if found not in lists:
        raise InputError(
            f"which column holds the vectors? Lists of floats are: {', '.join(lists) or 'none'}",
            where=path,
            mend="Name it with --column.",
        )
    return str(found)


def _holds_floats(type_: pa.DataType) -> bool:
    lists = _is_list(type_)
    while _is_list(type_):
        type_ = type_.value_type
    return lists and pa.types.is_floating(type_)


def _is_list(type_: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(type_) for is_kind in kinds)


def _copied(
    files: Sequence[Path], columns: Sequence[str], ids: str
) -> tuple[Any, list[int], list[str]]:
    """Return the rows as an open Arrow file, where each of its batches ends, and the ids."""
    names: list[str] = []
    ends: list[int] = []
    with tempfile.TemporaryFile() as file:
        writer = None
        for path, batch in _batches(files, columns):
            if writer is None:
                schema = batch.schema
                writer = pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema)
            if batch.schema != schema:
                raise InputError(f"its columns are not those of {files[0]}", where=path)
            writer.write_batch(batch)
            names += [str(name) for name in batch.column(ids).to_pylist()]
            ends.append(len(names))
        if writer is None:
            raise InputError("there is no row in it", where=files[0])
        writer.close()
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.ipc.open_file(pa.py_buffer(mapped)), ends, names


def _batches(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[Path, Any]]:
    for path in files:
        try:
            with pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as parquet:
                for batch in parquet.iter_batches(ROWS, columns=list(columns), use_threads=False):
                    yield path, batch.replace_schema_metadata(None)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"cannot be read: {error}", where=path) from None


def _number(scalar: Any) -> int:  # noqa: ANN401 - a pyarrow scalar
    value = None if scalar is None else scalar.as_py()
    return value if isinstance(value, int) and value >= 0 else 0


def _values(scalar: Any) -> NDArray[Any]:  # noqa: ANN401 - a pyarrow scalar
    if not scalar.is_valid:
        raise damaged("its vectors are null")
    return _array(scalar.values)


def _array(values: pa.Array) -> NDArray[Any]:
    """Return nested lists as an array; raise ImageFault for nulls and ragged ones."""
    if values.null_count:
        raise damaged(f"{values.null_count} of its values are null")
    if not _is_list(values.type):
        return np.asarray(np.from_dlpack(values))
    inner = _array(values.flatten())
    if pa.types.is_fixed_size_list(values.type):
        lengths = {values.type.list_size}
    else:
        lengths = set(values.value_lengths().to_pylist()) or {0}
    if len(lengths) > 1:
        raise damaged(f"its vectors have {len(lengths)} lengths")
    return inner.reshape(len(values), *lengths, *inner.shape[1:])
