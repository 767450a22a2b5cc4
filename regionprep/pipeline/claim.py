"""One writer a folder, which can be told to stop."""

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


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a folder, or raise BusyError that names the process which holds it.

    The operating system lets go of a dead process's lock by itself.
    """
    lock = FileLock(folder / LOCK, timeout=0)
    with storage_guard(folder / LOCK, lambda: 4096):
        try:
            lock.acquire()
        except Timeout as error:
            raise BusyError(
                f"is being worked on by {_holder(folder)}",
                where=folder,
                mend="Wait for it to end, or stop it.",
            ) from error
    try:
        _write_holder(folder)
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def _write_holder(folder: Path) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname()}
    with storage_guard(folder / HOLDER, lambda: 4096):
        (folder / HOLDER).write_text(json.dumps(holder))


def _holder(folder: Path) -> str:
    try:
        holder = json.loads((folder / HOLDER).read_text())
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
