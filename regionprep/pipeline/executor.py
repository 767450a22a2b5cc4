"""Run a plan: the one driver that reads, computes, writes, resumes and stops.

A stage is a function over a batch; it touches neither the folder nor the plan. A task is a shard:
read its images, run the stage batch by batch, commit the part. Batches never cross shards, so that
a part is the same, byte for byte, whichever shards were made before it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError, MismatchError, StorageError
from regionprep.pipeline.claim import claimed, joining, share_claimed, terminable
from regionprep.pipeline.crashes import forget_crashes, surviving_crashes
from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.parts import Footer, Manifest, PartRecord, record, storage_guard
from regionprep.pipeline.progress import progress_bar
from regionprep.pipeline.shards import MANIFEST, PLAN, Columns, ImageRow, Plan, part_name
from regionprep.pipeline.share import Share
from regionprep.pipeline.writer import PartWriter
from regionprep.workspace import sync_folder

if TYPE_CHECKING:
    from regionprep.pipeline.cluster import Elsewhere, Team

READERS = min(8, (os.cpu_count() or 1) + 2)


class Stage(Protocol):
    """A function over a batch of images, and what it needs read beforehand."""

    schema: Columns
    batch_size: int

    def read(self, image_id: str) -> Any:  # noqa: ANN401 - a stage's own matter
        """Return what the batch needs of an image; called in threads. May raise ImageFault."""

    def __call__(self, items: list[Any]) -> list[ImageRow]:
        """Return the rows of what `read` returned, in its order."""


@dataclass(frozen=True)
class Outcome:
    """What a run did, and what its folder holds now. `seconds` is wall time.

    Of a share of the plan, all counts are the share's; `left` shards of the others are not there
    yet, and the folder is not `sealed` by a manifest.
    """

    shards_made: int
    shards_kept: int
    images: int
    regions: int
    statuses: Counter[str]
    seconds: float
    folder: Path
    left: int = 0
    sealed: bool = True

    @property
    def failed(self) -> int:
        """Return how many images could not be used."""
        return self.statuses.total() - self.statuses["ok"]

    def __str__(self) -> str:
        rate = f", {self.images / self.seconds:,.0f} images/s" if not self.shards_kept else ""
        made = f"{self.shards_made} shards made in {self.seconds:.1f} s{rate}"
        kept = f"{self.shards_kept} shards were there" if self.shards_kept else ""
        state = ", ".join(part for part in (made if self.shards_made else "", kept) if part)
        lines = [
            f"{self.images:,} images, {self.regions:,} regions in {self.folder}: {state}"
            + ("" if self.shards_made else "; nothing to do")
        ]
        faults = sorted((status, n) for status, n in self.statuses.items() if status != "ok")
        if faults:
            reasons = ", ".join(f"{number:,} {status}" for status, number in faults)
            lines.append(f"  {self.failed:,} images could not be used: {reasons}")
        if self.left:
            lines.append(
                f"  {self.left:,} shards of the plan are left to other jobs; when all are there, "
                "the same command without --shards finishes the folder"
            )
        elif not self.sealed:
            lines.append(
                "  all shards of the plan are there: the same command without --shards checks them "
                "and finishes the folder"
            )
        return "\n".join(lines)


def run_plan(
    plan: Plan,
    folder: str | Path,
    stage: Callable[[], Stage],
    *,
    elsewhere: Elsewhere | None = None,
    team: Team | None = None,
    share: Share | None = None,
    force: bool = False,
    progress: bool = True,
) -> Outcome:
    """Make every part of `plan` in `folder` that is not done, then the manifest.

    `stage` is called once, when the first part has to be made: a run with nothing to do loads no
    model. With a `team`, `elsewhere` is called in its workers instead. With a `share`, only its
    parts are made, beside other jobs with theirs, and no manifest. `force` starts over. Raises
    BusyError while another process works on the folder, MismatchError where the folder was made by
    another plan, StorageError for a full or failing disk; on SIGTERM and Ctrl-C, KeyboardInterrupt
    after saying what is done.
    """
    started = time.monotonic()
    folder = Path(folder).absolute()
    shards = range(plan.shard_count) if share is None else share.of(plan)
    if share is not None and force:
        raise InputError("--force starts the whole folder over: it does not go with --shards")
    with storage_guard(folder, lambda: 4096):
        folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder) if share is None else share_claimed(folder, str(share)), terminable():
        plan = _adopt(plan, folder, force=force) if share is None else _join(plan, folder)
        records = _finished(plan, folder, shards)
        todo = [shard for shard in shards if shard not in records]
        if todo:
            (folder / MANIFEST).unlink(missing_ok=True)
            with _saying_what_is_done(plan, shards, records):
                if team is None:
                    _make(plan, folder, stage, todo, records, progress)
                else:
                    assert elsewhere is not None, "a team needs a stage that travels"
                    team.make(plan, folder, elsewhere, todo, records, progress)
        parts = tuple(records[shard] for shard in shards)
        if share is None and (todo or not (folder / MANIFEST).exists()):
            _seal(plan, folder, parts)
        if share is None:
            forget_crashes(folder)
    return Outcome(
        shards_made=len(todo),
        shards_kept=len(shards) - len(todo),
        images=sum(part.rows for part in parts),
        regions=sum(part.regions for part in parts),
        statuses=sum((Counter(part.statuses) for part in parts), Counter()),
        seconds=time.monotonic() - started,
        folder=folder,
        left=_absent(plan, folder),
        sealed=(folder / MANIFEST).exists(),
    )


def make_part(
    plan: Plan, folder: Path, stage: Stage, shard: int, *, beside: PartRecord | None = None
) -> PartRecord:
    """Return the record of a part, made alone as a run makes it among others.

    Raises MismatchError if the columns of the part `beside` it are not the stage's.
    """
    records = {} if beside is None else {-1: beside}
    _make(plan, folder, lambda: stage, [shard], records, progress=False)
    return records[shard]


def _absent(plan: Plan, folder: Path) -> int:
    """Return how many parts have no file; which is cheap to know, and of commits enough."""
    present = {path.name for path in folder.glob("part-*.parquet")}
    return sum(part_name(shard) not in present for shard in range(plan.shard_count))


@contextmanager
def _saying_what_is_done(
    plan: Plan, shards: range, records: dict[int, PartRecord]
) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        images = sum(part.rows for part in records.values())
        wanted = sum(len(plan.shard(shard)) for shard in shards)
        print(
            f"stopped: {len(records)} of {len(shards)} shards "
            f"({images:,} of {wanted:,} images) are done and stay; "
            "the same command goes on from there",
            file=sys.stderr,
            flush=True,
        )
        raise


def _adopt(plan: Plan, folder: Path, *, force: bool) -> Plan:
    """Return the folder's own plan if it is the same, else write `plan` there first."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)
    if force:
        _clear(folder)
    present = Plan.read(folder)
    if present is not None:
        plan.require_same(present, folder)
        return present
    with storage_guard(folder / PLAN, lambda: 64 * len(plan.image_ids)):
        plan.write(folder)
    return plan


