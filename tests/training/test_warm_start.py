"""Pretrained weights are taken over once, when a run is new."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import BACKBONE, DETECTOR, manifest

from regionprep.errors import MissingError
from regionprep.models import CAPTIONERS
from regionprep.training import load_run, train
from regionprep.workspace import Workspace


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows with every start; a start sets the output's bias to 3."""
    counted: list[str] = []

    def warm_start(self) -> None:
        counted.append("started")
        self.output.bias.data.fill_(3.0)

    monkeypatch.setattr(CAPTIONERS["transformer"], "warm_start", warm_start)
    return counted


def fit(workspace: Workspace, **options) -> Path:
    given = {"detector": DETECTOR, "backbone": BACKBONE, "device": "cpu", "progress": False}
    recipe = {"epochs": 1, "learning_rate": 1e-6}
    return train(workspace, manifest(**recipe), **(given | options))


def test_a_new_run_starts_from_pretrained_weights(workspace: Workspace, starts: list[str]):
    folder = fit(workspace)
    assert len(starts) == 1
    run = load_run(folder, "cpu")
    assert run.model.output.bias.mean().item() == pytest.approx(3.0, abs=1e-3)
    assert len(starts) == 1


def test_a_run_that_goes_on_does_not_start_again(workspace: Workspace, starts: list[str]):
    folder = fit(workspace, max_steps=4)
    (folder / "finished.json").unlink()
    fit(workspace, max_steps=4)
    assert len(starts) == 1


def test_a_run_that_is_started_over_starts_again(workspace: Workspace, starts: list[str]):
    fit(workspace, max_steps=2)
    fit(workspace, max_steps=2, force=True)
    assert len(starts) == 2


def test_a_start_that_fails_does_not_block_the_name(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    def missing(self) -> None:
        raise MissingError("the pretrained weights cannot be had")

    with monkeypatch.context() as patch, pytest.raises(MissingError, match="cannot be had"):
        patch.setattr(CAPTIONERS["transformer"], "warm_start", missing)
        fit(workspace, max_steps=2)
    folder = fit(workspace, max_steps=2, seed=5)
    assert load_run(folder, "cpu").config.seed == 5


def test_a_finished_run_is_not_cleared_for_a_model_that_cannot_start(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
):
    def missing(self) -> None:
        raise MissingError("the pretrained weights cannot be had")

    folder = fit(workspace, max_steps=2)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(CAPTIONERS["transformer"], "warm_start", missing)
    with pytest.raises(MissingError, match="cannot be had"):
        fit(workspace, max_steps=2, force=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
