"""Where a dataset's tables, features and runs lie."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from regionprep.errors import InputError, MissingError, StorageError
from regionprep.manifests import DatasetManifest, parse, read_yaml

FILE = "workspace.yaml"
MAKE = "Make a workspace with `prep init DIR --dataset NAME`, then work inside it."


@dataclass(frozen=True)
class Workspace:
    """A dataset's folder: its manifest as resolved, and the paths of all that stages make."""

    root: Path
    dataset: DatasetManifest

    @classmethod
    def create(cls, root: Path, dataset: DatasetManifest) -> Workspace:
        """Write `workspace.yaml` into `root` and return the workspace.

        Raises InputError when `root` holds a workspace of another dataset already.
        """
        root = root.absolute()
        file = root / FILE
        if file.exists() and cls.open(root).dataset != dataset:
            raise InputError(
                "holds another workspace already",
                where=file,
                mend="Choose another folder, or remove this one first.",
            )
        make_folder(root)
        return cls(root, dataset).save()

    def save(self) -> Workspace:
        """Write `workspace.yaml` unless it says the same already, and return the workspace."""
        text = yaml.safe_dump(self.dataset.model_dump(mode="json"), sort_keys=False)
        file = self.root / FILE
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            write_text(file, text)
        return self

    @classmethod
    def open(cls, root: Path) -> Workspace:
        """Return the workspace in `root`, or raise what is wrong with its file."""
        root = root.absolute()
        file = root / FILE
        if not file.is_file():
            raise MissingError(f"no {FILE} here", where=root, mend=MAKE)
        return cls(root, parse(DatasetManifest, read_yaml(file), where=file))

    @classmethod
    def find(cls, start: Path | None = None) -> Workspace:
        """Return the workspace of `start` (the current folder), searched upwards."""
        start = (start or Path.cwd()).absolute()
        for folder in (start, *start.parents):
            if (folder / FILE).is_file():
                return cls.open(folder)
        raise MissingError(f"no {FILE} here or in any folder above", where=start, mend=MAKE)

    @property
    def images(self) -> Path:
        """Return the table of images and their splits."""
        return self.root / "images.parquet"

    @property
    def captions(self) -> Path:
        """Return the table of captions and their tokens."""
        return self.root / "captions.parquet"

    @property
    def vocabulary(self) -> Path:
        """Return the vocabulary's file."""
        return self.root / "vocab.json"

    def regions(self, detector: str) -> Path:
        """Return the folder of a detector's region shards."""
        return self.root / "regions" / detector

    def features(self, detector: str, backbone: str) -> Path:
        """Return the folder of a backbone's feature shards over a detector's regions."""
        return self.root / "features" / detector / backbone

    def run(self, name: str) -> Path:
        """Return the folder of a training run."""
        return self.root / "runs" / name

    def detectors(self, file: str = "manifest.json") -> list[str]:
        """Return the detectors with regions here, the newest first: finished, or with `file`."""
        return [path.parent.name for path in self._newest(f"regions/*/{file}")]

    def pairs(self, file: str = "manifest.json") -> list[tuple[str, str]]:
        """Return detector and backbone of features here, the newest first: finished, or `file`."""
        found = self._newest(f"features/*/*/{file}")
        return [(path.parent.parent.name, path.parent.name) for path in found]

    def trained_runs(self) -> list[str]:
        """Return the names of the runs with a checkpoint, the newest first."""
        found = self._newest("runs/*/checkpoints/*.safetensors")
        return list(dict.fromkeys(path.parent.parent.name for path in found))

    def begun_runs(self) -> list[str]:
        """Return the names of all runs, trained or not yet, the newest first."""
        return [path.parent.name for path in self._newest("runs/*/config.yaml")]

    def _newest(self, pattern: str) -> list[Path]:
        found = self.root.glob(pattern)
        return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)

    def choose_detector(self, name: str | None) -> str:
        """Return `name`, else the only detector with regions here, else the dataset's default.

        Raises InputError where there are several, and the default is none of them.
        """
        made, default = sorted(self.detectors()), self.dataset.defaults.detector
        if name or not made or default in made:
            return name or default
        if len(made) > 1:
            raise InputError(
                f"regions of several detectors could be meant: {', '.join(made)}",
                where=self.root / "regions",
                mend=f"Name one with --detector, or '{default}', the dataset's default.",
            )
        return made[0]

    def choose_features(self, detector: str | None, backbone: str | None) -> tuple[str, str]:
        """Return the detector and backbone meant: as named, else the only features here.

        Raises MissingError when there are none, InputError when the names leave a choice.
        """
        pairs = sorted(self.pairs())
        meant = [
            pair for pair in pairs if detector in (None, pair[0]) and backbone in (None, pair[1])
        ]
        defaults = (self.dataset.defaults.detector, self.dataset.defaults.backbone)
        if len(meant) > 1 and defaults in meant:
            meant = [pair for pair in meant if pair == defaults]
        if len(meant) == 1:
            return meant[0]
        there = ", ".join(f"{d} + {b}" for d, b in pairs) or "none"
        if not meant:
            wanted = " + ".join(name for name in (detector, backbone) if name) or "any"
            option = f"--detector {detector} " if detector else ""
            raise MissingError(
                f"no finished features of {wanted} (there are: {there})",
                where=self.root / "features",
                mend=f"Make them with `prep extract {option}--backbone {backbone or 'NAME'}`.",
            )
        raise InputError(
            f"several features could be meant: {there}",
            where=self.root / "features",
            mend="Name them with --detector and --backbone.",
        )

    def image_root(self) -> Path:
        """Return the folder of the images; a relative one counts from the workspace."""
        return self.root / self.dataset.images.root


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; StorageError where that may not be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"the folder cannot be made: {error.strerror}",
            where=folder,
            mend="Choose a place that you may write to and where no file has that name.",
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write `path` as UTF-8, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write `path` whole or not at all: a temporary file, flushed, then renamed.

    Raises StorageError with the space needed and free when the disk refuses.
    """
    _sweep(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        raise StorageError(
            f"cannot be written: {error.strerror} ({len(data)} bytes needed, {free} free)",
            where=path,
            mend="Make room or choose another folder, then run the command again.",
        ) from error
    finally:
        with suppress(OSError):  # Where nothing may be written, nothing is there to remove.
            temporary.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove the temporary files that killed processes of this machine left beside `path`."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        owner = leftover.name.split(".")[-2]
        if owner.isdecimal() and not _alive(int(owner)):
            leftover.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
