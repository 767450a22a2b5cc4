"""A bar of images done, with rate and time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as ProgressTask
from rich.text import Text


class _Rate(ProgressColumn):
    """Images per second."""

    def render(self, task: ProgressTask) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f} images/s" if speed else "")


@contextmanager
def progress_bar(name: str, total: int, done: int, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Show images done, rate and time left on a terminal's stderr; nothing elsewhere.

    Gives a function that counts one image more, or as many as it is told.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
    )
    with bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda images=1: bar.advance(task, images)
