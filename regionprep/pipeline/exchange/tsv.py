"""The bottom-up detector's TSV: a line an image, arrays in base64.

Six fields: image id, width, height, number of boxes, boxes, features. Ten fields: image id, height,
width, object ids (int64), object scores, attribute ids (int64), attribute scores, number of boxes,
boxes, features. All floats are float32. Attributes have no column in our tables: they are left out
on the way in, and -1 with a score of 0 on the way out.
"""

from __future__ import annotations

import binascii
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from regionprep.errors import InputError
from regionprep.pipeline.exchange.record import Record, damaged, files_of, once, record_of, stamp
from regionprep.pipeline.shards import ImageRow

CHUNK = 2**20
LONGEST_ID = 1024


class TsvSource:
    """TSV files by image id: where each line begins, and how long it is."""

    def __init__(self, paths: Sequence[Path]) -> None:
        files = files_of(paths, ".tsv")
        self._files = [os.open(path, os.O_RDONLY) for path in files]
        lines = [
            (name, (number, start, length))
            for number, file in enumerate(self._files)
            for name, start, length in _lines(file)
        ]
        once((name for name, _ in lines), ", ".join(map(str, files)))
        self._places = dict(lines)
        self.ids = self._places.keys()
        self.stamp = stamp(self.ids, files)

    def read(self, source_id: str) -> Record:
        """Return the record of a line."""
        file, start, length = self._places[source_id]
        fields = os.pread(self._files[file], length, start).rstrip(b"\r\n").split(b"\t")
        if len(fields) == 6:
            _, width, height, count, boxes, features = fields
            told: dict[str, Any] = {}
        elif len(fields) == 10:
            _, height, width, classes, scores, _, _, count, boxes, features = fields
            told = {
                "classes": _array("object ids", classes, np.int64),
                "scores": _array("object scores", scores, np.float32),
                "left_out": ("attributes",),
            }
        else:
            raise damaged(f"its line has {len(fields)} fields in place of 6 or 10")
        regions = _number("number of boxes", count)
        values = _array("features", features, np.float32)
        if len(values) % regions if regions else len(values):
            raise damaged(f"its features are {len(values)} numbers, for {regions} boxes")
        return record_of(
            values.reshape(regions, -1) if regions else np.zeros((0, 0), np.float32),
            boxes=_boxes(boxes, regions),
            width=_number("width", width),
            height=_number("height", height),
            **told,
        )

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)


class TsvSink:
    """A TSV file of six fields, or of ten."""

    def __init__(self, target: Path, *, fields: int = 6) -> None:
        self._file = target.open("wb")
        self._fields = fields

    def write(self, row: ImageRow, *, boxes: bool) -> None:
        """Append a line; a format that cannot do without boxes gets those there are."""
        if set(row.image_id) & set("\t\r\n"):
            raise InputError(f"image id {row.image_id!r} has no place in a table of tabs and lines")
        assert row.features is not None, "a store of regions has no features to export"
        ends = [str(len(row.boxes)), _text(row.boxes, "<f4"), _text(row.features, "<f4")]
        if self._fields == 6:
            line = [row.image_id, str(row.width), str(row.height), *ends]
        else:
            unknown = np.full(len(row.boxes), -1)
            objects = [_text(row.classes, "<i8"), _text(row.scores, "<f4")]
            attributes = [_text(unknown, "<i8"), _text(np.zeros(len(unknown)), "<f4")]
            line = [row.image_id, str(row.height), str(row.width), *objects, *attributes, *ends]
        self._file.write("\t".join(line).encode() + b"\n")

    def close(self) -> None:
        """Close the file, flushed to disk."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


def _lines(file: int) -> Iterator[tuple[str, int, int]]:
    """Give the first field, beginning and length of every line, however long the line is."""
    head, start, position = b"", 0, 0
    while chunk := os.pread(file, CHUNK, position):
        begin = 0
        while (end := chunk.find(b"\n", begin)) >= 0:
            yield (
                _name(head + chunk[begin : min(end, begin + LONGEST_ID)]),
                start,
                (position + end - start),
            )
            head, begin, start = b"", end + 1, position + end + 1
        if len(head) < LONGEST_ID:
            head += chunk[begin : begin + LONGEST_ID]
        position += len(chunk)
    if position > start:
        yield _name(head), start, position - start


def _name(head: bytes) -> str:
    return head.split(b"\t", 1)[0][:LONGEST_ID].decode(errors="backslashreplace").strip()


def _number(name: str, field: bytes) -> int:
    if not field.isdigit() or len(field) > 9:
        raise damaged(f"its {name} is {field[:20]!r}, no number")
    return int(field)


def _array(name: str, field: bytes, dtype: DTypeLike) -> NDArray[Any]:
    try:
        data = b64decode(field, validate=True)
    except binascii.Error as error:
        raise damaged(f"its {name} are no base64: {error}") from None
    size = np.dtype(dtype).itemsize
    if len(data) % size:
        raise damaged(f"its {name} are {len(data)} bytes, which {size} does not divide")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def _boxes(field: bytes, regions: int) -> NDArray[Any]:
    values = _array("boxes", field, np.float32)
    if len(values) != 4 * regions:
        raise damaged(f"its boxes are {len(values)} numbers of float32 in place of {4 * regions}")
    return values.reshape(regions, 4)


def _text(array: NDArray[Any], dtype: str) -> str:
    return b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()
