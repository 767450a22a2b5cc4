"""Checkpoints: all that the next step needs, in one file that is there whole or not at all.

A file is safetensors: the tensors, and in its header, as JSON, the position, what the weights
belong to, and a checksum. One file, since two cannot be renamed at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from regionprep.errors import MismatchError, StorageError
from regionprep.workspace import write_bytes

VERSION = "1"


@dataclass
class Progress:
    """Where training stands: `batch` batches of epoch `epoch` are done, `step` updates in all.

    `epoch` counts from 0, the losses (nats, summed) and tokens are those of the epoch so far, and
    `scaler` is what a low precision needs to go on with its loss scale.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    epoch_loss: float = 0.0
    epoch_tokens: int = 0
    best: float | None = None
    best_epoch: int | None = None
    scaler: dict[str, Any] = field(default_factory=dict)

    def count(self, loss: float, tokens: int) -> None:
        """Take one more batch of this epoch."""
        self.step += 1
        self.batch += 1
        self.epoch_loss += loss * tokens
        self.epoch_tokens += tokens

    def next_epoch(self) -> None:
        """Stand at the beginning of the next epoch."""
        self.epoch += 1
        self.batch = 0
        self.epoch_loss, self.epoch_tokens = 0.0, 0


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint, where training stood, and what it belongs to."""

    tensors: dict[str, Tensor]
    progress: Progress
    belongs: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """Return the model's weights by their names in the model."""
        return _below("model.", self.tensors)


def capture(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the weights, the optimiser's state and the random states as named tensors."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{names[index]}.{key}": value for key, value in state.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    """Set the weights, the optimiser's state and the random states to those of `capture`."""
    take_weights(model, checkpoint, where="the run's checkpoint")
    state = optimizer.state_dict()
    state["state"] = {
        index: _below(f"optimizer.{name}.", checkpoint.tensors)
        for index, (name, _) in enumerate(model.named_parameters())
    }
    optimizer.load_state_dict(state)
    torch.set_rng_state(checkpoint.tensors["random.cpu"])
    if "random.cuda" in checkpoint.tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(checkpoint.tensors["random.cuda"])


def save(
    paths: Iterable[Path],
    tensors: Mapping[str, Tensor],
    progress: Progress,
    belongs: Mapping[str, Any],
) -> None:
    """Write one checkpoint to each of `paths`, in their order.

    `belongs` names what the weights fit: the vocabulary's fingerprint, the features' width, the
    model's configuration. Raises StorageError when the disk is full or cannot be written.
    """
    # Copies, since safetensors refuses tensors that share memory, as tied weights do.
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    header = {
        "version": VERSION,
        "progress": json.dumps(asdict(progress)),
        "belongs": json.dumps(dict(belongs)),
        "sha256": checksum(whole),
    }
    data = safetensors.torch.save(whole, metadata=header)
    for path in paths:
        write_bytes(path, data)


ANEW = "Give another --name, or start this run over with --force."


def take_weights(model: nn.Module, saved: Checkpoint, *, where: object, mend: str = ANEW) -> None:
    """Set a model's weights; MismatchError where they are those of another layout of the model."""
    try:
        model.load_state_dict(saved.weights())
    except RuntimeError as error:
        raise MismatchError(
            "the weights are laid out for another version of this model", where=where, mend=mend
        ) from error


def load(path: Path, *, expected: Mapping[str, Any] | None = None, mend: str = ANEW) -> Checkpoint:
    """Return a whole checkpoint, its checksum verified.

    Raises StorageError when the file is torn or altered, MismatchError when it belongs to
    something else than `expected`.
    """
    header, tensors = _read(path)
    if checksum(tensors) != header["sha256"]:
        raise StorageError("the checkpoint's values differ from its checksum", where=path)
    belongs = json.loads(header["belongs"])
    if expected is not None:
        require_same(expected, belongs, where=path, mend=mend)
    return Checkpoint(tensors, Progress(**json.loads(header["progress"])), belongs)


def load_furthest(
    paths: Iterable[Path], *, expected: Mapping[str, Any]
) -> tuple[Checkpoint | None, list[StorageError]]:
    """Return the checkpoint that got furthest, or None, and the faults of those passed over.

    Raises MismatchError when one that can be read belongs to something else than `expected`.
    """
    whole, faults = [], []
    for path in paths:
        if not path.exists():
            continue
        try:
            whole.append(load(path, expected=expected))
        except StorageError as fault:
            faults.append(fault)
    furthest = max(whole, key=lambda one: (one.progress.step, one.progress.epoch), default=None)
    return furthest, faults


def require_same(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    where: object,
    mend: str = ANEW,
) -> None:
    """Raise MismatchError that lists what differs, nested names joined by dots."""
    differing = list(differences(expected, found))
    if differing:
        raise MismatchError(
            "belongs to something else: " + "; ".join(differing), where=where, mend=mend
        )


def differences(expected: Any, found: Any, place: str = "") -> Iterator[str]:  # noqa: ANN401
    """Yield a line for each value in which two nested mappings differ."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted(expected.keys() | found.keys(), key=str):
            inner = f"{place}.{key}" if place else str(key)
            yield from differences(expected.get(key), found.get(key), inner)
    elif expected != found:
        yield f"{place} is {_shown(found)} there and {_shown(expected)} now"


def _shown(value: object) -> str:
    """Return a value as text, of a fingerprint its first digits."""
    return repr(value[:12]) if isinstance(value, str) and len(value) == 64 else repr(value)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return a checkpoint's header and tensors, or raise what is wrong with the file."""
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StorageError(
            f"the checkpoint is torn: {error}",
            where=path,
            mend="Give the run's `prep train` command again: it goes on from what is whole.",
        ) from error
    if not header.keys() >= {"version", "progress", "belongs", "sha256"}:
        raise StorageError("no checkpoint: its header lacks what one has", where=path)
    if header["version"] != VERSION:
        raise MismatchError(
            f"the checkpoint has format version {header['version']}, this program reads {VERSION}",
            where=path,
            mend="Use the version of regionprep that wrote it, or train anew with --force.",
        )
    return header, tensors


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
