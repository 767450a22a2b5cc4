"""A stage that notes what it works on and misbehaves when told; light, for workers import it."""

from __future__ import annotations

import os
import signal
import time

from dummy_stage import DummyStage

from regionprep.errors import InputError


class Noted(DummyStage):
    """Notes what it works on, and does as it is told at one image."""

    def __init__(self, notes, settings, *, at=None, act=None, pause=0.0):
        super().__init__(pause=pause)
        self.notes, self.at, self.act = notes, at, act
        self._note("stages", str(os.getpid()))

    def __call__(self, items):
        self._note("images", *items)
        if self.at in items:
            self.act(self.notes)
        return super().__call__(items)

    def _note(self, name, *words):
        with (self.notes / name).open("a") as file:
            file.write("".join(f"{word}\n" for word in words))


def die(notes):
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(notes):
    if not (notes / "died").exists():
        (notes / "died").touch()
        die(notes)


def fail(notes):
    raise ZeroDivisionError("this image divides by zero")


def fail_twice(notes):
    (notes / "failures").open("a").write("x")
    if (notes / "failures").stat().st_size < 3:
        fail(notes)


def cannot(notes):
    raise InputError("the weights are of another network", where="weights.pt", mend="Take others.")


def kill(pid, notes):
    os.kill(pid, signal.SIGKILL)
    time.sleep(60)
