"""What a folder of regions or features holds, at a glance: for people in 80 columns, or as JSON.

Counts are those of all images; histograms are of at most SAMPLE images, taken evenly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import MissingError, StorageError
from regionprep.pipeline.parts import PROVENANCE, Footer
from regionprep.pipeline.shards import Columns, ImageRow, flat, schema
from regionprep.pipeline.store import FeatureStore, read_part

SAMPLE = 2000
SHOWN = 5
COLUMNS = 80
BAR = 40
# Most boxes are small, so even bins would show one bar.
SHARES = (0, 1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Histogram:
    """How values spread: `counts[i]` of them lie from `edges[i]` to below `edges[i + 1]`."""

    name: str
    values: int
    low: float
    mean: float
    high: float
    edges: list[float]
    counts: list[int]

    def lines(self) -> Iterator[str]:
        """Yield a line that sums up, and one a bin."""
        yield f"{self.name}: {self.low:,.4g} to {self.high:,.4g}, mean {self.mean:,.4g}"
        for (low, high), count in zip(pairwise(self.edges), self.counts, strict=True):
            bar = "#" * round(BAR * count / max(self.counts))
            yield f"  {low:>8,.4g} - {high:<8,.4g} {count:>9,} {bar}".rstrip()


@dataclass(frozen=True)
class Inspection:
    """What was found at a path. `rows` and `histograms` are of the first and of sampled images."""

    path: str
    stage: str
    fingerprint: str
    parts: int
    bytes: int
    images: int
    regions: int
    statuses: dict[str, int]
    columns: dict[str, str]
    settings: Mapping[str, Any]
    rows: list[dict[str, Any]]
    sampled: int
    histograms: list[Histogram]

    def as_json(self) -> str:
        """Return all of it as one JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=2)

    def __str__(self) -> str:
        blocks = [
            self._head(),
            _table("status", {name: f"{count:,}" for name, count in self.statuses.items()}),
            _table("columns", self.columns),
            _table("made by", {key: _short(value) for key, value in flat(self.settings).items()}),
            self._rows(),
            self._histograms(),
        ]
        return "\n\n".join(block for block in blocks if block)

    def _head(self) -> str:
        return (
            f"{self.stage} in {self.path}\n"
            f"  {self.images:,} images, {self.regions:,} regions, parts: {self.parts:,}, "
            f"{self.bytes / 1e6:,.1f} MB\n"
            f"  fingerprint {self.fingerprint[:16]}..."
        )

    def _rows(self) -> str:
        lines = [f"rows (the first {len(self.rows)})"]
        for row in self.rows:
            about = f"{row['width']} x {row['height']}, {row['regions']} regions"
            if row["status"] != "ok":
                about += f", {row['status']}: {row['error']}"
            elif row["regions"]:
                box = " ".join(f"{value:.0f}" for value in row["box"])
                about += f": {box} class {row['class']} at {row['score']:.2f}"
            lines.append(f"  {_fit(row['image_id'], 20):<20} {about}")
        return "\n".join(_fit(line, COLUMNS) for line in lines)

    def _histograms(self) -> str:
        taken = "" if self.sampled == self.images else f", {self.sampled:,} of them taken evenly"
        lines = [f"histograms of {self.images:,} images{taken}"] if self.histograms else []
        return "\n".join([*lines, *(line for one in self.histograms for line in one.lines())])


def inspect_path(path: Path) -> Inspection:
    """Return what a finished folder of regions or features holds, or one part of it.

    Raises MissingError where nothing is there, StorageError for a file that is no whole part, and
    what opening a folder raises.
    """
    path = path.absolute()
    if not path.exists():
        raise MissingError("there is no such folder or part", where=path)
    return _part(path) if path.is_file() else _folder(path)


def _folder(path: Path) -> Inspection:
    store = FeatureStore(path)
    ids = store.ids
    rows = [store[ids[place]] for place in _evenly(len(ids))]
    parts = store.manifest.parts
    return Inspection(
        path=str(path),
        stage=store.plan.stage,
        fingerprint=store.fingerprint,
        parts=len(parts),
        bytes=sum(part.bytes for part in parts),
        images=len(ids),
        regions=sum(part.regions for part in parts),
        statuses=store.statuses,
        columns=_column_types(store.manifest.columns),
        settings=store.plan.settings,
        rows=[_told(store[image_id]) for image_id in ids[:SHOWN]],
        sampled=len(rows),
        histograms=_histograms(rows),
    )


