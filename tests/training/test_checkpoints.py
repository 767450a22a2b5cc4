"""Checkpoints: whole or not at all, and never of another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from regionprep import workspace
from regionprep.errors import MismatchError, StorageError
from regionprep.training import checkpoints
from regionprep.training.checkpoints import Checkpoint, Progress, take_weights

BELONGS = {"vocabulary": "abc", "feature_width": 4, "arguments": {"width": 8, "heads": 2}}


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(path: Path, *, progress: Progress | None = None, steps: int = 2) -> Path:
    model, optimizer = make()
    for _ in range(steps):
        step(model, optimizer)
    tensors = checkpoints.capture(model, optimizer)
    checkpoints.save([path], tensors, progress or Progress(), BELONGS)
    return path


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model, optimizer = make()
    for _ in range(2):
        step(model, optimizer)
    path = tmp_path / "one.safetensors"
    checkpoints.save([path], checkpoints.capture(model, optimizer), Progress(step=2), BELONGS)
    for _ in range(2):
        step(model, optimizer)

    other, its_optimizer = make(seed=1)
    checkpoints.restore(checkpoints.load(path), other, its_optimizer)
    for _ in range(2):
        step(other, its_optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_progress_comes_back_exactly(tmp_path: Path) -> None:
    progress = Progress(7, 1, 3, epoch_loss=0.1 + 0.2, epoch_tokens=9, best=1 / 3, best_epoch=0)
    path = saved(tmp_path / "one.safetensors", progress=progress)
    assert checkpoints.load(path).progress == progress


def test_tied_weights_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "one.safetensors"
    checkpoints.save([path], checkpoints.capture(model, optimizer), Progress(), BELONGS)
    weights = checkpoints.load(path).weights()
    assert torch.equal(weights["0.weight"], weights["1.weight"])


@pytest.mark.parametrize("kept", [0, 7, 100, 0.5, -8, -1])
def test_a_torn_file_is_recognised(tmp_path: Path, kept: float) -> None:
    path = saved(tmp_path / "one.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(StorageError, match=r"one\.safetensors: the checkpoint is torn"):
        checkpoints.load(path)


def test_one_flipped_bit_is_recognised(tmp_path: Path) -> None:
    path = saved(tmp_path / "one.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    with pytest.raises(StorageError, match="differ from its checksum"):
        checkpoints.load(path)


def test_another_safetensors_file_is_no_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(StorageError, match="no checkpoint"):
        checkpoints.load(tmp_path / "other.safetensors")


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "one.safetensors")
    monkeypatch.setattr(checkpoints, "VERSION", "2")
    with pytest.raises(MismatchError, match="format version 1, this program reads 2"):
        checkpoints.load(path)


def test_what_belongs_to_something_else_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = saved(tmp_path / "one.safetensors")
    expected = BELONGS | {"vocabulary": "xyz", "arguments": {"width": 16, "heads": 2}}
    with pytest.raises(MismatchError) as refusal:
        checkpoints.load(path, expected=expected)
    assert "vocabulary is 'abc' there and 'xyz' now" in str(refusal.value)
    assert "arguments.width is 8 there and 16 now" in str(refusal.value)
    assert "heads" not in str(refusal.value)


def test_the_furthest_whole_checkpoint_is_taken_and_torn_ones_are_told(tmp_path: Path) -> None:
    best = saved(tmp_path / "best.safetensors", progress=Progress(step=4))
    last = saved(tmp_path / "last.safetensors", progress=Progress(step=6))
    both = [last, best, tmp_path / "absent.safetensors"]
    found, faults = checkpoints.load_furthest(both, expected=BELONGS)
    assert (found.progress.step, faults) == (6, [])
    last.write_bytes(last.read_bytes()[:-1])
    found, faults = checkpoints.load_furthest(both, expected=BELONGS)
    assert found.progress.step == 4
    assert [fault.where for fault in faults] == [last]


def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "one.safetensors", progress=Progress(step=1))
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workspace.os, "fsync", fail)
    with pytest.raises(StorageError, match=r"one\.safetensors: .*No space left"):
        saved(path, progress=Progress(step=2))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_weights_of_another_layout_are_refused() -> None:
    saved = Checkpoint({"model.other": torch.zeros(1)}, Progress(), {})
    with pytest.raises(MismatchError, match="another version of this model"):
        take_weights(torch.nn.Linear(1, 1), saved, where="there")