def _join(plan: Plan, folder: Path) -> Plan:
    """Return the folder's own plan if it is the same; the first of several jobs writes it."""
    with joining(folder):
        if not (folder / PLAN).exists():
            with storage_guard(folder / PLAN, lambda: 64 * len(plan.image_ids)):
                plan.write(folder)
    present = Plan.read(folder)
    assert present is not None, "a plan was written and is not there"
    plan.require_same(present, folder)
    return present


def _clear(folder: Path) -> None:
    """Remove what a plan has made, the manifest first: what it vouches for is going away."""
    for path in (folder / MANIFEST, *folder.glob("part-*.parquet"), folder / PLAN):
        path.unlink(missing_ok=True)
    sync_folder(folder)


def _finished(plan: Plan, folder: Path, shards: range) -> dict[int, PartRecord]:
    """Return the records of those parts that are done."""
    known = _recorded(plan, folder)
    finished: dict[int, PartRecord] = {}
    for shard in shards:
        path = folder / part_name(shard)
        footer = Footer.read(path)
        told = known.get(path.name)
        if footer is None or not footer.is_of(plan, shard):
            continue
        if told is None:
            finished[shard] = record(path, footer)
        elif told.bytes == path.stat().st_size:
            finished[shard] = told
    return finished


def _recorded(plan: Plan, folder: Path) -> dict[str, PartRecord]:
    """Return what the manifest says of the parts; nothing if it is damaged or another plan's."""
    try:
        manifest = Manifest.read(folder)
    except (StorageError, MismatchError):
        manifest = None
    if manifest is None or manifest.fingerprint != plan.fingerprint:
        (folder / MANIFEST).unlink(missing_ok=True)
        return {}
    return {part.file: part for part in manifest.parts}


def _seal(plan: Plan, folder: Path, parts: tuple[PartRecord, ...]) -> None:
    footer = Footer.read(folder / parts[0].file)
    assert footer is not None, "a part was committed and is not there"
    columns = footer.columns
    Manifest(plan.stage, plan.fingerprint, plan.settings, columns, parts).write(folder)


