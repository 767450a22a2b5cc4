"""The M2 Transformer's HDF5: `ID_features` (r, D), `ID_boxes` (r, 4), `ID_grids` (cells, D).

Ours adds what its readers pass over and a way back needs: `ID_scores`, `ID_classes`, `ID_size`
(width and height), and how many rows and columns `ID_grids` has, as its attribute `grid`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError
from regionprep.pipeline.exchange.record import (
    Record,
    damaged,
    decoding,
    files_of,
    once,
    optional,
    record_of,
    stamp,
)
from regionprep.pipeline.shards import ImageRow

_NAMED = re.compile(r"(.+)_(features|grids)", re.S)


class Hdf5Source:
    """HDF5 files by image id; `grid` asks for the grids where a file has regions too."""

    def __init__(self, paths: Sequence[Path], *, grid: bool = False) -> None:
        library = optional("h5py")
        files = files_of(paths, ".hdf5", ".h5")
        self._files: list[Any] = []
        for path in files:
            try:
                self._files.append(library.File(path, "r"))
            except OSError as error:
                self.close()
                raise InputError(f"is no HDF5 file that can be read: {error}", where=path) from None
        named: dict[str, list[tuple[str, int]]] = {"features": [], "grids": []}
        for number, file in enumerate(self._files):
            for name in _names(file):
                if match := _NAMED.fullmatch(name):
                    named[match[2]].append((match[1], number))
        self._kind = "grids" if grid or not named["features"] else "features"
        found = named[self._kind]
        once((name for name, _ in found), ", ".join(map(str, files)))
        self._places = dict(found)
        self.ids = self._places.keys()
        self.stamp = stamp([f"{name}_{self._kind}" for name in self.ids], files)

    def read(self, source_id: str) -> Record:
        """Return the record of an image's datasets."""
        file = self._files[self._places[source_id]]
        with decoding("its datasets"):
            features = np.asarray(file[f"{source_id}_{self._kind}"][()])
            width, height = _optional(file, source_id, "size", np.zeros(2, np.int32))
            told: dict[str, Any] = {"width": int(width), "height": int(height)}
            if self._kind == "features":
                told |= {
                    name: _optional(file, source_id, name, None)
                    for name in ("boxes", "scores", "classes")
                }
            else:
                told |= {
                    name: _optional(file, source_id, f"grid_{name}", None)
                    for name in ("boxes", "scores", "classes")
                }
                features = _squared(features, file[f"{source_id}_grids"].attrs.get("grid"))
        return record_of(features, **told)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class Hdf5Sink:
    """An HDF5 file that the M2 Transformer reads."""

    def __init__(self, target: Path) -> None:
        self._file = optional("h5py").File(target, "w")

    def write(self, row: ImageRow, *, boxes: bool) -> None:
        """Add an image's datasets."""
        assert row.features is not None, "a store of regions has no features to export"
        name, grid = row.image_id, (row.grid_height, row.grid_width)
        kind, before = ("grids", "grid_") if any(grid) else ("features", "")
        self._file[f"{name}_{kind}"] = row.features
        self._file[f"{name}_size"] = np.array([row.width, row.height], np.int32)
        if any(grid):
            self._file[f"{name}_{kind}"].attrs["grid"] = grid
        if boxes:
            self._file[f"{name}_{before}boxes"] = row.boxes
            self._file[f"{name}_{before}scores"] = row.scores
            self._file[f"{name}_{before}classes"] = row.classes

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _names(file: Any) -> list[str]:  # noqa: ANN401 - h5py has no types
    """Return the names of a file's datasets, also where a slash in an id made groups."""
    names: list[str] = []
    file.visit(names.append)
    return names


def _optional(file: Any, name: str, field: str, default: Any) -> Any:  # noqa: ANN401 - h5py
    dataset = file.get(f"{name}_{field}")
    return default if dataset is None else np.asarray(dataset[()])


def _squared(cells: NDArray[Any], told: Any) -> NDArray[Any]:  # noqa: ANN401 - h5py
    """Return a grid (height, width, D); one that does not tell its shape has to be a square."""
    if cells.ndim != 2:
        return cells
    side = math.isqrt(len(cells))
    height, width = (side, side) if told is None else map(int, told)
    if height * width != len(cells):
        raise damaged(f"its {len(cells)} grid cells make no grid")
    return cells.reshape(height, width, cells.shape[1])
