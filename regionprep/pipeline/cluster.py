"""Make a plan's shards on Dask: processes of this machine, or a scheduler that runs already.

The same code makes a part here and there. A task carries the number of a shard and where its
folder is, never an image or a tensor, and returns the part's row of the manifest. What is done is
what the folder holds: a scheduler keeps nothing when it dies. Few tasks are submitted at a time,
for a scheduler that holds thousands of futures runs many of them again when workers die.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from regionprep.errors import ClusterError, InputError, MismatchError, MissingError, PrepError
from regionprep.pipeline.executor import Stage, make_part
from regionprep.pipeline.parts import Footer, PartRecord, record
from regionprep.pipeline.progress import progress_bar
from regionprep.pipeline.shards import Plan, part_name

if TYPE_CHECKING:
    from distributed import Client, Future, Security, SpecCluster

TASKS_A_WORKER = 3
"""Submitted at a time: one that runs and two so that no worker waits for the driver."""

TRIES = 3
"""How often a shard is tried that raises; then its error is told."""

FAILED_SHARDS = 10
"""With more than these a run ends at once: what fails everywhere is no shard's own fault."""

SECONDS_TO_CONNECT = 15.0
SECONDS_FOR_WORKERS = 60.0


class Elsewhere(Protocol):
    """A function, pickled to every worker, that makes the stage there."""

    def __call__(self, settings: Mapping[str, Any]) -> Stage:
        """Return the stage of a plan with these settings, or raise how this process differs."""


@dataclass(frozen=True)
class Team:
    """Who makes the shards: `workers` processes of this machine, or a scheduler at `cluster`.

    Raises InputError for options that do not go together.
    """

    workers: int | None = None
    cluster: str | None = None
    tls_ca_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def __post_init__(self) -> None:
        if (self.workers is None) == (self.cluster is None):
            raise InputError("--workers starts a cluster, --cluster names one: give one of the two")
        encrypted = (self.cluster or "").startswith("tls://")
        if encrypted != any(self._tls) or encrypted != all(self._tls):
            raise InputError(
                "encryption takes --cluster tls://HOST:PORT with all of --tls-ca-file, --tls-cert "
                "and --tls-key"
            )
        for path in filter(None, self._tls):
            if not path.is_file():
                raise InputError("there is no such file", where=path)

    @classmethod
    def chosen(
        cls,
        workers: int | None,
        cluster: str | None,
        tls_ca_file: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
    ) -> Team | None:
        """Return the team that a command's options ask for, None where they ask for none."""
        options = (workers, cluster, tls_ca_file, tls_cert, tls_key)
        return cls(*options) if any(option is not None for option in options) else None

    @property
    def _tls(self) -> tuple[Path | None, ...]:
        return self.tls_ca_file, self.tls_cert, self.tls_key

    def make(
        self,
        plan: Plan,
        folder: Path,
        elsewhere: Elsewhere,
        todo: list[int],
        records: dict[int, PartRecord],
        progress: bool,
    ) -> None:
        """Make the parts `todo` of `plan` and add their records to `records`.

        Raises MissingError without Dask, ClusterError where the scheduler or its workers cannot be
        reached, and what a shard raised, after the other shards are done.
        """
        job = Job.of(plan, folder, elsewhere, records)
        for shard in todo:
            # What lies there is no part of the plan, though a worker may not see why.
            (folder / part_name(shard)).unlink(missing_ok=True)
        images = len(plan.image_ids)
        done = sum(part.rows for part in records.values())
        with (
            progress_bar(plan.stage, images, done, shown=progress) as advance,
            self._client(len(todo)) as client,
        ):
            for shard, part in _Work(client, job, deque(todo)).parts():
                records[shard] = part
                advance(part.rows)
        _sweep(folder, todo)

    @contextmanager
    def _client(self, tasks: int) -> Iterator[Client]:
        distributed = _distributed()
        with ExitStack() as stack:
            address: str | SpecCluster | None = self.cluster
            if self.workers is not None:
                address = stack.enter_context(local_cluster(min(self.workers, tasks)))
            try:
                client = stack.enter_context(
                    distributed.Client(
                        address,
                        security=self._security(),
                        set_as_default=False,
                        timeout=SECONDS_TO_CONNECT,
                    )
                )
            except (OSError, ValueError, TypeError) as error:
                raise ClusterError(
                    f"no Dask scheduler can be reached: {error}",
                    where=self.cluster,
                    mend="Start one with `dask scheduler --host ADDRESS`, or give --workers N.",
                ) from error
            self._await_workers(client)
            yield client

    def _security(self) -> Security | None:
        if self.tls_ca_file is None:
            return None
        security: Security = _distributed().Security(
            tls_ca_file=str(self.tls_ca_file),
            tls_client_cert=str(self.tls_cert),
            tls_client_key=str(self.tls_key),
            require_encryption=True,
        )
        return security

    def _await_workers(self, client: Client) -> None:
        try:
            client.wait_for_workers(1, timeout=SECONDS_FOR_WORKERS)
        except TimeoutError as error:
            where = self.cluster or "this machine"
            raise ClusterError(
                f"no worker came within {SECONDS_FOR_WORKERS:.0f} s",
                where=where,
                mend=f"Start some on their hosts: `dask worker {where} --nthreads 1`.",
            ) from error


