"""The values of a part that cannot be mapped, decoded once into a raw cache and mapped from there.

Parts of other writers, or of a pyarrow that lays pages out in another way, hold the same values in
another form. They are decoded row group by row group, checked, and kept under the part's checksum.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regionprep.pipeline.shards import Columns

Values = tuple[NDArray[Any], ...]


def decode_part(path: Path, checksum: str, columns: Columns, lengths: NDArray[np.int64]) -> Values:
    """Return boxes, scores, classes (and features) of all regions of a part, mapped or in memory.

    `lengths` are the rows' numbers of regions. Raises ValueError where the values are not those of
    such a part: nulls, other lengths, numbers that do not fit the type.
    """
    kinds: dict[str, tuple[str, int]] = {
        "boxes": ("float32", 4),
        "scores": ("float32", 0),
        "classes": ("int32", 0),
    }
    if columns.feature_width is not None:
        kinds["features"] = (columns.dtype, columns.feature_width)
    folder = cache_folder() / checksum
    if not folder.is_dir():
        try:
            _fill(folder, path, kinds, lengths)
        except OSError:
            # No room or no right to write a cache: memory has to do.
            return tuple(_decode(path, name, *kind, lengths) for name, kind in kinds.items())
    return tuple(
        np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
        for name in kinds
    )


def cache_folder() -> Path:
    """Return where decoded parts are kept: `regionprep/decoded` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "regionprep" / "decoded"


def _fill(
    folder: Path, path: Path, kinds: dict[str, tuple[str, int]], lengths: NDArray[np.int64]
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, kind in kinds.items():
            np.save(temporary / f"{name}.npy", _decode(path, name, *kind, lengths))
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was faster: its files are the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _decode(
    path: Path, name: str, dtype: str, width: int, lengths: NDArray[np.int64]
) -> NDArray[Any]:
    """Return a column's values of all regions: (regions, width), or (regions,) for width 0."""
    regions = int(lengths.sum())
    values = np.zeros((regions, width) if width else regions, dtype)
    start = row = 0
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        for group in range(parquet.metadata.num_row_groups):
            lists = parquet.read_row_group(group, [name], use_threads=False)[name].combine_chunks()
            if lists.null_count or not np.array_equal(
                lists.value_lengths(), lengths[row : row + len(lists)]
            ):
                raise ValueError(f"{name} and scores differ in their numbers of regions")
            flat = _numbers(lists.flatten(), name, width)
            end = start + len(flat) // max(width, 1)
            with np.errstate(over="ignore"):
                values[start:end] = flat.reshape(values[start:end].shape)
            if not np.array_equal(values[start:end].reshape(-1), flat):
                raise ValueError(f"{name} have values that {dtype} does not hold")
            start, row = end, row + len(lists)
    return values


def _numbers(elements: pa.Array, name: str, width: int) -> NDArray[Any]:
    """Return the numbers of a row group's regions, flat."""
    if width:
        if elements.null_count or (
            not pa.types.is_fixed_size_list(elements.type)
            and not np.all(elements.value_lengths().to_numpy() == width)
        ):
            raise ValueError(f"{name} are not {width} values each")
        regions = len(elements)
        elements = elements.flatten()
        if len(elements) != regions * width:
            raise ValueError(f"{name} are not {width} values each")
    if elements.null_count:
        raise ValueError(f"{name} have nulls")
    return np.asarray(elements.to_numpy(zero_copy_only=False))
