"""Folders of npy and npz: `cocobu_att/ID.npz`, `cocobu_box/ID.npy`; or one, flat.

Folders whose names end in _att, _box and _fc hold features, boxes and mean vectors of the same
images, as bottom-up features are kept for ImageCaptioning.pytorch. Any other folder has a file an
image: an npz of bottom-up-attention.pytorch (`x`, `bbox`, ...), or an npy of (D), (r, D) or
(height, width, D), such as a clip of video with a row a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regionprep.errors import InputError
from regionprep.pipeline.exchange.arrays import ArraySource, features_npz, mean_vector, npy
from regionprep.pipeline.exchange.record import files_of
from regionprep.pipeline.shards import ImageRow

ROLES = {"_att": "features", "_box": "boxes", "_fc": "mean"}


def folder_source(paths: Sequence[Path]) -> ArraySource[Path]:
    """Return the source of folders, or of single files."""
    index: dict[str, dict[str, Path]] = {}
    files = []
    for path in paths:
        for file in files_of([path], ".npy", ".npz"):
            name, role = _told(path, file)
            roles = index.setdefault(name, {})
            if role in roles:
                raise InputError(
                    f"'{name}' occurs more than once: {roles[role]} and {file}",
                    mend="Import the folders one by one, or remove what is there twice.",
                )
            roles[role] = file
            files.append(file)
    return ArraySource(index, Path.read_bytes, files=files)


def role_of(name: str) -> str | None:
    """Return the role that a folder's or a database's name ends in, if it does."""
    return next((role for ending, role in ROLES.items() if name.endswith(ending)), None)


class FolderSink:
    """The folders `cocobu_att`, `cocobu_box` and `cocobu_fc`."""

    def __init__(self, target: Path) -> None:
        target.mkdir()
        self._target = target

    def write(self, row: ImageRow, *, boxes: bool) -> None:
        """Write an image's files."""
        self._put("att", row, "npz", features_npz(row, boxes=boxes))
        self._put("fc", row, "npy", npy(mean_vector(row)))
        if boxes:
            self._put("box", row, "npy", npy(row.boxes))

    def close(self) -> None:
        """Nothing is pending."""

    def _put(self, folder: str, row: ImageRow, ending: str, data: bytes) -> None:
        steps = row.image_id.split("/")
        if {"", ".", ".."} & set(steps) or "\0" in row.image_id:
            raise InputError(f"image id {row.image_id!r} is no file name", where=self._target)
        path = self._target / f"cocobu_{folder}" / f"{row.image_id}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _told(root: Path, file: Path) -> tuple[str, str]:
    """Return a file's id, its path below the folder that tells its role, and the role."""
    inside = root if root.is_dir() else root.parent
    for folder in file.parents:
        role = role_of(folder.name)
        if role:
            return file.relative_to(folder).with_suffix("").as_posix(), role
        if folder == inside:
            break
    return file.relative_to(inside).with_suffix("").as_posix(), ""