@dataclass(frozen=True)
class Job:
    """All that a task needs besides its shard's number. Few kilobytes, sent with each.

    `elsewhere` is pickled, so that jobs compare; `beside` is a part that is there, whose columns
    the others must have.
    """

    folder: str
    fingerprint: str
    elsewhere: bytes
    beside: PartRecord | None = field(compare=False)

    @classmethod
    def of(
        cls, plan: Plan, folder: Path, elsewhere: Elsewhere, records: Mapping[int, PartRecord]
    ) -> Job:
        """Return the job of a plan in a folder; MissingError without Dask."""
        _distributed()
        import cloudpickle

        beside = next(iter(records.values()), None)
        return cls(str(folder), plan.fingerprint, cloudpickle.dumps(elsewhere), beside)


# What a worker process keeps from task to task: one job's plan and stage with its model. The lock
# also keeps a process to one shard at a time, however many threads a worker was given.
_alone = Lock()
_prepared: dict[Job, tuple[Plan, Stage]] = {}


def make_shard(job: Job, shard: int) -> PartRecord:
    """Make a part unless it is there, and return its record: the task that a worker runs."""
    folder = Path(job.folder)
    with _alone:
        plan, stage = _prepare(job)
        path = folder / part_name(shard)
        footer = Footer.read(path)
        if footer is not None and footer.is_of(plan, shard):
            return record(path, footer)
        return make_part(plan, folder, stage, shard, beside=job.beside)


def _prepare(job: Job) -> tuple[Plan, Stage]:
    if job not in _prepared:
        import cloudpickle

        plan = Plan.read(Path(job.folder))
        if plan is None or plan.fingerprint != job.fingerprint:
            raise MismatchError(
                f"a worker on {os.uname().nodename} finds there "
                + ("no plan" if plan is None else "another plan than the command"),
                where=job.folder,
                mend="Give the folder the same path on every host, on a shared file system.",
            )
        # An older job's model goes first: two may not fit.
        _prepared.clear()
        _prepared[job] = plan, cloudpickle.loads(job.elsewhere)(plan.settings)
    return _prepared[job]


