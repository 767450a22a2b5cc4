"""LMDBs of npy and npz by image id: `cocobu_att.lmdb` and `cocobu_box.lmdb`, or one alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from regionprep.errors import InputError
from regionprep.pipeline.exchange.arrays import ArraySource, features_npz, mean_vector, npy
from regionprep.pipeline.exchange.folders import role_of
from regionprep.pipeline.exchange.record import damaged, optional
from regionprep.pipeline.shards import ImageRow

LARGEST_DATABASE = 2**40
"""Bytes of address space, not of disk: the file grows as it is filled."""
PENDING = 16
"""Images that are written together."""

Place = tuple[Any, bytes]


def database_source(paths: Sequence[Path]) -> ArraySource[Place]:
    """Return the source of LMDBs: files, folders, or a folder that holds some."""
    library = optional("lmdb")
    index: dict[str, dict[str, Place]] = {}
    files, opened = [], []
    for path in (found for given in paths for found in _databases(given)):
        try:
            database = library.open(
                str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False
            )
            opened.append(database)
            role = role_of(path.stem) or ""
            for key in _keys(database):
                roles = index.setdefault(key.decode(errors="backslashreplace"), {})
                if role in roles:
                    raise InputError(f"id {key!r} is in another of the databases too", where=path)
                roles[role] = (database, key)
        except library.Error as error:
            raise InputError(f"is no LMDB that can be read: {error}", where=path) from None
        files.append(path / "data.mdb" if path.is_dir() else path)

    def fetch(place: Place) -> bytes:
        database, key = place
        try:
            with database.begin() as reading:
                return bytes(reading.get(key))
        except library.Error as error:
            raise damaged(f"the database cannot be read: {error}") from None

    def close() -> None:
        for database in opened:
            database.close()

    return ArraySource(index, fetch, files=files, close=close)


class DatabaseSink:
    """The databases `cocobu_att.lmdb`, `cocobu_box.lmdb` and `cocobu_fc.lmdb` in a folder."""

    def __init__(self, target: Path) -> None:
        self._library = optional("lmdb")
        target.mkdir()
        self._target = target
        self._open: dict[str, Any] = {}
        self._pending: dict[str, list[tuple[bytes, bytes]]] = {}

    def write(self, row: ImageRow, *, boxes: bool) -> None:
        """Put an image's values under its id."""
        self._put("att", row, features_npz(row, boxes=boxes))
        self._put("fc", row, npy(mean_vector(row)))
        if boxes:
            self._put("box", row, npy(row.boxes))

    def close(self) -> None:
        """Write what is pending, and close the databases."""
        for name in self._pending:
            self._flush(name)
        for database in self._open.values():
            database.close()

    def _put(self, name: str, row: ImageRow, value: bytes) -> None:
        key = row.image_id.encode()
        if not 0 < len(key) <= 511:
            raise InputError(f"image id {row.image_id!r} is no key: LMDB takes 1 to 511 bytes")
        pending = self._pending.setdefault(name, [])
        pending.append((key, value))
        if len(pending) >= PENDING:
            self._flush(name)

    def _flush(self, name: str) -> None:
        if name not in self._open:
            self._open[name] = self._library.open(
                str(self._target / f"cocobu_{name}.lmdb"),
                subdir=False,
                lock=False,
                map_size=LARGEST_DATABASE,
            )
        try:
            with self._open[name].begin(write=True) as writing:
                for key, value in self._pending[name]:
                    writing.put(key, value)
        except self._library.Error as error:
            # Its own errors carry no errno; a full disk is what they mean when writing.
            raise OSError(str(error)) from error
        self._pending[name] = []


def _databases(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError("there is no such file or folder", where=path)
    if path.is_file() or (path / "data.mdb").is_file():
        return [path]
    found = sorted(
        child
        for child in path.iterdir()
        if (child / "data.mdb").is_file() or (child.suffix in (".lmdb", ".mdb") and child.is_file())
    )
    if not found:
        raise InputError("holds no LMDB", where=path)
    return found


def _keys(database: Any) -> Iterator[bytes]:  # noqa: ANN401 - only there where it is installed
    with database.begin() as reading, reading.cursor() as cursor:
        for key in cursor.iternext(values=False):
            yield bytes(key)
