"""What a run tells while it trains: `metrics.jsonl`, and a progress bar or plain lines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from regionprep.workspace import write_text

PLAIN_SECONDS = 30.0
"""How often a line is printed where there is no terminal to draw a bar on."""


@dataclass(frozen=True)
class _Step:
    """The figures of one step."""

    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    waited: float


class Journal:
    """Collects the figures of steps and writes their means: a line every `every` steps.

    A line is a JSON object. `event` is "step" (with loss in nats a token, rate, gradient_norm,
    tokens_per_s, and data_share, the part of the time that was spent waiting for data) or "epoch"
    (with train_loss, the figures of the validation, and the seconds of both).
    """

    def __init__(self, file: Path, *, steps: int, epochs: int, every: int, shown: bool) -> None:
        self.file = file
        self.steps = steps
        self.epochs = epochs
        self.every = every
        self.shown = shown
        self.console = Console(stderr=True, highlight=False)
        self._pending: list[_Step] = []
        self._told = self._epoch_began = time.monotonic()

    @contextmanager
    def open(self, *, step: int) -> Iterator[None]:
        """Write and show figures until the end; those of steps after `step` are forgotten."""
        _forget_after(self.file, step)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.shown and self.console.is_terminal),
        )
        with self.file.open("a", encoding="utf-8") as self._lines, self._bar:
            self._epoch_began = time.monotonic()
            self._task = self._bar.add_task("train", total=self.steps, completed=step, figures="")
            yield

    def step(
        self,
        *,
        step: int,
        epoch: int,
        rate: float,
        loss: float,
        gradient_norm: float,
        tokens: int,
        seconds: float,
        waited: float,
    ) -> None:
        """Take the figures of a step; `waited` are those of its seconds spent waiting for data."""
        self._pending.append(_Step(loss, gradient_norm, tokens, seconds, waited))
        if step % self.every == 0 or step == self.steps:
            self._tell_step(step, epoch, rate)
        else:
            self._bar.update(self._task, completed=step)

    def epoch(self, *, step: int, epoch: int, figures: Mapping[str, float], best: bool) -> None:
        """Take the figures of an epoch and its validation."""
        now = time.monotonic()
        seconds, self._epoch_began = now - self._epoch_began, now
        line = {"event": "epoch", "step": step, "epoch": epoch, "seconds": round(seconds, 3)}
        self._write(line | dict(figures))
        told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.say(f"epoch {epoch}/{self.epochs}: {told}, {seconds:.0f} s{' (best)' if best else ''}")

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.shown:
            self.console.print(line, markup=False, soft_wrap=True)

    def _tell_step(self, step: int, epoch: int, rate: float) -> None:
        steps = self._pending
        self._pending = []
        tokens = sum(one.tokens for one in steps)
        seconds = sum(one.seconds for one in steps)
        line = {
            "event": "step",
            "step": step,
            "epoch": epoch,
            "loss": sum(one.loss * one.tokens for one in steps) / tokens,
            "rate": rate,
            "gradient_norm": max(one.gradient_norm for one in steps),
            "tokens_per_s": round(tokens / seconds, 1),
            "data_share": round(sum(one.waited for one in steps) / seconds, 4),
        }
        self._write(line)
        told = f"loss {line['loss']:.3f}  rate {rate:.2e}  {line['tokens_per_s']:,.0f} tokens/s"
        self._bar.update(
            self._task,
            completed=step,
            description=f"epoch {epoch}/{self.epochs}",
            figures=told,
        )
        if not self.console.is_terminal and time.monotonic() - self._told > PLAIN_SECONDS:
            self._told = time.monotonic()
            self.say(f"step {step:,}/{self.steps:,}  {told}")

    def _write(self, line: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`; one that a killed run did not finish is left out."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    # What follows the last line's end is nothing, or a line that was never finished.
    return [json.loads(line) for line in lines[:-1]]


def _forget_after(file: Path, step: int) -> None:
    kept = [line for line in read_metrics(file) if line["step"] <= step]
    write_text(file, "".join(json.dumps(line) + "\n" for line in kept))
