"""Images as named npy and npz blobs, wherever these lie: in folders, an LMDB or tars.

A blob is told by its role: "" (the only one of an image), "features" and "boxes", or what a tar
calls it. Nothing pickled is ever loaded: such arrays are refused, or passed over where, as in
bottom-up-attention.pytorch's `info`, nothing needs them.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from regionprep.pipeline.exchange.record import Record, damaged, decoding, record_of, stamp
from regionprep.pipeline.shards import ImageRow

LARGEST = 2**31
"""Bytes that an array of an npz may unpack to: a few kilobytes can claim any size."""

FIELDS = {
    **dict.fromkeys(["", "feat", "feats", "x", "feature", "features", "att"], "features"),
    **dict.fromkeys(["bbox", "bboxes", "box", "boxes"], "boxes"),
    "scores": "scores",
    "classes": "classes",
    "num_bbox": "count",
    **dict.fromkeys(["image_w", "width"], "width"),
    **dict.fromkeys(["image_h", "height"], "height"),
}

Locator = TypeVar("Locator")


class ArraySource(Generic[Locator]):
    """Blobs by image id and role; `fetch` reads one, given where it lies."""

    def __init__(
        self,
        index: Mapping[str, Mapping[str, Locator]],
        fetch: Callable[[Locator], bytes],
        *,
        files: Iterable[Path],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        # An image with boxes alone has no features to give.
        self._index = {
            name: roles
            for name, roles in index.items()
            if any(FIELDS.get(role) == "features" for role in roles)
        }
        self._fetch, self._close = fetch, close
        self.ids = self._index.keys()
        self.stamp = stamp(self.ids, files)

    def read(self, source_id: str) -> Record:
        """Return the record of an image's blobs."""
        roles = self._index[source_id]
        try:
            blobs = {role: self._fetch(place) for role, place in roles.items() if role in FIELDS}
        except OSError as error:
            raise damaged(f"it cannot be read: {error.strerror or error}") from None
        return decode(blobs)

    def close(self) -> None:
        """Let go of the files."""
        self._close()


def decode(blobs: Mapping[str, bytes]) -> Record:
    """Return the record of an image's blobs, each an npy or an npz."""
    values: dict[str, NDArray[Any]] = {}
    left_out: list[str] = []
    for role, data in blobs.items():
        if data.startswith(npy_format.MAGIC_PREFIX):
            values[FIELDS[role]] = _npy(data)
        elif data.startswith(b"PK"):
            found, others = _npz(FIELDS[role], data)
            values |= found
            left_out += others
        else:
            raise damaged("it is neither npy nor npz (what is pickled is never loaded)")
    if "features" not in values:
        raise damaged("it has no features")
    features, boxes = values["features"], values.get("boxes")
    count = _number(values, "count") if "count" in values else len(features)
    if count > len(features):
        raise damaged(f"it has {len(features)} rows of features in place of {count}")
    return record_of(
        features[:count],
        boxes=None if boxes is None else boxes[:count],
        scores=values.get("scores"),
        classes=values.get("classes"),
        width=_number(values, "width"),
        height=_number(values, "height"),
        left_out=tuple(left_out),
    )


def features_npz(row: ImageRow, *, boxes: bool) -> bytes:
    """Return an image's npz: `feat`, as others read it, and what the way back needs."""
    assert row.features is not None, "a store of regions has no features to export"
    grid = (row.grid_height, row.grid_width)
    feat = row.features.reshape(*grid, -1) if any(grid) else row.features
    told: dict[str, Any] = {"width": np.int32(row.width), "height": np.int32(row.height)}
    if boxes:
        told |= {"scores": row.scores, "classes": row.classes}
    sink = io.BytesIO()
    np.savez(sink, feat=feat, **told)
    return sink.getvalue()


def npy(array: NDArray[Any]) -> bytes:
    """Return an array as the bytes of an npy file."""
    sink = io.BytesIO()
    npy_format.write_array(sink, np.ascontiguousarray(array), allow_pickle=False)
    return sink.getvalue()


def mean_vector(row: ImageRow) -> NDArray[np.float32]:
    """Return the mean of an image's features, which others call `fc`; zeros of no region."""
    assert row.features is not None, "a store of regions has no features to export"
    if not len(row.features):
        return np.zeros(row.features.shape[1], np.float32)
    return np.asarray(row.features.mean(axis=0, dtype=np.float32))


def _npy(data: bytes) -> NDArray[Any]:
    """Return the array of an npy file: a view, of exactly the bytes that its header claims."""
    file = io.BytesIO(data)
    with decoding("its npy header"):
        version = npy_format.read_magic(file)
        header = (
            npy_format.read_array_header_1_0
            if version == (1, 0)
            else (npy_format.read_array_header_2_0)
        )
        shape, by_columns, dtype = header(file)
    if dtype.hasobject:
        raise damaged("its array is pickled, and what is pickled is never loaded")
    count = int(np.prod(shape, dtype=object)) if shape else 1
    there = len(data) - file.tell()
    if count * dtype.itemsize != there:
        raise damaged(f"its array {shape} of {dtype} is {there} bytes long")
    flat = np.frombuffer(data, dtype, count, file.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")


def _npz(role: str, data: bytes) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return the arrays that a record has a place for (one alone is `role`), and other names."""
    with decoding("its npz"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        wanted = {FIELDS[name]: entry for name, entry in names.items() if name in FIELDS}
        if not wanted and len(names) == 1:
            wanted = {role: next(iter(names.values()))}
        others = [name for name, entry in names.items() if entry not in wanted.values()]
        unpacked = {field: _unpacked(archive, entry) for field, entry in wanted.items()}
    return {field: _npy(array) for field, array in unpacked.items()}, others


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > LARGEST:
        raise damaged(f"{entry.filename} claims to be {entry.file_size:,} bytes long")
    return archive.read(entry)


def _number(values: Mapping[str, NDArray[Any]], name: str) -> int:
    value = values.get(name, np.zeros((), np.int64))
    if value.size != 1 or value.dtype.kind not in "iuf" or not 0 <= value.item() < 2**31:
        raise damaged(f"its {name} is no number that it could be")
    return int(value.item())
