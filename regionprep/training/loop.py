"""The training loop: forward, loss, step, log, save.

All that chance decides comes from the seed: weights and dropout from torch's random state, which
checkpoints keep; order and choice of captions from (seed, epoch). So a run that was killed and
goes on ends with the weights of one that was not, bit for bit on a CPU with as many threads.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.optim import AdamW

from regionprep.errors import InputError, TrainingError, unknown
from regionprep.manifests import ModelManifest, TrainingRecipe, parse
from regionprep.models import beam_search
from regionprep.pipeline.claim import claimed, terminable
from regionprep.pipeline.devices import choose_device
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.vocab import Vocabulary, load_vocabulary
from regionprep.training import checkpoints
from regionprep.training.batches import Batch, Data, Epoch, open_data, require_own_boxes
from regionprep.training.checkpoints import Progress
from regionprep.training.journal import Journal
from regionprep.training.losses import cross_entropy
from regionprep.training.runs import (
    FAILURE,
    FINISHED,
    METRICS,
    Precision,
    RunConfig,
    begin,
    build_model,
    checkpoint_path,
    resolve,
    versions,
)
from regionprep.training.schedules import schedule
from regionprep.workspace import Workspace, write_text

Score = Callable[[dict[str, list[str]]], Mapping[str, float]]
"""From the words of a caption by image id to figures by name; higher is better."""


def train(
    workspace: Workspace,
    manifest: ModelManifest,
    *,
    detector: str,
    backbone: str,
    preset: str = "base",
    name: str | None = None,
    seed: int = 0,
    epochs: int | None = None,
    batch_images: int | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: Precision = "32-true",
    score: Score | None = None,
    select_by: str | None = None,
    beam_size: int = 3,
    workers: int | None = None,
    log_every: int = 10,
    checkpoint_every: int = 1000,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Train a captioner and return its run's folder; a run that was stopped goes on.

    After every epoch the captions of val, by a beam of `beam_size`, go to `score`. The checkpoint
    that is best by `select_by` is kept: by a figure of `score` ("cider_d"), or by the "loss" on
    val, the default without `score`. `workers` read batches ahead; on a CPU none do by default,
    since reading takes less than handing over. A checkpoint is written every `checkpoint_every`
    steps and after every epoch.

    Raises MissingError, InputError or MismatchError for data that are incomplete or do not belong
    together, before anything is written; MismatchError where the name is another configuration's,
    unless `force` starts over; BusyError while another process trains the run; TrainingError when
    loss or gradient are not finite or memory runs out.
    """
    store = FeatureStore(workspace.features(detector, backbone))
    vocabulary = load_vocabulary(workspace)
    boxes = require_own_boxes(workspace, store, detector)
    model = resolve(manifest, preset, epochs=epochs, batch_images=batch_images)
    chosen = {
        "name": name or (manifest.name if preset == "base" else f"{manifest.name}-{preset}"),
        "model": model,
        "preset": preset,
        "dataset": vocabulary.dataset,
        "detector": detector,
        "backbone": backbone,
        "features": store.fingerprint,
        "boxes": boxes,
        "feature_width": store.feature_width,
        "vocabulary": vocabulary.fingerprint,
        "vocabulary_size": vocabulary.size,
        "max_length": vocabulary.max_length,
        "seed": seed,
        "precision": precision,
        "max_steps": max_steps,
        "select_by": select_by or ("cider_d" if score else "loss"),
        "beam_size": beam_size,
        "versions": versions(),
    }
    config = parse(RunConfig, chosen, where="the run's configuration")
    data = open_data(
        workspace,
        store,
        vocabulary,
        captions_per_image=model.training.captions_per_image,
        seed=seed,
    )
    folder = workspace.run(config.name)
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder), terminable():
        begin(folder, config, vocabulary, force=force)
        options = Options(device, workers, log_every, checkpoint_every, progress)
        if not (folder / FINISHED).exists():
            with _memory_fault_explained(model.training.batch_images):
                Trainer(config, folder, data, vocabulary, score, options).fit()
        elif progress:
            print(f"run {config.name} is finished: nothing to do", file=sys.stderr)
    return folder


