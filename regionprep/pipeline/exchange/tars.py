"""WebDataset tars of npy: `KEY.npy`, or `KEY.features.npy` with `KEY.boxes.npy` and others."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from regionprep.errors import InputError
from regionprep.pipeline.exchange.arrays import ArraySource
from regionprep.pipeline.exchange.record import files_of

# The tar's open file, where a member's data begins, and how long it is.
Place = tuple[int, int, int]


def tar_source(paths: Sequence[Path]) -> ArraySource[Place]:
    """Return the source of uncompressed tars; one that is cut gives what is whole in it."""
    index: dict[str, dict[str, Place]] = {}
    files = files_of(paths, ".tar")
    opened = []
    for path in files:
        opened.append(os.open(path, os.O_RDONLY))
        for name, role, offset, size in _members(path):
            roles = index.setdefault(name, {})
            if role in roles:
                raise InputError(f"'{name}' occurs more than once", where=path)
            roles[role] = (opened[-1], offset, size)

    def fetch(place: Place) -> bytes:
        file, offset, size = place
        return os.pread(file, size, offset)

    def close() -> None:
        for file in opened:
            os.close(file)

    return ArraySource(index, fetch, files=files, close=close)


def _members(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Give the key, role, beginning and length of every npy and npz in a tar."""
    try:
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                # The archive would keep every member it has seen.
                archive.members = []  # type: ignore[attr-defined]
                folder, _, name = member.name.rpartition("/")
                key, *extension = name.split(".")
                if member.isfile() and extension and extension[-1] in ("npy", "npz"):
                    whole = f"{folder}/{key}" if folder not in ("", ".") else key
                    yield whole, ".".join(extension[:-1]), member.offset_data, member.size
    except tarfile.ReadError as error:
        if path.stat().st_size and _is_packed(path):
            raise InputError(
                "is no tar, or a compressed one, in which no image can be looked up",
                where=path,
                mend="Decompress it first, for instance with gunzip or zstd -d.",
            ) from error


def _is_packed(path: Path) -> bool:
    """Tell whether a file does not even begin as a tar does."""
    with path.open("rb") as file:
        return file.read(512)[257:262] != b"ustar"