def _make(
    plan: Plan,
    folder: Path,
    factory: Callable[[], Stage],
    todo: list[int],
    records: dict[int, PartRecord],
    progress: bool,
) -> None:
    stage = factory()
    _check_columns(folder, stage.schema, records)
    names = (image_id for shard in todo for image_id in plan.shard(shard))
    done = sum(part.rows for part in records.values())
    with (
        surviving_crashes(folder, stage.read) as read,
        progress_bar(plan.stage, len(plan.image_ids), done, shown=progress) as advance,
        _prefetched(read, names, stage.batch_size + 2 * READERS) as reads,
    ):
        for shard in todo:
            with PartWriter(folder, plan, shard, stage.schema) as writer:
                for row in _rows(stage, islice(reads, len(plan.shard(shard)))):
                    writer.add(row)
                    advance()
                records[shard] = writer.commit()


def _check_columns(folder: Path, columns: Columns, records: dict[int, PartRecord]) -> None:
    for part in islice(records.values(), 1):
        footer = Footer.read(folder / part.file)
        if footer is not None and footer.columns != columns:
            raise MismatchError(
                f"holds {footer.columns}, and {columns} would be added under the same settings",
                where=folder,
                mend="Start over with --force.",
            )


# What became of reading an image: its id, and the item or the fault.
Read = tuple[str, Any]


@contextmanager
def _prefetched(
    read: Callable[[str], Any], names: Iterable[str], depth: int
) -> Iterator[Iterator[Read]]:
    """Give what `read` returns for each name, in order, read ahead by threads up to `depth`."""
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="read")

    def attempt(name: str) -> Any:  # noqa: ANN401 - a stage's own matter
        try:
            return read(name)
        except ImageFault as fault:
            return fault

    def ordered() -> Iterator[Read]:
        ahead: deque[tuple[str, Future[Any]]] = deque()
        for name in names:
            ahead.append((name, pool.submit(attempt, name)))
            if len(ahead) >= depth:
                first, future = ahead.popleft()
                yield first, future.result()
        for first, future in ahead:
            yield first, future.result()

    try:
        yield ordered()
    finally:
        # Not waited for: an image that takes long must not hold up Ctrl-C.
        pool.shutdown(wait=False, cancel_futures=True)


def _rows(stage: Stage, reads: Iterator[Read]) -> Iterator[ImageRow]:
    """Give the rows of one shard in order, computed in full batches of the images that decode."""
    waiting: list[Read] = []
    usable = 0
    for name, item in reads:
        waiting.append((name, item))
        usable += not isinstance(item, ImageFault)
        if usable == stage.batch_size:
            yield from _batch(stage, waiting)
            waiting, usable = [], 0
    yield from _batch(stage, waiting)


def _batch(stage: Stage, waiting: list[Read]) -> Iterator[ImageRow]:
    items = [item for _, item in waiting if not isinstance(item, ImageFault)]
    computed = iter(_computed(stage, items))
    for name, item in waiting:
        if isinstance(item, ImageFault):
            yield _failed(name, item, stage.schema)
        else:
            yield next(computed)


def _computed(stage: Stage, items: list[Any]) -> list[ImageRow]:
    """Return the rows of a batch, computed twice where some were no numbers."""
    rows = _once(stage, items) if items else []
    if all(row.ok for row in rows):
        return rows
    from regionprep.pipeline.devices import plain_float32

    with plain_float32():
        return _once(stage, items)


def _once(stage: Stage, items: list[Any]) -> list[ImageRow]:
    rows = stage(items)
    if len(rows) != len(items):
        raise ValueError(f"the stage returned {len(rows)} rows for {len(items)} images")
    return [_finite(row, stage.schema) for row in rows]


def _failed(name: str, fault: ImageFault, columns: Columns) -> ImageRow:
    return ImageRow.failed(
        name,
        fault.status,
        fault.error,
        width=fault.width,
        height=fault.height,
        feature_width=columns.feature_width,
        dtype=columns.dtype,
    )


def _finite(row: ImageRow, columns: Columns) -> ImageRow:
    """Return a row with its features in the columns' type, or its failure if some do not fit."""
    if columns.feature_width is not None:
        with np.errstate(over="ignore"):
            row = replace(row, features=np.asarray(row.features, columns.dtype))
    for name in ("features", "boxes", "scores"):
        values = getattr(row, name)
        if values is not None and not _all_finite(values):
            count = int((~np.isfinite(values)).sum())
            fault = ImageFault(
                "not_finite",
                f"{count} of {values.size} values of {name} are no {values.dtype} numbers",
                width=row.width,
                height=row.height,
            )
            return _failed(row.image_id, fault, columns)
    return row


def _all_finite(values: NDArray[Any]) -> bool:
    if values.dtype == np.float16:
        # All exponent bits set is NaN or infinity; ten times faster than `isfinite` on float16.
        bits = np.ascontiguousarray(values).view(np.uint16) & 0x7FFF
        return bool(bits.max(initial=0) < 0x7C00)
    return bool(np.isfinite(values).all())
