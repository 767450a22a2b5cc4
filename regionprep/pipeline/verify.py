"""Find every part of a folder that is torn, altered, missing, foreign or surplus."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from regionprep.errors import InputError, MismatchError, MissingError, PrepError, StorageError
from regionprep.pipeline.mapped import read_header
from regionprep.pipeline.parquet import CREATED_BY
from regionprep.pipeline.parts import PROVENANCE, Footer, Manifest, PartRecord
from regionprep.pipeline.shards import MANIFEST, PLAN, Plan, command, part_name
from regionprep.workspace import FILE, Workspace

Kind = Literal["missing", "torn", "altered", "foreign", "surplus", "leftover", "unfinished"]

_OWN = re.compile(rf"{PLAN}|{MANIFEST}|\.lock(\..+)?|\.crashed\.json|\.reading-.*")
_PARTS = "part-*.parquet"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file of a folder, and how to mend it."""

    path: Path
    kind: Kind
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.what}\n  {self.mend}"


@dataclass(frozen=True)
class Report:
    """What a verification looked at, and what it found."""

    folders: tuple[Path, ...]
    parts: int
    quick: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        by = "footers and sizes" if self.quick else "checksums"
        looked = f"{_count(self.parts, 'part')} in {_count(len(self.folders), 'folder')}, by {by}"
        if not self.faults:
            return f"whole: {looked}"
        lines = [str(fault) for fault in self.faults]
        return "\n".join([*lines, f"{_count(len(self.faults), 'fault')} in {looked}"])


def verify_path(path: Path, *, quick: bool = False) -> Report:
    """Return what is wrong in a workspace, a folder of shards, or all such folders below a path.

    Raises MissingError where there is no such path, InputError where nothing lies to be verified.
    """
    path = path.absolute()
    if not path.exists():
        raise MissingError("there is no such folder", where=path)
    if not path.is_dir():
        raise InputError("is a file", where=path, mend="Give the folder that it lies in.")
    faults: list[Fault] = []
    if (path / FILE).is_file():
        folders, strangers = _workspace_folders(path)
        faults += [*_tables(Workspace.open(path)), *map(_surplus, strangers)]
    elif not (folders := _folders_below(path)):
        raise InputError(
            "holds neither regions nor features",
            where=path,
            mend="Give a workspace or a folder of regions or features.",
        )
    for folder in folders:
        faults += verify(folder, quick)
    parts = sum(1 for folder in folders for _ in folder.glob(_PARTS))
    return Report(tuple(folders), parts, quick, tuple(faults))


def verify(folder: str | Path, quick: bool = False) -> list[Fault]:
    """Return the faults of a folder of shards, none if it is whole.

    Compares every part's footer and size with plan and manifest; unless `quick`, also its SHA-256
    with the manifest's, and every page with the page's own checksum, which finds what was altered
    before there was a manifest.
    """
    folder = Path(folder).absolute()
    plan, torn_plan = _read(Plan.read, folder, PLAN)
    manifest, torn_manifest = _read(Manifest.read, folder, MANIFEST)
    faults = [fault for fault in (torn_plan, torn_manifest) if fault]
    if plan is None and torn_plan is None:
        mend = f"Make it, or remove the folder: `{_command(folder, manifest)}`."
        faults.append(Fault(folder, "missing", f"there is no {PLAN}", mend))
    if manifest is None and torn_manifest is None and plan is not None:
        mend = f"Make it: `{_command(folder, plan)}`."
        faults.append(
            Fault(folder / MANIFEST, "unfinished", "the folder has no manifest yet", mend)
        )
    check = _Check(folder, plan, manifest, quick)
    return [*faults, *check.manifest_faults(), *check.part_faults(), *check.others()]


