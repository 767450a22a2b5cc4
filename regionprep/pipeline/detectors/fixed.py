"""No detection: an even grid of boxes, or the whole image as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from regionprep.errors import InputError
from regionprep.manifests import DetectorManifest
from regionprep.pipeline.detectors.detector import (
    Candidates,
    Networkless,
    Pixels,
    Resources,
    options,
)


class Grid(Networkless):
    """An even grid of boxes, row by row from the top left."""

    classes: tuple[str, ...] = ("cell",)
    given = True
    batch_size = 32

    def __init__(self, *, rows: int = 7, columns: int = 7) -> None:
        if rows < 1 or columns < 1:
            raise InputError(f"a grid of {rows} x {columns} boxes has none")
        self.rows, self.columns = rows, columns

    @classmethod
    def from_manifest(cls, manifest: DetectorManifest, resources: Resources) -> Self:
        """Return the grid."""
        resources.refuse(manifest, "weights", "boxes")
        return cls(**options(manifest, rows=7, columns=7))

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the boxes."""
        return {"rows": self.rows, "columns": self.columns}

    def detect(self, images: Sequence[Pixels], image_ids: Sequence[str]) -> list[Candidates]:
        """Return each image's cells, with score 1."""
        return [self._cells(*image.shape[:2]) for image in images]

    def _cells(self, height: int, width: int) -> Candidates:
        x = np.linspace(0, width, self.columns + 1, dtype=np.float32)
        y = np.linspace(0, height, self.rows + 1, dtype=np.float32)
        left, top = np.meshgrid(x[:-1], y[:-1])
        right, bottom = np.meshgrid(x[1:], y[1:])
        boxes = np.stack([left, top, right, bottom], axis=-1).reshape(-1, 4)
        return Candidates(boxes, np.ones((len(boxes), 1), np.float32))


class Whole(Grid):
    """One box: the whole image."""

    classes: tuple[str, ...] = ("image",)

    @classmethod
    def from_manifest(cls, manifest: DetectorManifest, resources: Resources) -> Self:
        """Return the grid of one."""
        resources.refuse(manifest, "weights", "boxes")
        options(manifest)
        return cls(rows=1, columns=1)
