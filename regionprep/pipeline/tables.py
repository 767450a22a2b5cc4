"""The dataset's two tables: `images.parquet` and `captions.parquet`.

`images.parquet` has a row an image: image_id, path below the folder of images, upright width and
height in pixels (0 where the image cannot be used), split. `captions.parquet` has a row a caption:
image_id, caption_id, text, tokens. Both are sorted by image_id; captions of an image keep the order
of their file. Both footers carry the fingerprint of the dataset, made from all rows of both, so
that tables of two different runs are never read together.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from regionprep.errors import MissingError, StorageError
from regionprep.workspace import Workspace, write_bytes

FORMAT = 1
METADATA = b"regionprep"
REMAKE = "Make it with `prep splits`."

IMAGES = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
    ]
)
CAPTIONS = pa.schema(
    [
        pa.field("image_id", pa.string(), nullable=False),
        pa.field("caption_id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field(
            "tokens", pa.list_(pa.field("element", pa.string(), nullable=False)), nullable=False
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """A row of `images.parquet`; width and height are upright pixels, 0 if it cannot be used."""

    image_id: str
    path: str
    width: int
    height: int
    split: str


@dataclass(frozen=True, slots=True)
class CaptionRecord:
    """A row of `captions.parquet`."""

    image_id: str
    caption_id: str
    text: str
    tokens: Sequence[str]


def write_tables(
    workspace: Workspace, images: list[ImageRecord], captions: list[CaptionRecord] | None
) -> bool:
    """Write both tables where they differ from what is there; return whether they did.

    The images' table comes last: with it the stage is done. Without captions theirs is removed.
    """
    image_columns = _columns_of(images, IMAGES)
    caption_columns = _columns_of(captions or [], CAPTIONS)
    fingerprint = _fingerprint(image_columns + caption_columns)
    if captions is None:
        changed = workspace.captions.exists()
        workspace.captions.unlink(missing_ok=True)
    else:
        changed = _write(workspace.captions, CAPTIONS, caption_columns, fingerprint)
    return _write(workspace.images, IMAGES, image_columns, fingerprint) or changed


def read_images(workspace: Workspace) -> list[ImageRecord]:
    """Return the rows of `images.parquet`, sorted by image_id.

    Raises MissingError when `prep splits` has not made it, StorageError when it is damaged.
    """
    columns, _ = _read(workspace.images, IMAGES)
    return [ImageRecord(*row) for row in zip(*columns, strict=True)]


def read_captions(workspace: Workspace) -> list[CaptionRecord]:
    """Return the rows of `captions.parquet`, sorted by image_id.

    Raises MissingError when there is none, StorageError when it is damaged or when it was made
    for other images than those in `images.parquet`.
    """
    if workspace.images.exists() and not workspace.captions.exists():
        raise MissingError(
            "this workspace has images only, and no captions",
            where=workspace.root,
            mend="Make one with captions: `prep init DIR --images FOLDER --captions FILE`.",
        )
    columns, fingerprint = _read(workspace.captions, CAPTIONS)
    if fingerprint != dataset_fingerprint(workspace):
        raise StorageError(
            "was made for other images than images.parquet", where=workspace.captions, mend=REMAKE
        )
    with collector_paused():
        return [CaptionRecord(*row) for row in zip(*columns, strict=True)]


def dataset_fingerprint(workspace: Workspace) -> str:
    """Return the SHA-256 of all rows of both tables, as their footers carry it."""
    return str(_footer(workspace.images, IMAGES)["fingerprint"])


def images_fingerprint(workspace: Workspace, images: Sequence[ImageRecord]) -> str:
    """Return the SHA-256 of which images there are; splits and captions have no part in it."""
    source = workspace.dataset.images
    rows = [(image.image_id, image.path, image.width, image.height) for image in images]
    content = [source.kind, source.seed if source.kind == "scenes" else 0, rows]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's collector of cycles from walking millions of rows over and over.

    Reading COCO's captions takes a third of the time so; there are no cycles in them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _columns_of(rows: Sequence[Any], schema: pa.Schema) -> list[list[Any]]:
    return [[getattr(row, name) for row in rows] for name in schema.names]


def _fingerprint(columns: list[list[Any]]) -> str:
    digest = hashlib.sha256()
    for column in columns:
        digest.update(json.dumps(column).encode())
    return digest.hexdigest()


def _write(path: Path, schema: pa.Schema, columns: list[list[Any]], fingerprint: str) -> bool:
    """Write a table unless it is there as it would be written; return whether it was."""
    about = json.dumps({"format": FORMAT, "fingerprint": fingerprint})
    table = pa.table(columns, schema=schema.with_metadata({METADATA: about}))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    if path.is_file() and path.read_bytes() == data:
        return False
    write_bytes(path, data)
    return True


def _footer(path: Path, schema: pa.Schema) -> dict[str, Any]:
    """Return what a table's footer says about it, after a check that it is such a table."""
    with _opened(path) as file:
        about = json.loads((file.schema_arrow.metadata or {}).get(METADATA, b"{}"))
        fits = file.schema_arrow.equals(schema, check_metadata=False)
    if about.get("format") != FORMAT or "fingerprint" not in about or not fits:
        raise StorageError("is no table of this version", where=path, mend=REMAKE)
    return dict(about)


def _read(path: Path, schema: pa.Schema) -> tuple[list[list[Any]], str]:
    """Return a table's columns and its fingerprint."""
    fingerprint = _footer(path, schema)["fingerprint"]
    with _opened(path) as file, collector_paused():
        return [column.to_pylist() for column in file.read().columns], fingerprint


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a table; whatever cannot be read inside is a damaged file."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError:
        raise MissingError("there is no such table yet", where=path, mend=REMAKE) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(f"is damaged: {error}", where=path, mend=REMAKE) from error