class _Check:
    """The checks of one folder, by as much as can be read of its plan and manifest."""

    def __init__(
        self, folder: Path, plan: Plan | None, manifest: Manifest | None, quick: bool
    ) -> None:
        self.folder, self.plan, self.manifest, self.quick = folder, plan, manifest, quick
        self.foreign = bool(plan and manifest and manifest.fingerprint != plan.fingerprint)
        self.records: dict[str, PartRecord] = {}
        if manifest and not self.foreign:
            self.records = {part.file: part for part in manifest.parts}
        self.names = sorted(self.records)
        if plan:
            self.names = [part_name(shard) for shard in range(plan.shard_count)]
        elif not manifest:
            self.names = sorted(path.name for path in folder.glob(_PARTS))
        self.make = f"Make it again: `{_command(folder, plan or manifest)}`."
        self.remove = self.make.replace("Make it again", "Remove it, then make it again")

    def manifest_faults(self) -> Iterator[Fault]:
        """Yield what in the manifest is another plan's, or is told otherwise by the parts."""
        path = self.folder / MANIFEST
        if self.plan is None or self.manifest is None:
            return
        if self.foreign:
            yield Fault(path, "foreign", "it is another plan's manifest", self.remove)
            return
        footers = [(name, Footer.read(self.folder / name)) for name in self.names]
        whole = {name: footer for name, footer in footers if footer is not None}
        if self.manifest.settings != self.plan.settings:
            yield self._disputed(next(iter(whole.values()), None))
        wrong = sorted(set(self.names) ^ self.records.keys())
        wrong += [
            name
            for name, footer in whole.items()
            if footer.fingerprint == self.plan.fingerprint
            and name in self.records
            and not self._agree(footer, self.records[name])
        ]
        if wrong or self.manifest.stage != self.plan.stage:
            what = f"it counts otherwise than the parts: {', '.join(wrong[:5]) or 'their stage'}"
            yield Fault(path, "altered", what, self.remove)

    def _agree(self, footer: Footer, told: PartRecord) -> bool:
        counted = {"regions": told.regions, "statuses": told.statuses, "grids": told.grids}
        assert self.manifest is not None
        return (footer.counts, footer.metadata.num_rows, footer.columns) == (
            counted,
            told.rows,
            self.manifest.columns,
        )

    def _disputed(self, footer: Footer | None) -> Fault:
        """Return the fault of plan or manifest: of which of them a part's settings are not."""
        what = f"the settings in {PLAN} and {MANIFEST} differ"
        assert self.plan is not None and self.manifest is not None
        if footer is not None and _settings(footer) == self.manifest.settings:
            return Fault(self.folder / PLAN, "altered", what, _start_over(self.folder, self.plan))
        return Fault(self.folder / MANIFEST, "altered", what, self.remove)

    def part_faults(self) -> Iterator[Fault]:
        """Yield the fault of every part that has one."""
        for shard, name in enumerate(self.names):
            found = self._part(self.folder / name, shard)
            if found:
                yield Fault(self.folder / name, *found)

    def _part(self, path: Path, shard: int) -> tuple[Kind, str, str] | None:
        if not path.exists():
            return "missing", "there is no such part", self.make
        footer = Footer.read(path)
        if footer is None:
            return "torn", "it is cut, or no part of ours", self.make
        if self.plan and not footer.is_of(self.plan, shard):
            return "foreign", "it is a part of another plan", self.make
        told, size = self.records.get(path.name), path.stat().st_size
        if told and size != told.bytes:
            what = f"it has {size:,} bytes, the manifest says {told.bytes:,}"
            return "altered", what, self.make
        if self.quick:
            return None
        if told and _checksum(path) != told.sha256:
            return "altered", "its checksum is not the manifest's", self.remove
        column = _altered_column(path, footer)
        if column:
            what = f"the checksum of a page of its column {column} is not that of its bytes"
            return "altered", what, self.remove
        return None

    def others(self) -> Iterator[Fault]:
        """Yield the files that no plan knows, where one or its manifest could be read."""
        if not (self.plan or self.manifest):
            return
        for path in sorted(self.folder.iterdir()):
            if path.name in self.names or _OWN.fullmatch(path.name):
                continue
            if path.name.endswith(".tmp"):
                what, mend = "a run that was killed left it", "The next run sweeps it away."
                yield Fault(path, "leftover", what, mend)
            else:
                yield _surplus(path)


