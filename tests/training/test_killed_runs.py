"""A run that is killed at any moment and started again ends as one that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from made_up import make_workspace

from regionprep.training import read_metrics
from regionprep.training.checkpoints import load

HERE = Path(__file__).parent

MOMENTS = ("first-step", "step", "validation", "write", "rename", "end", "random")

# One process for all, which forks a child for each try: importing takes longer than training.
PROGRAM = """
import os, random, signal, sys, time
from pathlib import Path

import lightning_fabric
import torch
from made_up import BACKBONE, DETECTOR, manifest, right

from regionprep import workspace
from regionprep.training import engine, loop, train

torch.set_num_threads(1)
here = workspace.Workspace.open(Path(sys.argv[1]))


def fit(name):
    train(here, manifest(), name=name, detector=DETECTOR, backbone=BACKBONE, device="cpu",
          score=right, select_by="right", checkpoint_every=4, progress=False)


def die_at(owner, name, count):
    act = getattr(owner, name)

    def counted(*given, **options):
        nonlocal count
        count -= 1
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*given, **options)

    setattr(owner, name, counted)


def killed(name, *death, delay=None):
    child = os.fork()
    if not child:
        if death:
            die_at(*death)
        fit(name)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


began = time.monotonic()
assert not killed("never")
whole = time.monotonic() - began

for name, death in {
    "step": (engine.Engine, "update", 11),
    "first-step": (engine.Engine, "update", 1),
    "validation": (loop.Trainer, "_validate", 2),
    "write": (workspace.os, "fsync", 12),
    "rename": (Path, "replace", 7),
    "end": (loop.Trainer, "_finish", 1),
}.items():
    assert killed(name, *death), f"not killed at {name}"
    assert not killed(name)

chance = random.Random(0)
delays = [chance.uniform(0.1, 0.6) * whole for _ in range(6)]
assert sum(killed("random", delay=delay) for delay in delays), "never killed at random"
assert not killed("random")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that nobody disturbed, and of those that were killed."""
    root = tmp_path_factory.mktemp("killed") / "work"
    make_workspace(root)
    program = [sys.executable, "-W", "error", "-c", PROGRAM, str(root)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=HERE, check=False)
    assert done.returncode == 0, done.stderr
    return root / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(runs: Path, moment: str) -> None:
    folder, undisturbed = runs / moment, runs / "never"
    for name in ("last", "best"):
        ours, theirs = (
            load(there / "checkpoints" / f"{name}.safetensors") for there in (folder, undisturbed)
        )
        assert ours.progress == theirs.progress
        assert ours.tensors.keys() == theirs.tensors.keys()
        for tensor, value in theirs.tensors.items():
            assert torch.equal(ours.tensors[tensor], value), f"{name}: {tensor}"
    assert told(folder) == told(undisturbed)
    assert not [path.name for path in folder.rglob("*.tmp")]


def told(folder: Path) -> list[dict[str, object]]:
    """Return the epochs' figures, but for times."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [
        {name: value for name, value in line.items() if name != "seconds"}
        for line in lines
        if line["event"] == "epoch"
    ]
