"""The main job on the embedded scenes: how long each stage takes, and whether regions matter.

    python benchmarks/demo.py [--folder DIR] [--write]

Runs what `prep demo` runs, then trains and scores the same model, seed and recipe on features that
are shuffled among the images (boxes go with their features): a model that has learned nothing but
how captions sound. Prints a Markdown table; --write puts it into benchmarks/results/demo.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from regionprep import FeatureStore, __version__
from regionprep.captioning import caption_split, evaluate_split
from regionprep.job import run_demo, train_captioner
from regionprep.memory import keep_freed_memory
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import Columns, ImageRow, Plan
from regionprep.workspace import Workspace

RESULT = Path(__file__).parent / "results" / "demo.md"


class Shuffled:
    """A stage that gives every image the row of another."""

    batch_size = 256

    def __init__(self, store: FeatureStore, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(store))
        self.store = store
        self.other = {key: store.ids[index] for key, index in zip(store.ids, order, strict=True)}
        self.schema = Columns(store.feature_width, store.dtype.name)

    def read(self, image_id: str) -> ImageRow:
        """Return the other image's row under this image's id."""
        return replace(self.store[self.other[image_id]], image_id=image_id)

    def __call__(self, rows: list[ImageRow]) -> list[ImageRow]:
        """Return the rows as they are."""
        return rows


def main() -> None:
    """Run both models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keep the workspace there")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    keep_freed_memory()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="regionprep-demo-"))
    try:
        report = measure(folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    print(report)
    if options.write:
        RESULT.write_text(report, encoding="utf-8")


def measure(folder: Path) -> str:
    """Return the table of stages, scores and their ratio."""
    started = time.perf_counter()
    seconds = run_demo(folder)
    total = time.perf_counter() - started
    workspace = Workspace.open(folder)
    scores = _scores(workspace, "zodiac-small")
    shuffled = _train_shuffled(workspace)
    ratio = scores["cider_d"] / shuffled["cider_d"]
    lines = [
        "# The main job on the embedded scenes",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"regionprep {__version__}; made by `python benchmarks/demo.py --write`.",
        "",
        "| stage | seconds |",
        "| --- | ---: |",
        *(f"| `{command}` | {spent:.0f} |" for command, spent in seconds.items()),
        f"| all | {total:.0f} |",
        "",
        "| features | " + " | ".join(scores) + " |",
        "| --- |" + " ---: |" * len(scores),
        "| each image's own | " + " | ".join(f"{value:.3f}" for value in scores.values()) + " |",
        "| shuffled | " + " | ".join(f"{value:.3f}" for value in shuffled.values()) + " |",
        "",
        f"CIDEr-D with each image's own features is {ratio:.1f} times that with shuffled ones.",
    ]
    return "\n".join(lines) + "\n"


def _train_shuffled(workspace: Workspace) -> dict[str, float]:
    store = FeatureStore(workspace.features("scenes", "roi"))
    settings = {**store.metadata, "shuffled": 0}
    del settings["stage"]
    plan = Plan.make(store.ids, stage="features", settings=settings)
    run_plan(plan, workspace.features("scenes", "shuffled"), lambda: Shuffled(store, seed=0))
    train_captioner(workspace, detector="scenes", backbone="shuffled", name="shuffled")
    caption_split(workspace, run="shuffled")
    evaluate_split(workspace, run="shuffled")
    return _scores(workspace, "shuffled")


def _scores(workspace: Workspace, run: str) -> dict[str, float]:
    corpus: dict[str, float] = json.loads((workspace.run(run) / "scores.json").read_text())[
        "corpus"
    ]
    return corpus


if __name__ == "__main__":
    main()
