"""metrics.jsonl: a JSON object a line, whatever became of the run before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from regionprep.training.journal import Journal, read_metrics


def journal(file: Path, **options: Any) -> Journal:
    return Journal(file, **({"steps": 6, "epochs": 2, "every": 2, "shown": False} | options))


def tell(to: Journal, step: int, *, loss: float = 2.0, tokens: int = 10) -> None:
    to.step(
        step=step,
        epoch=1,
        rate=1e-3,
        loss=loss,
        gradient_norm=0.5 * step,
        tokens=tokens,
        seconds=0.5,
        waited=0.1,
    )


def test_step_lines_hold_means_over_the_steps_since_the_last(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    ours = journal(file)
    with ours.open(step=0):
        tell(ours, 1, loss=1.0, tokens=30)
        tell(ours, 2, loss=5.0, tokens=10)
        tell(ours, 3)
    assert read_metrics(file) == [
        {
            "event": "step",
            "step": 2,
            "epoch": 1,
            "loss": 2.0,
            "rate": 1e-3,
            "gradient_norm": 1.0,
            "tokens_per_s": 40.0,
            "data_share": 0.2,
        }
    ]


def test_epoch_lines_hold_the_figures_of_the_validation(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    ours = journal(file)
    with ours.open(step=0):
        ours.epoch(step=3, epoch=1, figures={"train_loss": 1.5, "val_cider_d": 0.7}, best=True)
    (line,) = read_metrics(file)
    assert line.pop("seconds") >= 0
    assert line == {
        "event": "epoch",
        "step": 3,
        "epoch": 1,
        "train_loss": 1.5,
        "val_cider_d": 0.7,
    }


def test_lines_of_steps_that_are_done_again_are_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    ours = journal(file, every=1)
    with ours.open(step=0):
        for step in (1, 2, 3):
            tell(ours, step)
    ours = journal(file, every=1)
    with ours.open(step=2):
        tell(ours, 3, loss=9.0)
    assert [(line["step"], line["loss"]) for line in read_metrics(file)] == [(1, 2), (2, 2), (3, 9)]


def test_a_line_that_was_never_finished_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_metrics(file) == [{"step": 1}]
    with journal(file).open(step=5):
        pass
    assert file.read_text() == '{"step": 1}\n'


def test_plain_lines_are_printed_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = journal(tmp_path / "metrics.jsonl", shown=True)
    with ours.open(step=0):
        tell(ours, 1)
        ours.epoch(step=3, epoch=1, figures={"train_loss": 1.5}, best=True)
    told = capsys.readouterr().err
    assert told.startswith("epoch 1/2: train_loss 1.5, ")
    assert told.endswith("s (best)\n")
