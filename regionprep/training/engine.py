"""A captioner and its optimiser under Lightning Fabric: device, precision, one update."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from regionprep.manifests import TrainingRecipe
from regionprep.models import Captioner, Criterion
from regionprep.training import checkpoints
from regionprep.training.batches import Batch, Epoch
from regionprep.training.checkpoints import Checkpoint
from regionprep.training.runs import Precision


class TeacherForcing(nn.Module):
    """A captioner as Fabric calls it: from a batch to its loss."""

    def __init__(self, captioner: Captioner[Any, Any]) -> None:
        super().__init__()
        self.captioner = captioner

    def forward(self, batch: Batch, criterion: Criterion) -> Tensor:
        """Return the loss to train on; in evaluation the criterion alone, which models share."""
        if self.training:
            return self.captioner.loss(batch.regions, batch.inputs, batch.targets, criterion)
        return criterion(self.captioner(batch.regions, batch.inputs), batch.targets)


class Engine:
    """What an update needs. `model(batch, criterion)` gives a loss; `captioner` is for decoding."""

    def __init__(
        self,
        captioner: Captioner[Any, Any],
        recipe: TrainingRecipe,
        *,
        device: torch.device,
        precision: Precision = "32-true",
        workers: int | None = None,
    ) -> None:
        # Takes as long to import as torch, and who only opens a run does not need it.
        from lightning_fabric import Fabric

        self.captioner, self.recipe, self.precision = captioner, recipe, precision
        self.device, self.workers = device, workers
        # `fused` is one call for all parameters, on the CPU as well as on a GPU.
        optimizer = AdamW(
            captioner.parameters(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        devices = [device.index or 0] if device.type == "cuda" else 1
        self.fabric = Fabric(accelerator=device.type, devices=devices, precision=precision)
        self.model, self.optimizer = self.fabric.setup(TeacherForcing(captioner), optimizer)
        self.model.train()

    def load(self, epoch: Epoch, *, start: int = 0) -> Iterator[Batch]:
        """Give the batches of an epoch from number `start` on, on the device."""
        gpu = self.device.type == "cuda"
        workers = self.workers
        if workers is None:
            # On a CPU reading a batch takes less time than handing it over.
            workers = min(4, os.cpu_count() or 1) if gpu else 0
        for batch in epoch.loader(start=start, workers=workers, pin=gpu):
            yield batch.to(self.device)

    def backward(self, loss: Tensor) -> float:
        """Compute the gradients, clip them as the recipe says; return their norm before that."""
        self.fabric.backward(loss)
        norm = self.fabric.clip_gradients(
            self.model,
            self.optimizer,
            max_norm=self.recipe.clip_norm or math.inf,
            error_if_nonfinite=False,
        )
        assert norm is not None, "a norm was asked for"
        if self.recipe.clip_value:
            nn.utils.clip_grad_value_(self.captioner.parameters(), self.recipe.clip_value)
        return norm.item()

    def update(self, rate: float) -> None:
        """Change the weights by their gradients at a rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def survives(self, *, loss: float, norm: float) -> bool:
        """Tell whether an update would leave the weights numbers."""
        # A loss scale is found by overflows, and the scaler leaves those steps out.
        return math.isfinite(loss) and (math.isfinite(norm) or self.precision == "16-mixed")

    def capture(self) -> dict[str, Tensor]:
        """Return all tensors that a checkpoint keeps."""
        return checkpoints.capture(self.captioner, self.optimizer)

    def scaler(self) -> dict[str, Any]:
        """Return the state of the loss scale, empty where the precision has none."""
        return dict(self.fabric.strategy.precision.state_dict())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a checkpoint was captured."""
        checkpoints.restore(checkpoint, self.captioner, self.optimizer)
        if checkpoint.progress.scaler:
            self.fabric.strategy.precision.load_state_dict(checkpoint.progress.scaler)