@dataclass
class _Work:
    """The shards of a job on their way: waiting, submitted, set aside."""

    client: Client
    job: Job
    waiting: deque[int]
    suspects: deque[int] = field(default_factory=deque)
    running: dict[str, tuple[Future[Any], int]] = field(default_factory=dict)
    ended: SimpleQueue[Future[Any]] = field(default_factory=SimpleQueue)
    tries: Counter[int] = field(default_factory=Counter)
    faults: dict[int, BaseException] = field(default_factory=dict)
    window: int = 0
    counted: float = float("-inf")

    def parts(self) -> Iterator[tuple[int, PartRecord]]:
        """Give each part's record as it is done; at the end raise what shards failed with."""
        while self._submit():
            future = self._next()
            _, shard = self.running.pop(str(future.key))
            if future.status == "finished":
                yield shard, self._record(future)
            else:
                self._failed(shard, future)
            future.release()
        if self.faults:
            shards = ", ".join(map(str, sorted(self.faults)))
            error = self.faults[min(self.faults)]
            error.add_note(f"shards that failed: {shards}; all others are done and stay")
            raise error

    def _record(self, future: Future[Any]) -> PartRecord:
        try:
            part: PartRecord = future.result()
        except OSError as error:
            raise self._lost() from error
        return part

    def _submit(self) -> bool:
        """Fill the window; tell whether anything is on its way."""
        while self.waiting and len(self.running) < self._window():
            self._send(self.waiting.popleft())
        if self.suspects and not self.running:
            # Alone, so that whatever kills a worker now is this shard.
            self._send(self.suspects.popleft())
        return bool(self.running)

    def _send(self, shard: int) -> None:
        self.tries[shard] += 1
        name = f"part-{shard:05d}-{self.tries[shard]}-{self.job.fingerprint[:8]}-{time.time_ns()}"
        future = self.client.submit(make_shard, self.job, shard, key=name, pure=False)
        self.running[name] = future, shard
        future.add_done_callback(self.ended.put)

    def _window(self) -> int:
        # Asked of the scheduler now and then, not for every shard: workers come and go.
        if time.monotonic() - self.counted > 2:
            try:
                workers = len(self.client.nthreads())
            except OSError as error:
                raise self._lost() from error
            self.window = TASKS_A_WORKER * max(1, workers)
            self.counted = time.monotonic()
        return self.window

    def _next(self) -> Future[Any]:
        while True:
            try:
                future = self.ended.get(timeout=1)
            except Empty:
                # Dask tells nobody who waits for a task that its scheduler is gone.
                states = {future.status for future, _ in self.running.values()}
                if self.client.status == "closed" or states - {"pending", "finished", "error"}:
                    raise self._lost() from None
            else:
                if future.status not in ("finished", "error"):
                    raise self._lost()
                return future

    def _lost(self) -> ClusterError:
        return ClusterError(
            "the Dask scheduler is gone",
            where=self.job.folder,
            mend="What is done stays done: start a scheduler and give the same command again.",
        )

    def _failed(self, shard: int, future: Future[Any]) -> None:
        """Try a shard again, or keep its error; raise it if others would fail of it too."""
        error = future.exception()
        if isinstance(error, _distributed().KilledWorker):
            self._killed(shard, error)
            return
        if isinstance(error, PrepError):
            raise error
        if self.tries[shard] < TRIES:
            self.waiting.append(shard)
            return
        self.faults[shard] = error.with_traceback(future.traceback())
        if len(self.faults) > FAILED_SHARDS:
            raise error

    def _killed(self, shard: int, error: BaseException) -> None:
        """Set a shard aside whose workers died: it may only have been near the one at fault."""
        if self.tries[shard] < TRIES and shard not in self.faults:
            self.tries[shard] = TRIES
            self.suspects.append(shard)
            return
        fault = ClusterError(
            f"every worker that made shard {shard} died: {error}",
            where=self.job.folder,
            mend="Memory may be short (a smaller --batch-size), or an image kills its decoder.",
        )
        self.faults[shard] = fault


def _sweep(folder: Path, shards: list[int]) -> None:
    """Remove what workers that died left of these shards; others may be in other hands."""
    ours = {f".{part_name(shard)}" for shard in shards}
    for leftover in folder.glob(".part-*.tmp"):
        if leftover.name.partition(".parquet")[0] + ".parquet" in ours:
            leftover.unlink(missing_ok=True)


def _distributed() -> Any:  # noqa: ANN401 - a module
    try:
        import distributed
    except ImportError as error:
        raise MissingError(
            "--workers and --cluster need Dask, which is not installed",
            mend="Install it: pip install 'regionprep[dask]'",
        ) from error
    return distributed


@contextmanager
def local_cluster(workers: int) -> Iterator[SpecCluster]:
    """Start a scheduler on the loopback and `workers` processes of one thread each."""
    distributed = _distributed()
    import dask
    from distributed.system import MEMORY_LIMIT

    quiet = logging.CRITICAL  # a failed task is told once, by us
    specs = {
        number: {
            "cls": distributed.Nanny,
            "options": {
                "nthreads": 1,
                "host": "127.0.0.1",
                "memory_limit": MEMORY_LIMIT // workers,
                "env": environment,
                "silence_logs": quiet,
                "dashboard": False,
                "dashboard_address": "127.0.0.1:0",
            },
        }
        for number, environment in enumerate(_environments(workers))
    }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {
            "host": "127.0.0.1",
            "port": 0,
            "dashboard": False,
            # Health and metrics are served even so: not to the network, on any free port.
            "dashboard_address": "127.0.0.1:0",
        },
    }
    # A paused worker never goes on by itself; one that takes too much is killed and replaced.
    memory = {f"distributed.worker.memory.{name}": False for name in ("target", "spill", "pause")}
    with (
        dask.config.set(memory),
        distributed.SpecCluster(specs, scheduler, silence_logs=quiet) as cluster,
    ):
        yield cluster


def _environments(workers: int) -> list[dict[str, str]]:
    """Return each worker's variables: one GPU each, shared in turn where there are fewer."""
    gpus = _gpus()
    if not gpus:
        return [{} for _ in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} for number in range(workers)]


def _gpus() -> list[str]:
    """Return the names of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    import torch

    count = torch.cuda.device_count()
    names = visible.split(",") if visible else map(str, range(count))
    return [name.strip() for name in names][:count]