def _read(
    read: Callable[[Path], _T | None], folder: Path, name: str
) -> tuple[_T | None, Fault | None]:
    """Return what is read of a folder's plan or manifest, or the fault that keeps from it."""
    try:
        return read(folder), None
    except MismatchError as error:
        return None, Fault(folder / name, "foreign", error.what, _start_over(folder, None))
    except StorageError as error:
        # What is whole of the parts stays: they carry their plan's fingerprint themselves.
        mend = f"Remove it, then make it again: `{_command(folder, None)}`."
        return None, Fault(folder / name, "torn", error.what, mend)


def _command(folder: Path, told: Plan | Manifest | None) -> str:
    by_place = "regions" if folder.parent.name == "regions" else "features"
    return command(told.stage if told else by_place, folder)


def _start_over(folder: Path, plan: Plan | None) -> str:
    return f"Start over: `{_command(folder, plan)} --force`."


def _settings(footer: Footer) -> Any:  # noqa: ANN401 - JSON
    return json.loads(footer.metadata.metadata[PROVENANCE.encode()])["settings"]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def _surplus(path: Path) -> Fault:
    what, mend = "no plan knows it; readers pass it over", "Remove it, or keep it elsewhere."
    return Fault(path, "surplus", what, mend)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _altered_column(path: Path, footer: Footer) -> str | None:
    """Return the first column with a page that is not as its checksum says.

    Asked of the parts that we wrote, of one page a column chunk; others are told by the manifest.
    """
    if footer.metadata.created_by != CREATED_BY:
        return None
    with path.open("rb") as file:
        for group in range(footer.metadata.num_row_groups):
            row_group = footer.metadata.row_group(group)
            for index in range(row_group.num_columns):
                column = row_group.column(index)
                file.seek(column.data_page_offset)
                if not _page_is_whole(file.read(column.total_compressed_size)):
                    return str(column.path_in_schema).partition(".")[0]
    return None


def _page_is_whole(chunk: bytes) -> bool:
    try:
        header, length = read_header(chunk)
    except (IndexError, ValueError):
        return False
    page = memoryview(chunk)[length:]
    checksum = header.get(4)
    return isinstance(checksum, int) and zlib.crc32(page) == checksum & 0xFFFFFFFF


def _workspace_folders(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of shards that a workspace has, and what lies between them."""
    found: list[Path] = []
    strangers: list[Path] = []
    level = [root / "regions", *sorted((root / "features").glob("*"))]
    strangers += [path for path in level[1:] if not path.is_dir()]
    for above in level:
        for path in sorted(above.glob("*")):
            (found if path.is_dir() else strangers).append(path)
    return found, strangers


def _folders_below(path: Path) -> list[Path]:
    """Return the folders at or below a path that hold a plan, a manifest or parts."""
    files = (file for name in (PLAN, MANIFEST, _PARTS) for file in path.rglob(name))
    return sorted({file.parent for file in files})


def _tables(workspace: Workspace) -> Iterator[Fault]:
    """Yield the tables of a workspace that are damaged or do not belong together."""
    from regionprep.pipeline.tables import read_captions, read_images

    reads: list[tuple[Path, Callable[[Workspace], Any]]] = [
        (workspace.images, read_images),
        (workspace.captions, read_captions),
    ]
    for path, read in reads:
        if not path.exists():
            continue
        try:
            read(workspace)
        except PrepError as error:
            # Captions are read against the images' footer: what that lacks is told of the images.
            if error.where == path:
                yield Fault(path, "torn", error.what, "Make it again: `prep splits`.")
