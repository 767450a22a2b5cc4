"""A Parquet writer for the one layout that parts have: values in one block, ready to be mapped.

pyarrow can be told to write such files, but then takes 15 times a row group's memory and, for
float16, ten times as long; and where a page ends is its version's own matter. This writer copies
the values as they are and puts nothing but levels and headers around them. It aligns every column's
values to 64 bytes, so that a mapped view is an ordinary array.

What it writes: format 2, all fields required, one uncompressed PLAIN v1 page a column chunk with a
checksum, levels in runs (RLE), statistics of `image_id` alone.

Source: apache/parquet-format, `parquet.thrift`, "Encodings" (RLE hybrid) and "Data Pages".
"""

from __future__ import annotations

import base64
import struct as binary_struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from regionprep.pipeline import thrift
from regionprep.pipeline.shards import SCHEMA_VERSION

MAGIC = b"PAR1"
ALIGNMENT = 64
# The format's version, not the release's: releases write the same bytes.
CREATED_BY = f"regionprep version {SCHEMA_VERSION}.0.0"

_INT32, _FLOAT, _BYTE_ARRAY, _FIXED = 1, 4, 6, 7
_REQUIRED, _REPEATED = 0, 2
_UTF8, _LIST = 0, 3
_PLAIN, _RLE = 0, 3
_NOTHING = thrift.struct({})
_STRING_TYPE, _LIST_TYPE, _FLOAT16_TYPE = (
    thrift.struct({number: _NOTHING}) for number in (1, 3, 15)
)
_PHYSICAL = {
    pa.string(): _BYTE_ARRAY,
    pa.int32(): _INT32,
    pa.float32(): _FLOAT,
    pa.float16(): _FIXED,
}


@dataclass(frozen=True)
class Page:
    """A column chunk of a row group: levels, and values as they lie in the file."""

    levels: bytes
    data: bytes | memoryview
    level_count: int
    statistics: thrift.Value | None = None


class Writer:
    """Writes row groups through `write`, and at last the footer. It owns no file."""

    def __init__(self, write: Callable[[bytes | memoryview], None], schema: pa.Schema) -> None:
        self._write_out, self.schema = write, schema
        self._place = self._rows = 0
        self._groups: list[thrift.Value] = []
        self._write(MAGIC)

    def write_group(self, columns: Mapping[str, Any], lengths: NDArray[np.int64]) -> None:
        """Write a row group.

        `columns` has the values of every field: strings or integers, one a row; for lists, an array
        of all rows' elements, of which `lengths` are each row's number.
        """
        chunks = []
        first = size = 0
        for field in self.schema:
            page = _page(field, columns[field.name], lengths)
            start, length = self._write_page(page)
            chunks.append(_chunk(field, page, start, length))
            first, size = first or start, size + length
        group = {
            1: thrift.array(chunks),
            2: thrift.i64(size),
            3: thrift.i64(len(lengths)),
            5: thrift.i64(first),
            6: thrift.i64(size),
            7: thrift.i16(len(self._groups)),
        }
        self._groups.append(thrift.struct(group))
        self._rows += len(lengths)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write the footer, with `metadata` beside the Arrow schema."""
        described = base64.b64encode(self.schema.serialize().to_pybytes()).decode()
        pairs = {**metadata, "ARROW:schema": described}
        columns = [thrift.struct({1: _NOTHING}) for _ in self.schema]
        _, footer = thrift.struct(
            {
                1: thrift.i32(2),
                2: thrift.array(_schema(self.schema)),
                3: thrift.i64(self._rows),
                4: thrift.array(self._groups),
                5: thrift.array(
                    thrift.struct({1: thrift.binary(key), 2: thrift.binary(value)})
                    for key, value in pairs.items()
                ),
                6: thrift.binary(CREATED_BY),
                7: thrift.array(columns),
            }
        )
        self._write(footer + binary_struct.pack("<I", len(footer)) + MAGIC)

    def _write_page(self, page: Page) -> tuple[int, int]:
        """Write a page so that its values are aligned; return its chunk's place and length."""
        size = len(page.levels) + len(page.data)
        if size >= 2**31:
            raise ValueError(f"a page of {size:,} bytes: Parquet holds less than 2 GiB in one")
        checksum = zlib.crc32(page.data, zlib.crc32(page.levels))
        header = {
            1: thrift.i32(0),
            2: thrift.i32(size),
            3: thrift.i32(size),
            4: thrift.i32(checksum - 2**32 if checksum >= 2**31 else checksum),
            5: thrift.struct(
                {
                    1: thrift.i32(page.level_count),
                    2: thrift.i32(_PLAIN),
                    3: thrift.i32(_RLE),
                    4: thrift.i32(_RLE),
                }
            ),
        }
        head = thrift.struct(header)[1] + page.levels
        # Columns are found by their offsets; what lies between them belongs to none.
        self._write(bytes(-(self._place + len(head)) % ALIGNMENT))
        start = self._place
        self._write(head)
        self._write(page.data)
        return start, self._place - start

    def _write(self, data: bytes | memoryview) -> None:
        self._write_out(data)
        self._place += len(data)


