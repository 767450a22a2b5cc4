"""Find every part of a folder that is torn, altered, missing, foreign or surplus."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from regionprep.errors import MismatchError, StorageError
from regionprep.pipeline.parts import Footer, Manifest, PartRecord
from regionprep.pipeline.shards import MANIFEST, PLAN, Plan, command, part_name

Kind = Literal["missing", "torn", "altered", "foreign", "surplus", "leftover", "unfinished"]

_OWN = re.compile(rf"{PLAN}|{MANIFEST}|\.lock(\..+)?|\.crashed\.json|\.reading-.*")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file of a folder, and how to mend it."""

    path: Path
    kind: Kind
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.what}\n  {self.mend}"


def verify(folder: str | Path, quick: bool = False) -> list[Fault]:
    """Return the faults of a folder of shards, none if it is whole.

    Compares every part's footer and size with plan and manifest, and its SHA-256 unless `quick`.
    """
    folder = Path(folder).absolute()
    try:
        plan, manifest = Plan.read(folder), Manifest.read(folder)
    except (StorageError, MismatchError) as error:
        path = error.where if isinstance(error.where, Path) else folder
        return [Fault(path, "torn", error.what, error.mend or "Start over with --force.")]
    if plan is None:
        mend = "Make it, or remove what lies there."
        return [Fault(folder, "missing", f"there is no {PLAN}", mend)]
    return [*_parts(folder, plan, manifest, quick=quick), *_others(folder, plan)]


def _parts(folder: Path, plan: Plan, manifest: Manifest | None, *, quick: bool) -> Iterator[Fault]:
    make = f"Make it: `{command(plan.stage, folder)}`."
    records = {part.file: part for part in manifest.parts} if manifest else {}
    if manifest is None:
        yield Fault(folder / MANIFEST, "unfinished", "the folder has no manifest yet", make)
    elif manifest.fingerprint != plan.fingerprint:
        yield Fault(folder / MANIFEST, "foreign", "it is another plan's manifest", make)
        records = {}
    for shard in range(plan.shard_count):
        path = folder / part_name(shard)
        fault = _part(path, plan, shard, records.get(path.name), quick=quick)
        if fault:
            yield fault


def _part(
    path: Path, plan: Plan, shard: int, told: PartRecord | None, *, quick: bool
) -> Fault | None:
    make = f"Make it again: `{command(plan.stage, path.parent)}`."
    remove = f"Remove it, then make it again: `{command(plan.stage, path.parent)}`."
    if not path.exists():
        return Fault(path, "missing", "there is no such part", make)
    footer = Footer.read(path)
    if footer is None:
        return Fault(path, "torn", "it is cut, or no part of ours", make)
    if not footer.is_of(plan, shard):
        return Fault(path, "foreign", "it is a part of another plan", make)
    if told is None:
        return None
    size = path.stat().st_size
    if size != told.bytes:
        what = f"it has {size:,} bytes, the manifest says {told.bytes:,}"
        return Fault(path, "altered", what, make)
    if not quick and _checksum(path) != told.sha256:
        return Fault(path, "altered", "its checksum is not the manifest's", remove)
    return None


def _others(folder: Path, plan: Plan) -> Iterator[Fault]:
    parts = {part_name(shard) for shard in range(plan.shard_count)}
    for path in sorted(folder.iterdir()):
        if path.name in parts or _OWN.fullmatch(path.name):
            continue
        if path.name.endswith(".tmp"):
            what, mend = "a run that was killed left it", "The next run sweeps it away."
            yield Fault(path, "leftover", what, mend)
        else:
            what, mend = (
                "no plan knows it; readers pass it over",
                "Remove it, or keep it elsewhere.",
            )
            yield Fault(path, "surplus", what, mend)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
