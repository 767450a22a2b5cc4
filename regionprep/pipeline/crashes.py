"""Find the images whose reading kills the process, and pass them over from then on.

While images are read a small file in the folder names those under way, a slot for each. It costs
two short writes an image and is never flushed: what a dead process has written stays with the
operating system. A process that dies (a decoder's segmentation fault, the kernel's out-of-memory
killer, kill -9) leaves the file behind. The next run reads each image named there once in a child
process. Those whose child dies too are noted in a second file and become rows with the status
"crashed"; the others were only unlucky. Both files go when the folder is finished.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.parts import storage_guard
from regionprep.workspace import write_text

READING = ".reading"
CRASHED = ".crashed.json"
SLOT = 4096
"""Bytes for an image's name; a longer one is read without being noted."""

LIMIT = 300.0
"""Seconds that a child may read one image: a decoder that never ends is no better than a crash."""

T = TypeVar("T")


@contextmanager
def surviving_crashes(folder: Path, read: Callable[[str], T]) -> Iterator[Callable[[str], T]]:
    """Give a `read` that raises ImageFault "crashed" for images that kill the process.

    Several threads may call it, and several processes may work on one folder.
    """
    crashed = _convict(folder, read)
    with _noting(folder) as notes:

        def attempt(name: str) -> T:
            if name in crashed:
                raise ImageFault("crashed", crashed[name])
            with notes.reading(name):
                return read(name)

        yield attempt


def forget_crashes(folder: Path) -> None:
    """Remove what was noted: the folder is finished."""
    (folder / CRASHED).unlink(missing_ok=True)
    for notes in folder.glob(f"{READING}-*"):
        notes.unlink(missing_ok=True)


class _Notes:
    """A file that names the images under way, one in a slot."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._lock = threading.Lock()
        self._idle: list[int] = []
        self._slots = 0

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Name an image while it is read."""
        data = name.encode(errors="surrogateescape") + b"\0"
        slot = self._take()
        self._put(slot, data if len(data) <= SLOT else b"\0")
        try:
            yield
        finally:
            self._put(slot, b"\0")
            self._idle.append(slot)

    def close(self) -> None:
        """Close the file; threads that are still reading note nothing more."""
        with self._lock:
            self._file.close()

    def _take(self) -> int:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._slots += 1
            return self._slots - 1

    def _put(self, slot: int, data: bytes) -> None:
        # A disk too full for a note is told by the part that does not fit on it.
        with self._lock, suppress(OSError):
            if not self._file.closed:
                os.pwrite(self._file.fileno(), data, slot * SLOT)


@contextmanager
def _noting(folder: Path) -> Iterator[_Notes]:
    path = folder / f"{READING}-{socket.gethostname()}-{os.getpid()}"
    with storage_guard(path, lambda: SLOT):
        notes = _Notes(path)
    try:
        yield notes
    finally:
        notes.close()
        path.unlink(missing_ok=True)


def _convict(folder: Path, read: Callable[[str], object]) -> dict[str, str]:
    """Return why each image known to kill the process does, after trying those under suspicion."""
    crashed = _crashed(folder)
    for name in sorted(_suspects(folder) - crashed.keys()):
        if reason := _fate(read, name):
            crashed[name] = reason
            write_text(folder / CRASHED, json.dumps(crashed))
    return crashed


def _crashed(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / CRASHED).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _suspects(folder: Path) -> set[str]:
    """Return the images that were being read when a process died, or that another one reads."""
    suspects = set()
    for path in folder.glob(f"{READING}-*"):
        with suppress(FileNotFoundError):
            data = path.read_bytes()
            slots = (data[start : start + SLOT] for start in range(0, len(data), SLOT))
            names = {slot.partition(b"\0")[0] for slot in slots}
            suspects |= {name.decode(errors="surrogateescape") for name in names - {b""}}
    return suspects


def _fate(read: Callable[[str], object], name: str) -> str:
    """Return how reading an image in a child process ended it, "" if the child lives."""
    with warnings.catch_warnings():
        # Threads of torch do not follow into the child, which only reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _read_and_exit(read, name)
    try:
        code = _exit_code(child)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    if code is None:
        return f"reading it does not end within {LIMIT:.0f} s"
    if code < 0:
        return f"reading it kills the process by {signal.Signals(-code).name}"
    return f"reading it ends the process with {code}" if code else ""


def _read_and_exit(read: Callable[[str], object], name: str) -> NoReturn:
    try:
        # Among the files is the folder's lock: it must not outlive a parent that is killed now.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        read(name)
    finally:
        os._exit(0)  # an exception is no crash: the run meets it again


def _exit_code(child: int) -> int | None:
    """Return a child's exit code, negative for a signal, None if it had to be killed."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