def _page(field: pa.Field, values: Any, lengths: NDArray[np.int64]) -> Page:  # noqa: ANN401
    if field.type == pa.string():
        encoded = [text.encode() for text in values]
        plain = b"".join(binary_struct.pack("<I", len(text)) + text for text in encoded)
        bounds = _bounds(min(encoded), max(encoded)) if field.name == "image_id" else None
        return Page(b"", plain, len(encoded), bounds)
    if not pa.types.is_list(field.type):
        return Page(b"", _bytes(np.asarray(values, "<i4")), len(values))
    element, nesting = field.type.value_type, 1
    width = 1
    if pa.types.is_fixed_size_list(element):
        element, nesting, width = element.value_type, 2, element.list_size
    values = np.ascontiguousarray(values, np.dtype(element.to_pandas_dtype()).newbyteorder("<"))
    if values.size != int(lengths.sum()) * width:
        raise ValueError(f"{values.size} values of {field.name} for {lengths.sum()} regions")
    count = values.size + int((lengths == 0).sum())
    return Page(_levels(lengths.tolist(), width, nesting), _bytes(values), count)


def _bytes(values: NDArray[Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _bounds(low: bytes, high: bytes) -> thrift.Value:
    return thrift.struct({3: thrift.i64(0), 5: thrift.binary(high), 6: thrift.binary(low)})


def _levels(lengths: Sequence[int], width: int, nesting: int) -> bytes:
    """Return repetition and definition levels of lists of `lengths`, each behind its size.

    A value's repetition level is 0 where a row begins, 1 where a region does within a row, 2 within
    a region. Its definition level is `nesting`; an empty row is one level 0 without a value.
    """
    rest = _run(2, width - 1)
    repetition = b"".join(
        _run(0, 1) + rest + ((_run(1, 1) + rest) * (length - 1) if rest else _run(1, length - 1))
        if length
        else _run(0, 1)
        for length in lengths
    )
    definition, full = b"", 0
    for length in lengths:
        if not length:
            definition += _run(nesting, full * width) + _run(0, 1)
            full = 0
        full += length
    definition += _run(nesting, full * width)
    return b"".join(binary_struct.pack("<I", len(part)) + part for part in (repetition, definition))


def _run(level: int, count: int) -> bytes:
    """Return `count` times a level of at most two bits."""
    return thrift.varint(count << 1) + bytes([level]) if count > 0 else b""


def _chunk(field: pa.Field, page: Page, start: int, length: int) -> thrift.Value:
    path, leaf = [field.name], field.type
    while leaf.num_fields:
        path, leaf = [*path, "list", "element"], leaf.value_type
    encodings = (_PLAIN, _RLE) if page.levels else (_PLAIN,)
    metadata = {
        1: thrift.i32(_PHYSICAL[leaf]),
        2: thrift.array(map(thrift.i32, encodings)),
        3: thrift.array(map(thrift.binary, path)),
        4: thrift.i32(0),
        5: thrift.i64(page.level_count),
        6: thrift.i64(length),
        7: thrift.i64(length),
        9: thrift.i64(start),
        12: page.statistics,
    }
    return thrift.struct({2: thrift.i64(start), 3: thrift.struct(metadata)})


def _schema(schema: pa.Schema) -> list[thrift.Value]:
    """Return the schema's elements, depth first."""
    elements = [thrift.struct({4: thrift.binary("schema"), 5: thrift.i32(len(schema))})]
    for field in schema:
        elements += _elements(field.name, field.type)
    return elements


def _elements(name: str, type_: pa.DataType) -> list[thrift.Value]:
    named = {3: thrift.i32(_REQUIRED), 4: thrift.binary(name)}
    if type_.num_fields:
        one = thrift.i32(1)
        outer = {**named, 5: one, 6: thrift.i32(_LIST), 10: _LIST_TYPE}
        inner = {3: thrift.i32(_REPEATED), 4: thrift.binary("list"), 5: one}
        below = _elements("element", type_.value_type)
        return [thrift.struct(outer), thrift.struct(inner), *below]
    fields = {
        1: thrift.i32(_PHYSICAL[type_]),
        2: thrift.i32(2) if type_ == pa.float16() else None,
        **named,
        6: thrift.i32(_UTF8) if type_ == pa.string() else None,
        10: {pa.string(): _STRING_TYPE, pa.float16(): _FLOAT16_TYPE}.get(type_),
    }
    return [thrift.struct(fields)]