@dataclass(frozen=True)
class Options:
    """How a run is done; none of it changes what comes out, but for the device's rounding."""

    device: str = "auto"
    workers: int | None = None
    log_every: int = 10
    checkpoint_every: int = 1000
    progress: bool = True


class TeacherForcing(nn.Module):
    """A captioner as Fabric calls it: from a batch to the logits of its targets."""

    def __init__(self, captioner: nn.Module) -> None:
        super().__init__()
        self.captioner = captioner

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits (b, c, t, v) of the batch's targets."""
        logits: Tensor = self.captioner(batch.regions, batch.inputs)
        return logits


class Trainer:
    """A run under way."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        data: Data,
        vocabulary: Vocabulary,
        score: Score | None,
        options: Options,
    ) -> None:
        self.config, self.folder, self.data = config, folder, data
        self.vocabulary, self.score, self.options = vocabulary, score, options
        self.recipe: TrainingRecipe = config.model.training
        self.epoch_steps = -(-len(data.train) // self.recipe.batch_images)
        self.steps = min(self.recipe.epochs * self.epoch_steps, config.max_steps or sys.maxsize)
        self.rate_at = schedule(self.recipe, steps_per_epoch=self.epoch_steps)
        self.journal = Journal(
            folder / METRICS,
            steps=self.steps,
            epochs=self.recipe.epochs,
            every=options.log_every,
            shown=options.progress,
        )
        self._set_up(choose_device(options.device))
        self.progress = self._resume()

    def fit(self) -> None:
        """Train until the end, epoch by epoch."""
        with self.journal.open(step=self.progress.step), self._interruption_explained():
            self._introduce()
            while self.progress.step < self.steps:
                self._train_epoch()
                self._end_epoch()
        self._finish()

    def _train_epoch(self) -> None:
        """Do what is left of an epoch."""
        progress, recipe = self.progress, self.recipe
        for batch, waited in _timed(self._batches()):
            began = time.perf_counter()
            rate = self._set_rate(progress.step + 1)
            loss = cross_entropy(
                self.model(batch),
                batch.targets,
                pad=self.vocabulary.pad,
                label_smoothing=recipe.label_smoothing,
            )
            self.fabric.backward(loss)
            norm, value = self._clip_gradients(), loss.item()
            self._require_finite(value, norm, rate, batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            progress.count(value, batch.tokens)
            seconds = waited + time.perf_counter() - began
            self.journal.step(
                step=progress.step,
                epoch=progress.epoch + 1,
                rate=rate,
                figures={
                    "loss_sum": value * batch.tokens,
                    "tokens": batch.tokens,
                    "gradient_norm": norm,
                    "seconds": seconds,
                    "data_seconds": waited,
                },
            )
            if self._is_due():
                self._save("last")

    def _end_epoch(self) -> None:
        """Validate, and keep the checkpoint: as the last, and as the best where it is."""
        progress = self.progress
        figures = {"train_loss": progress.epoch_loss / progress.epoch_tokens} | self._validate()
        best = self._is_best(figures)
        if best:
            progress.best = figures.get(f"val_{self.config.select_by}")
            progress.best_epoch = progress.epoch
        self.journal.epoch(step=progress.step, epoch=progress.epoch + 1, figures=figures, best=best)
        progress.next_epoch()
        # The best first: killed in between, the epoch is done again and both are written.
        self._save(*(["best"] if best else []), "last")

    @torch.inference_mode()
    def _validate(self) -> dict[str, float]:
        """Return the loss on the captions of val, and the figures of captions for its images."""
        if self.data.val is None:
            return {}
        captions: dict[str, list[str]] = {}
        loss, tokens = 0.0, 0
        self.model.eval()
        for batch in self._load(Epoch(self.data.val, 0, self.recipe.batch_images, shuffle=False)):
            with self.fabric.autocast():
                batch_loss = cross_entropy(
                    self.model(batch), batch.targets, pad=self.vocabulary.pad
                )
                captions |= self._caption(batch) if self.score else {}
            loss += batch_loss.item() * batch.tokens
            tokens += batch.tokens
        self.model.train()
        scores = dict(self.score(captions)) if self.score else {}
        return {f"val_{name}": value for name, value in ({"loss": loss / tokens} | scores).items()}

    def _caption(self, batch: Batch) -> dict[str, list[str]]:
        """Return the words of the best caption of each image."""
        found = beam_search(
            self.captioner,
            batch.regions,
            beam_size=self.config.beam_size,
            forbidden=[self.vocabulary.unk],
        )
        words = (self.vocabulary.decode(best[0].tokens) for best in found)
        return dict(zip(batch.image_ids, words, strict=True))

    def _is_best(self, figures: Mapping[str, float]) -> bool:
        """Tell whether an epoch is the best so far; without val every epoch is."""
        chosen, best = f"val_{self.config.select_by}", self.progress.best
        if figures.keys() != {"train_loss"} and chosen not in figures:
            known = [name.removeprefix("val_") for name in figures if name.startswith("val_")]
            raise InputError(unknown("metric", self.config.select_by, known))
        if not all(map(math.isfinite, figures.values())):
            self._fail(f"the figures of epoch {self.progress.epoch + 1} are not finite", figures)
        if best is None or chosen not in figures:
            return True
        return figures[chosen] < best if chosen == "val_loss" else figures[chosen] > best

    def _set_up(self, device: torch.device) -> None:
        """Make the model and its optimiser from the seed, and put them under Fabric."""
        recipe = self.recipe
        torch.manual_seed(self.config.seed)
        self.captioner = build_model(self.config, self.vocabulary)
        # `fused` is one call for all parameters, on the CPU as well as on a GPU.
        optimizer = AdamW(
            self.captioner.parameters(),
            lr=recipe.learning_rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        index = [device.index or 0] if device.type == "cuda" else 1
        self.fabric = Fabric(
            accelerator=device.type, devices=index, precision=self.config.precision
        )
        self.model, self.optimizer = self.fabric.setup(TeacherForcing(self.captioner), optimizer)
        self.model.train()

    def _resume(self) -> Progress:
        """Return where training stands, with the state of the furthest whole checkpoint."""
        files = [checkpoint_path(self.folder, name) for name in ("last", "best")]
        found, faults = checkpoints.load_furthest(files, expected=self.config.binding())
        for fault in faults:
            self.journal.say(f"passed over: {fault}")
        if found is None:
            return Progress()
        checkpoints.restore(found, self.captioner, self.optimizer)
        if found.progress.scaler:
            self.fabric.strategy.precision.load_state_dict(found.progress.scaler)
        return found.progress

    def _save(self, *names: str) -> None:
        self.progress.scaler = self.fabric.strategy.precision.state_dict()
        checkpoints.save(
            [checkpoint_path(self.folder, name) for name in names],
            checkpoints.capture(self.captioner, self.optimizer),
            self.progress,
            self.config.binding(),
        )

    def _is_due(self) -> bool:
        """Tell whether to save in the middle of an epoch; its end saves anyway."""
        step, batch = self.progress.step, self.progress.batch
        ends = batch == self.epoch_steps or step == self.steps
        return step % self.options.checkpoint_every == 0 and not ends

    def _batches(self) -> Iterator[Batch]:
        """Return what is left of the epoch, or of the steps."""
        epoch = Epoch(self.data.train, self.progress.epoch, self.recipe.batch_images, shuffle=True)
        left = self.steps - self.progress.step
        return islice(self._load(epoch, start=self.progress.batch), left)

    def _load(self, epoch: Epoch, *, start: int = 0) -> Iterator[Batch]:
        gpu = self.fabric.device.type == "cuda"
        workers = self.options.workers
        if workers is None:
            workers = min(4, os.cpu_count() or 1) if gpu else 0
        for batch in epoch.loader(start=start, workers=workers, pin=gpu):
            yield batch.to(self.fabric.device)

    def _set_rate(self, step: int) -> float:
        rate = self.rate_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _clip_gradients(self) -> float:
        """Return the norm of all gradients, after clipping them as the recipe says."""
        norm = self.fabric.clip_gradients(
            self.model,
            self.optimizer,
            max_norm=self.recipe.clip_norm or math.inf,
            error_if_nonfinite=False,
        )
        if self.recipe.clip_value:
            nn.utils.clip_grad_value_(self.captioner.parameters(), self.recipe.clip_value)
        assert norm is not None, "a norm was asked for"
        return norm.item()

    def _require_finite(self, loss: float, norm: float, rate: float, batch: Batch) -> None:
        """Stop before an update that would spoil the weights."""
        # A loss scale is found by overflows: those steps are left out by the scaler.
        overflow_is_normal = self.config.precision == "16-mixed"
        if math.isfinite(loss) and (math.isfinite(norm) or overflow_is_normal):
            return
        figures = {"loss": loss, "gradient_norm": norm, "rate": rate}
        self._fail(f"loss {loss}, norm of the gradients {norm}", figures, batch.image_ids)

    def _fail(
        self, what: str, figures: Mapping[str, float], image_ids: Sequence[str] = ()
    ) -> NoReturn:
        """Write down what went wrong and raise TrainingError."""
        step, epoch = self.progress.step + 1, self.progress.epoch + 1
        told = {name: str(value) for name, value in figures.items()}
        record = {"step": step, "epoch": epoch, **told, "image_ids": list(image_ids)}
        write_text(self.folder / FAILURE, json.dumps(record, indent=1) + "\n")
        raise TrainingError(
            f"{what} at step {step}, in epoch {epoch}, at a rate of {self.rate_at(step):.3g}; the "
            f"images of the batch are in {FAILURE}, the last checkpoint is kept",
            where=self.folder,
            mend="Look at those images' features, or train anew (--force) with a lower "
            "learning_rate or a clip_norm in the model's manifest.",
        )

    def _introduce(self) -> None:
        data, parameters = self.data, sum(p.numel() for p in self.captioner.parameters())
        failed = len(data.train.failed) + (len(data.val.failed) if data.val else 0)
        left_out = f", {failed:,} left out for their features have failed" if failed else ""
        self.journal.say(
            f"{self.config.name}: {parameters / 1e6:.2f} M parameters on {self.fabric.device}, "
            f"{len(data.train):,} images to train on{left_out}"
        )
        if data.val is None:
            self.journal.say("there is no val split: the last epoch counts as the best")
        if self.progress.step:
            self.journal.say(f"going on after step {self.progress.step:,} of {self.steps:,}")

    def _finish(self) -> None:
        progress = self.progress
        record = {
            "steps": progress.step,
            "epochs": progress.epoch,
            "best_epoch": (progress.best_epoch or 0) + 1,
            self.config.select_by: progress.best,
        }
        (self.folder / FAILURE).unlink(missing_ok=True)
        write_text(self.folder / FINISHED, json.dumps(record, indent=1) + "\n")

    @contextmanager
    def _interruption_explained(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            saved = checkpoint_path(self.folder, "last")
            kept = checkpoints.load(saved).progress.step if saved.exists() else 0
            print(
                f"stopped at step {self.progress.step:,} of {self.steps:,}; the same command goes "
                f"on after step {kept:,}, the last that is saved",
                file=sys.stderr,
                flush=True,
            )
            raise


@contextmanager
def _memory_fault_explained(batch_images: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU has no room for a batch of {batch_images} images",
            mend=f"Try --batch-images {max(1, batch_images // 2)} under another --name.",
        ) from error


def _timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Give each batch with the seconds that it was waited for."""
    began = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - began
        began = time.perf_counter()
