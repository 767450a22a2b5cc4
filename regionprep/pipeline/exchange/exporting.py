"""`prep export`: features of a workspace in the formats of other projects."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from regionprep.errors import InputError
from regionprep.pipeline.exchange.formats import AS_FLOAT32, GRIDS, writable
from regionprep.pipeline.parts import storage_guard
from regionprep.pipeline.progress import progress_bar
from regionprep.pipeline.store import FeatureStore
from regionprep.workspace import Workspace, sync_folder


@dataclass(frozen=True)
class Exported:
    """What an export came to, and what its format has no room for."""

    target: Path
    images: int
    left_out: int
    lost: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.images:,} images in {self.target}"]
        if self.left_out:
            lines.append(f"  left out: {self.left_out:,} images without features")
        return "\n".join([*lines, *(f"  noted: {what}" for what in self.lost)])


def run_export(
    workspace: Workspace,
    format_name: str,
    target: Path,
    *,
    detector: str | None = None,
    backbone: str | None = None,
    progress: bool = True,
) -> Exported:
    """Write features of the workspace to `target`, whole or not at all.

    Raises InputError for a format that cannot be written and for a target that is there already,
    MissingError where there are no such features, StorageError for a full disk.
    """
    create, lost = writable(format_name)
    target = target.absolute()
    if target.exists():
        raise InputError(
            "is there already", where=target, mend="Remove it, or choose another name."
        )
    store = FeatureStore(workspace.features(*workspace.choose_features(detector, backbone)))
    # Boxes that an import made up are not given on.
    boxes = bool(store.metadata.get("source", {}).get("boxes", True))
    temporary = target.with_name(f".{target.name}.tmp")
    needed = sum(path.stat().st_size for path in store.folder.glob("part-*.parquet"))
    written = 0
    with storage_guard(temporary, lambda: needed):
        _remove(temporary)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            sink = create(temporary)
            try:
                with progress_bar("export", len(store), 0, shown=progress) as advance:
                    for row in store.rows():
                        if row.ok:
                            sink.write(row, boxes=boxes)
                            written += 1
                        advance()
            finally:
                sink.close()
            temporary.replace(target)
            sync_folder(target.parent)
        finally:
            _remove(temporary)
    kept = {AS_FLOAT32} if store.dtype == np.float32 else set()
    kept |= set() if store.metadata.get("grid") else {GRIDS}
    told = tuple(what for what in lost if what not in kept)
    return Exported(target, written, len(store) - written, told)


def _remove(path: Path) -> None:
    """Remove what a killed export left."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
