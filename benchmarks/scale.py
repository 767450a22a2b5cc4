"""Measure what workers gain and what the driver costs: `python benchmarks/scale.py`.

Two workers against one, on a stage that only counts; then, with a stage that does nothing, what the
driver with its scheduler costs a shard at 1, 100 and 10,000 shards (`--most 100000` for more). The
cluster runs before the clock does. `--write` keeps the table in `benchmarks/results/scale.md`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from regionprep.pipeline.cluster import Team, local_cluster
from regionprep.pipeline.executor import Outcome, run_plan
from regionprep.pipeline.shards import Columns, ImageRow, Plan

RESULTS = Path(__file__).parent / "results" / "scale.md"
SHARD_COUNTS = (1, 100, 10_000, 100_000)


class Counting:
    """A stage that counts for each image, as a small network would compute."""

    schema = Columns()
    batch_size = 4

    def __init__(self, steps: int, settings: Mapping[str, Any]) -> None:
        self.steps = steps

    def read(self, image_id: str) -> str:
        """Return the id: there is nothing to read."""
        return image_id

    def __call__(self, items: list[str]) -> list[ImageRow]:
        """Return rows without regions, after counting."""
        for _ in range(self.steps * len(items)):
            pass
        none = np.zeros(0, np.float32)
        return [
            ImageRow(name, 1, 1, none.reshape(0, 4), none, none.astype(np.int32)) for name in items
        ]


def run(address: str, folder: Path, shards: int, images: int = 1, steps: int = 0) -> Outcome:
    """Make shards of `images` images each."""
    ids = [f"{number:09d}" for number in range(shards * images)]
    plan = Plan.make(ids, stage="regions", settings={"steps": steps}, shard_size=images)
    stage = partial(Counting, steps)
    team = Team(cluster=address)
    return run_plan(plan, folder, lambda: stage({}), elsewhere=stage, team=team, progress=False)


def workers_seconds(workers: int, folder: Path, steps: int) -> float:
    """Return how long so many workers take, the best of three runs."""
    with local_cluster(workers) as cluster:
        # Each process imports what it needs before the clock runs.
        run(cluster.scheduler_address, folder / f"warm-{workers}", 8 * workers)
        times = [
            run(
                cluster.scheduler_address, folder / f"{workers}-{turn}", 24, images=8, steps=steps
            ).seconds
            for turn in range(3)
        ]
    return min(times)


def shard_cost(address: str, folder: Path, shards: int) -> str:
    """Return a row of the table: what a shard costs the driver."""
    before = time.process_time()
    outcome = run(address, folder, shards)
    busy = time.process_time() - before
    again = run(address, folder, shards)
    assert (outcome.shards_made, again.shards_made) == (shards, 0)
    wall, nothing = outcome.seconds / shards * 1e3, again.seconds / shards * 1e3
    return f"| {shards:,} | {busy / shards * 1e3:.2f} | {wall:.1f} | {nothing:.2f} |"


def main() -> None:
    """Print the tables, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=10_000, help="planned shards, at most")
    parser.add_argument("--steps", type=int, default=2_000_000, help="counted for an image")
    parser.add_argument("--write", action="store_true", help=f"keep the tables in {RESULTS.name}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        load = os.getloadavg()[0]
        one, two = (workers_seconds(count, folder, arguments.steps) for count in (1, 2))
        lines = [
            f"{os.cpu_count()} cores, load {load:.1f} before the start.",
            "",
            f"2 workers do {one / two:.2f} times the work of 1 ({one:.2f} s, {two:.2f} s).",
            "",
            "| shards | driver and scheduler, CPU ms a shard | wall ms a shard, 2 workers "
            "| ms a shard when all are done |",
            "| ---: | ---: | ---: | ---: |",
        ]
        with local_cluster(2) as cluster:
            run(cluster.scheduler_address, folder / "warm", 16)
            lines += [
                shard_cost(cluster.scheduler_address, folder / f"cost-{count}", count)
                for count in SHARD_COUNTS
                if count <= arguments.most
            ]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        RESULTS.write_text(f"# `python benchmarks/scale.py`\n\n{text}\n")


if __name__ == "__main__":
    main()
