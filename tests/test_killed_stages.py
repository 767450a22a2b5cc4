"""`prep caption` and `prep evaluate`, killed and given again, end as if undisturbed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Its workspace of made-up features lies beside the tests of training.
TRAINING = Path(__file__).parent / "training"

MOMENTS = {
    "caption": ("first-batch", "last-batch", "write", "rename", "end"),
    "evaluate": ("bleu", "cider", "write", "rename", "end"),
}

# One process for all, which forks a child for each try: importing takes longer than captioning.
PROGRAM = """
import os, shutil, signal, sys
from pathlib import Path

import torch
from made_up import BACKBONE, DETECTOR, make_workspace, manifest

from regionprep import captioning, cli, models, workspace
from regionprep.evaluation import metrics
from regionprep.training import train

torch.set_num_threads(1)
captioning.BATCH = 3
root = Path(sys.argv[1])


def die_at(owner, name, count):
    act = getattr(owner, name)

    def counted(*given, **options):
        nonlocal count
        count -= 1
        if not count:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*given, **options)

    setattr(owner, name, counted)


def killed(command, folder, *death):
    child = os.fork()
    if not child:
        if death:
            die_at(*death)
        try:
            cli.app(["-w", str(folder), command, "--split", "val"])
        except SystemExit as ended:
            os._exit(ended.code)
        os._exit(3)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def try_all(command, product, deaths):
    before = root / f"before-{command}"
    assert not killed(command, shutil.copytree(before, root / command / "never"))
    for moment, death in deaths.items():
        folder = shutil.copytree(before, root / command / moment)
        assert killed(command, folder, *death), f"{command} not killed at {moment}"
        there = (folder / "runs/tiny" / product).exists()
        assert there == (moment == "end"), f"{command} killed at {moment}: {product} there: {there}"
        assert not killed(command, folder)


here = make_workspace(root / "before-caption", train=8, val=8)
train(here, manifest(epochs=1), name="tiny", detector=DETECTOR, backbone=BACKBONE, device="cpu",
      progress=False)
writing = {
    "write": (workspace.os, "fsync", 1),
    "rename": (Path, "replace", 1),
    "end": (workspace, "sync_folder", 1),
}
try_all("caption", "captions-val.json", {
    "first-batch": (models, "beam_search", 1), "last-batch": (models, "beam_search", 3), **writing
})
shutil.copytree(root / "caption/never", root / "before-evaluate")
try_all("evaluate", "scores-val.json", {
    "bleu": (metrics, "bleu", 1), "cider": (metrics, "cider", 1), **writing
})
"""


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of workspaces that nobody disturbed, and of those that were."""
    root = tmp_path_factory.mktemp("killed")
    program = [sys.executable, "-W", "error", "-c", PROGRAM, str(root)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=TRAINING, check=False)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "moment"),
    [(command, moment) for command, moments in MOMENTS.items() for moment in moments],
)
def test_a_killed_command_given_again_writes_the_same_bytes(
    workspaces: Path, command: str, moment: str
) -> None:
    undisturbed = contents(workspaces / command / "never")
    assert {"runs/tiny/captions-val.json", "runs/tiny/config.yaml"} <= undisturbed.keys()
    assert contents(workspaces / command / moment) == undisturbed


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its path there."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
