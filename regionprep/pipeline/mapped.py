"""Where in a Parquet file the values of a column lie as one block, if they do.

All fields of a part are required; nothing is compressed or encoded by a dictionary; a column chunk
is one v1 data page. Such a chunk is, byte after byte:

    header | length | repetition levels | length | definition levels | values

so that the values, PLAIN, are a little-endian array which ends where the chunk ends. A file by
another writer can look almost so and hold something else: float32 where float16 is expected, two
pages, nulls. So every byte of the chunk has to be accounted for before a value is believed.

Source: the Parquet format, `parquet.thrift` and "Data Pages" (apache/parquet-format).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regionprep.pipeline.thrift import Reader

# parquet.thrift: PageType.DATA_PAGE, Encoding.PLAIN, Encoding.RLE.
_DATA_PAGE, _PLAIN, _RLE = 0, 0, 3
# The longest header a v1 page has without statistics is about 40 bytes.
_HEADER_LIMIT = 1024


@dataclass(frozen=True)
class Leaf:
    """A column of values: its path in the file, type, and how many values one region has."""

    path: str
    dtype: str
    width: int
    nesting: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one region's values."""
        return (self.width,) if self.nesting == 2 else ()


BOXES = Leaf("boxes.list.element.list.element", "<f4", 4, 2)
SCORES = Leaf("scores.list.element", "<f4", 1, 1)
CLASSES = Leaf("classes.list.element", "<i4", 1, 1)


def features_leaf(width: int, dtype: str) -> Leaf:
    """Return the column of features of a width and type."""
    return Leaf("features.list.element.list.element", np.dtype(dtype).str, width, 2)


def map_values(
    buffer: pa.Buffer, metadata: pq.FileMetaData, group: int, leaf: Leaf, lengths: NDArray[np.int64]
) -> NDArray[Any] | None:
    """Return a row group's values as a read-only view (regions, ...) of the mapped file, or None.

    `lengths` are the numbers of regions of the group's rows. None means that the chunk is not laid
    out as described above, whatever its values are: it has to be decoded.
    """
    regions = int(lengths.sum())
    # A row without regions is one level without a value.
    levels = regions * leaf.width + int((lengths == 0).sum())
    start = _values_start(buffer, metadata, group, leaf, regions * leaf.width, levels)
    if start is None:
        return None
    values = np.frombuffer(buffer, leaf.dtype, regions * leaf.width, start)
    return values.reshape(regions, *leaf.shape)


def _values_start(
    buffer: pa.Buffer, metadata: pq.FileMetaData, group: int, leaf: Leaf, values: int, levels: int
) -> int | None:
    column = _find(metadata, group, leaf)
    if column is None or column.num_values != levels:
        return None
    start, end = column.data_page_offset, column.data_page_offset + column.total_compressed_size
    if not 4 <= start < end <= buffer.size:
        return None
    try:
        header, length = read_header(bytes(buffer[start : min(start + _HEADER_LIMIT, end)]))
    except (IndexError, ValueError):
        return None
    page = start + length
    data = header.get(5)
    one_plain_page = (
        header.get(1) == _DATA_PAGE
        and header.get(2) == header.get(3) == end - page
        and isinstance(data, dict)
        and (data.get(1), data.get(2), data.get(3), data.get(4)) == (levels, _PLAIN, _RLE, _RLE)
    )
    if not one_plain_page:
        return None
    for _ in ("repetition", "definition"):
        if page + 4 > end:
            return None
        page += 4 + struct.unpack("<I", bytes(buffer[page : page + 4]))[0]
    return page if page + values * np.dtype(leaf.dtype).itemsize == end else None


def _find(metadata: pq.FileMetaData, group: int, leaf: Leaf) -> pq.ColumnChunkMetaData | None:
    """Return the chunk at a leaf's path if its type and encodings are what the leaf says."""
    columns = metadata.row_group(group)
    for index in range(columns.num_columns):
        column, declared = columns.column(index), metadata.schema.column(index)
        if column.path_in_schema == leaf.path:
            plain = (
                column.compression == "UNCOMPRESSED"
                and not column.has_dictionary_page
                and {"PLAIN", "RLE"} == set(column.encodings)
                and declared.max_repetition_level == leaf.nesting
                # More would mean optional fields, and so perhaps nulls.
                and declared.max_definition_level == leaf.nesting
            )
            return column if plain and _has_type(declared, leaf.dtype) else None
    return None


def _has_type(declared: Any, dtype: str) -> bool:  # noqa: ANN401 - pyarrow has no types
    if dtype == "<f2":
        found = (declared.physical_type, declared.length, declared.logical_type.type)
        return found == ("FIXED_LEN_BYTE_ARRAY", 2, "FLOAT16")
    return bool(declared.physical_type == {"<f4": "FLOAT", "<i4": "INT32"}[dtype])


def read_header(data: bytes) -> tuple[dict[int, Any], int]:
    """Return a page header's fields by number, and how many bytes it takes."""
    reader = Reader(data)
    fields = reader.struct()
    return fields, reader.place