def _part(path: Path) -> Inspection:
    rows = read_part(path)
    footer = Footer.read(path)
    if footer is None:
        raise StorageError("was replaced while it was read", where=path)
    provenance = json.loads(footer.metadata.metadata[PROVENANCE.encode()])
    sampled = [rows[place] for place in _evenly(len(rows))]
    return Inspection(
        path=str(path),
        stage=provenance["stage"],
        fingerprint=footer.fingerprint,
        parts=1,
        bytes=path.stat().st_size,
        images=len(rows),
        regions=footer.counts["regions"],
        statuses=footer.counts["statuses"],
        columns=_column_types(footer.columns),
        settings=provenance["settings"],
        rows=[_told(row) for row in rows[:SHOWN]],
        sampled=len(sampled),
        histograms=_histograms(sampled),
    )


def _evenly(count: int) -> list[int]:
    """Return at most SAMPLE places from 0 to below `count`, evenly, each once."""
    taken = min(count, SAMPLE)
    return [place * count // taken for place in range(taken)]


def _column_types(columns: Columns) -> dict[str, str]:
    """Return each column's type, short."""
    lists = {
        "boxes": "list of 4 x float32 (x1 y1 x2 y2, pixels)",
        "scores": "list of float32",
        "classes": "list of int32",
        "features": f"list of {columns.feature_width} x {columns.dtype}",
    }
    return {field.name: lists.get(field.name, str(field.type)) for field in schema(columns)}


def _told(row: ImageRow) -> dict[str, Any]:
    """Return a row without its lists, but with its first region."""
    told: dict[str, Any] = {
        "image_id": row.image_id,
        "width": row.width,
        "height": row.height,
        "status": row.status,
        "error": row.error,
        "grid": [row.grid_height, row.grid_width],
        "regions": len(row.boxes),
    }
    if len(row.boxes):
        told["box"] = row.boxes[0].tolist()
        told["score"], told["class"] = float(row.scores[0]), int(row.classes[0])
    return told


def _histograms(rows: Sequence[ImageRow]) -> list[Histogram]:
    usable = [row for row in rows if row.ok]
    found = []
    if usable:
        counts = np.array([len(row.boxes) for row in usable])
        step = -(-int(np.ptp(counts) + 1) // 10)
        edges = np.arange(counts.min(), counts.max() + step + 1, step)
        found.append(_histogram("boxes an image", counts, edges))
    described = [row for row in usable if len(row.boxes)]
    if described:
        areas = np.concatenate([_shares(row) for row in described])
        found.append(_histogram("box area, % of the image", areas, np.array(SHARES)))
    norms = [
        np.linalg.norm(row.features.astype(np.float32), axis=1)
        for row in described
        if row.features is not None
    ]
    if norms:
        lengths = np.concatenate(norms)
        edges = np.histogram_bin_edges(lengths, 10)
        found.append(_histogram("feature norms", lengths, edges))
    return found


def _shares(row: ImageRow) -> NDArray[Any]:
    """Return the areas of a row's boxes as per cent of the image's."""
    sides = np.maximum(row.boxes[:, 2:].astype(np.float64) - row.boxes[:, :2], 0)
    return np.asarray(100 * sides.prod(axis=1) / max(row.width * row.height, 1))


def _histogram(name: str, values: NDArray[Any], edges: NDArray[Any]) -> Histogram:
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return Histogram(
        name,
        len(values),
        float(values.min()),
        float(values.mean()),
        float(values.max()),
        [float(edge) for edge in edges],
        counts.tolist(),
    )


def _table(title: str, entries: Mapping[str, str]) -> str:
    width = min(max(map(len, entries), default=0), 32)
    return "\n".join(
        [title, *(_fit(f"  {key:<{width}}  {value}", COLUMNS) for key, value in entries.items())]
    )


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"[{len(value)} values: {value[0]}, {value[1]}, ...]"
    return str(value)


def _fit(text: str, width: int) -> str:
    """Return text in one line of at most `width` characters."""
    text = " ".join(text.splitlines()) if len(text.splitlines()) > 1 else text
    return text if len(text) <= width else text[: width - 3] + "..."
