"""What a part and a folder's manifest say of themselves: provenance, counts, checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from regionprep.errors import StorageError
from regionprep.pipeline.shards import (
    MANIFEST,
    SCHEMA_VERSION,
    Columns,
    Plan,
    columns_of,
    read_json,
)
from regionprep.workspace import write_text

# Keys of a part's footer: provenance, known before the first row, and counts, known after the last.
PROVENANCE, COUNTS = "regionprep", "regionprep.counts"


@dataclass(frozen=True)
class PartRecord:
    """What the manifest says of a part. `grids` are the sizes (height, width) that occur in it."""

    file: str
    rows: int
    bytes: int
    sha256: str
    regions: int
    statuses: dict[str, int]
    grids: list[list[int]]


@dataclass(frozen=True)
class Footer:
    """What a whole part's footer tells."""

    metadata: pq.FileMetaData
    columns: Columns
    counts: dict[str, Any]
    fingerprint: str
    shard: int

    @classmethod
    def read(cls, path: Path) -> Footer | None:
        """Return the footer of a whole part of ours; None for every other file, and for none."""
        try:
            return cls.parse(pq.read_metadata(path), path.stat().st_size)
        except (pa.ArrowException, OSError):
            return None

    @classmethod
    def parse(cls, metadata: pq.FileMetaData, size: int) -> Footer | None:
        """Return what a file of `size` bytes tells of itself, None if it is no whole part."""
        told = metadata.metadata or {}
        try:
            provenance = json.loads(told[PROVENANCE.encode()])
            counts = json.loads(told[COUNTS.encode()])
            version = provenance["schema_version"]
            fingerprint, shard = provenance["fingerprint"], provenance["shard"]
            columns = columns_of(metadata.schema.to_arrow_schema())
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        # Values, footer, its length in 4 bytes, "PAR1": no byte more or less.
        whole = _values_end(metadata) + metadata.serialized_size + 8 == size
        if not whole or version != SCHEMA_VERSION:
            return None
        return cls(metadata, columns, counts, fingerprint, shard)

    def is_of(self, plan: Plan, shard: int) -> bool:
        """Tell whether the part is this one of this plan."""
        rows = len(plan.shard(shard))
        return (self.fingerprint, self.shard) == (plan.fingerprint, shard) and (
            self.metadata.num_rows == rows
        )


def _values_end(metadata: pq.FileMetaData) -> int:
    if not metadata.num_row_groups:
        return 4
    last = metadata.row_group(metadata.num_row_groups - 1)
    column = last.column(last.num_columns - 1)
    return int(column.data_page_offset + column.total_compressed_size)


def record(path: Path, footer: Footer) -> PartRecord:
    """Return the record of a part that an earlier run has made."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
    rows, size = footer.metadata.num_rows, path.stat().st_size
    return PartRecord(path.name, rows, size, checksum, **footer.counts)


@dataclass(frozen=True)
class Manifest:
    """What a finished folder holds."""

    stage: str
    fingerprint: str
    settings: Mapping[str, Any]
    columns: Columns
    parts: tuple[PartRecord, ...]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a folder, None where there is none; StorageError if damaged."""
        content = read_json(folder / MANIFEST)
        if content is None:
            return None
        try:
            return cls(
                content["stage"],
                content["fingerprint"],
                content["settings"],
                Columns(**content["columns"]),
                tuple(PartRecord(**part) for part in content["parts"]),
            )
        except (KeyError, TypeError) as error:
            raise StorageError(
                f"is damaged: {error}", where=folder / MANIFEST, mend="Start over with --force."
            ) from error

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, whole or not at all."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, ensure_ascii=False)
        with storage_guard(folder / MANIFEST, lambda: len(text.encode())):
            write_text(folder / MANIFEST, text + "\n")


@contextmanager
def storage_guard(path: Path, needed: Callable[[], int]) -> Iterator[None]:
    """Turn a disk's OSError into a StorageError that names path, free and needed bytes."""
    try:
        yield
    except OSError as error:
        raise _storage_error(error, path, needed()) from error


def _storage_error(error: OSError, path: Path, needed: int) -> StorageError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"cannot be written: {reason}", where=path)
    # What was written so far goes away with the temporary file, so it counts as free.
    written = path.stat().st_size if path.exists() else 0
    free = shutil.disk_usage(path.parent).free + written
    return StorageError(
        f"{reason}: {free:,} bytes are free, {needed:,} needed for this file",
        where=path,
        mend="Make room and give the same command again: what is done stays done.",
    )
