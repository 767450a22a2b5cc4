"""One writer a folder, or one a share of it; each can be told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from regionprep.errors import BusyError
from regionprep.pipeline.parts import storage_guard

LOCK = ".lock"
HOLDER = ".lock.json"
SHARES = ".lock.shards-"

SECONDS_TO_JOIN = 30.0
"""How long a job waits for others that join a folder at the same moment."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder, or raise BusyError that names the process which holds it or a share of it.

    The operating system lets go of a dead process's lock by itself.
    """
    with _held(folder, LOCK):
        for path in folder.glob(f"{SHARES}*[!n]"):
            with _held(folder, path.name):
                # Nobody can take it anew: joining takes the folder's own lock.
                path.unlink()
        yield


@contextmanager
def share_claimed(folder: Path, share: str) -> Iterator[None]:
    """Hold a share of a folder beside the holders of others, or raise BusyError."""
    with _held(folder, SHARES + share.replace("/", "-of-")):
        yield


@contextmanager
def joining(folder: Path) -> Iterator[None]:
    """Hold a folder for a moment, when a share of it is held; BusyError if another has it all."""
    with _held(folder, LOCK, wait=SECONDS_TO_JOIN):
        yield


@contextmanager
def _held(folder: Path, name: str, wait: float = 0) -> Iterator[None]:
    lock, holder = FileLock(folder / name, timeout=wait), folder / f"{name}.json"
    with storage_guard(folder / name, lambda: 4096):
        try:
            lock.acquire()
        except Timeout as error:
            raise BusyError(
                f"is being worked on by {_holder(holder)}",
                where=folder,
                mend="Wait for it to end, or stop it.",
            ) from error
    try:
        _write_holder(holder)
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _write_holder(path: Path) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    with storage_guard(path, lambda: 4096):
        path.write_text(json.dumps(holder))


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM stop the run as Ctrl-C does; only a main thread can be told."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
