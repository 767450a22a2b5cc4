"""The training loop: forward, loss, step, log, save.

All that chance decides comes from the seed: weights and dropout from torch's random state, which
checkpoints keep; order and choice of captions from (seed, epoch). So a run that was killed and
goes on ends with the weights of one that was not, bit for bit on a CPU with as many threads.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from regionprep.errors import InputError, TrainingError, unknown
from regionprep.manifests import ModelManifest, parse
from regionprep.models import Captioner
from regionprep.pipeline.claim import claimed, terminable
from regionprep.pipeline.devices import choose_device
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.vocab import Vocabulary, load_vocabulary
from regionprep.training import checkpoints
from regionprep.training.batches import (
    Batch,
    CaptionedImages,
    Data,
    Epoch,
    open_data,
    require_own_boxes,
)
from regionprep.training.checkpoints import Progress
from regionprep.training.engine import Engine
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
    has_trained,
    resolve,
    versions,
)
from regionprep.training.schedules import schedule
from regionprep.training.validation import Score, validate
from regionprep.workspace import Workspace, make_folder, write_text


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
        "grid": store.grid,
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
    # What does not fit is told before anything is written: a model, weights, a device.
    chosen_device = choose_device(device)
    torch.manual_seed(seed)
    captioner = build_model(config, vocabulary)
    data = open_data(
        workspace,
        store,
        vocabulary,
        captions_per_image=model.training.captions_per_image,
        seed=seed,
    )
    folder = workspace.run(config.name)
    if force or not has_trained(folder):
        captioner.warm_start()
    make_folder(folder)
    with claimed(folder), terminable():
        begin(folder, config, vocabulary, force=force)
        options = Options(chosen_device, workers, log_every, checkpoint_every, progress)
        if not (folder / FINISHED).exists():
            with _memory_fault_explained(model.training.batch_images):
                Trainer(config, folder, data, vocabulary, captioner, score, options).fit()
        elif progress:
            print(f"run {config.name} is finished: nothing to do", file=sys.stderr)
    return folder


@dataclass(frozen=True)
class Options:
    """How a run is done; none of it changes what comes out, but for the device's rounding."""

    device: torch.device
    workers: int | None = None
    log_every: int = 10
    checkpoint_every: int = 1000
    progress: bool = True


class Trainer:
    """A run under way."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        data: Data,
        vocabulary: Vocabulary,
        captioner: Captioner[Any, Any],
        score: Score | None,
        options: Options,
    ) -> None:
        self.config, self.folder, self.data = config, folder, data
        self.vocabulary, self.score, self.options = vocabulary, score, options
        self.recipe = config.model.training
        self.epoch_steps = len(self._epoch(0))
        self.steps = min(self.recipe.epochs * self.epoch_steps, config.max_steps or sys.maxsize)
        self.rate_at = schedule(self.recipe, steps_per_epoch=self.epoch_steps)
        self.criterion = partial(
            cross_entropy, pad=vocabulary.pad, label_smoothing=self.recipe.label_smoothing
        )
        self.journal = Journal(
            folder / METRICS,
            steps=self.steps,
            epochs=self.recipe.epochs,
            every=options.log_every,
            shown=options.progress,
        )
        self.engine = Engine(
            captioner,
            self.recipe,
            device=options.device,
            precision=config.precision,
            workers=options.workers,
        )
        self.progress = self._resume()
        self.saved = self.progress.step

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
        for batch, waited in _timed(self._batches()):
            began = time.perf_counter()
            rate = self.rate_at(self.progress.step + 1)
            loss = self.engine.model(batch, self.criterion)
            norm, value = self.engine.backward(loss), loss.item()
            self._require_finite(value, norm, batch)
            self.engine.update(rate)
            self.progress.count(value, batch.tokens)
            self.journal.step(
                step=self.progress.step,
                epoch=self.progress.epoch + 1,
                rate=rate,
                loss=value,
                gradient_norm=norm,
                tokens=batch.tokens,
                seconds=waited + time.perf_counter() - began,
                waited=waited,
            )
            if self._is_due():
                self._save("last")

    def _end_epoch(self) -> None:
        """Validate, and keep the checkpoint: as the last, and as the best where it is."""
        progress = self.progress
        figures = {"train_loss": progress.epoch_loss / progress.epoch_tokens}
        if self.data.val is not None:
            figures |= self._validate(self.data.val)
        best = self._is_best(figures)
        if best:
            progress.best = figures.get(f"val_{self.config.select_by}")
            progress.best_epoch = progress.epoch
        self.journal.epoch(step=progress.step, epoch=progress.epoch + 1, figures=figures, best=best)
        progress.next_epoch()
        # The best first: killed in between, the epoch is done again and both are written.
        self._save(*(["best"] if best else []), "last")

    def _epoch(self, number: int) -> Epoch:
        return Epoch(self.data.train, number, self.recipe.batch_images, shuffle=True)

    def _batches(self) -> Iterator[Batch]:
        """Return what is left of the epoch, or of the steps."""
        batches = self.engine.load(self._epoch(self.progress.epoch), start=self.progress.batch)
        return islice(batches, self.steps - self.progress.step)

    def _validate(self, images: CaptionedImages) -> dict[str, float]:
        epoch = Epoch(images, 0, self.recipe.batch_images, shuffle=False)
        beam_size = self.config.beam_size
        return validate(self.engine, epoch, self.vocabulary, score=self.score, beam_size=beam_size)

    def _is_best(self, figures: Mapping[str, float]) -> bool:
        """Tell whether an epoch is the best so far; without val every epoch is."""
        chosen, best = f"val_{self.config.select_by}", self.progress.best
        if self.data.val is not None and chosen not in figures:
            known = [name.removeprefix("val_") for name in figures if name.startswith("val_")]
            raise InputError(unknown("metric", self.config.select_by, known))
        if not all(map(math.isfinite, figures.values())):
            self._fail(f"the figures of epoch {self.progress.epoch + 1} are not finite", figures)
        if best is None or chosen not in figures:
            return True
        return figures[chosen] < best if chosen == "val_loss" else figures[chosen] > best

    def _resume(self) -> Progress:
        """Return where training stands, with the state of the furthest whole checkpoint.

        Without one the run is new, and the captioner starts from what it has pretrained.
        """
        files = {checkpoint_path(self.folder, name): name for name in ("last", "best")}
        found, faults = checkpoints.load_furthest(files, expected=self.config.binding())
        for fault in faults:
            self.journal.say(f"passed over: {fault}")
        if found is None:
            if faults:  # All are torn, so that this run starts once more.
                self.engine.captioner.warm_start()
            return Progress()
        self.engine.restore(found)
        # What is whole takes the place of what is torn; a torn best has to be found again.
        torn = {name for path, name in files.items() if path in {fault.where for fault in faults}}
        if "best" in torn:
            found.progress.best = None
        if torn:
            paths = [checkpoint_path(self.folder, name) for name in torn]
            checkpoints.save(paths, found.tensors, found.progress, found.belongs)
        return found.progress

    def _is_due(self) -> bool:
        """Tell whether to save in the middle of an epoch; its end saves anyway."""
        step, batch = self.progress.step, self.progress.batch
        ends = batch == self.epoch_steps or step == self.steps
        return step % self.options.checkpoint_every == 0 and not ends

    def _save(self, *names: str) -> None:
        self.progress.scaler = self.engine.scaler()
        paths = [checkpoint_path(self.folder, name) for name in names]
        checkpoints.save(paths, self.engine.capture(), self.progress, self.config.binding())
        self.saved = self.progress.step

    def _require_finite(self, loss: float, norm: float, batch: Batch) -> None:
        """Stop before an update that would spoil the weights."""
        if not self.engine.survives(loss=loss, norm=norm):
            figures = {"loss": loss, "gradient_norm": norm}
            self._fail(f"loss {loss}, norm of the gradients {norm}", figures, batch.image_ids)

    def _fail(
        self, what: str, figures: Mapping[str, float], image_ids: Sequence[str] = ()
    ) -> NoReturn:
        """Write down what went wrong and raise TrainingError."""
        step, epoch = self.progress.step + 1, self.progress.epoch + 1
        rate = self.rate_at(step)
        record = {
            "step": step,
            "epoch": epoch,
            "rate": rate,
            # As text, for JSON knows neither NaN nor infinity.
            **{name: str(value) for name, value in figures.items()},
            "image_ids": list(image_ids),
        }
        write_text(self.folder / FAILURE, json.dumps(record, indent=1) + "\n")
        raise TrainingError(
            f"{what} at step {step}, in epoch {epoch}, at a rate of {rate:.3g}; the last good "
            f"checkpoint, of step {self.saved}, is kept",
            where=self.folder,
            mend=f"Look at the features of the images in {FAILURE}, or train anew (--force) with "
            "a lower learning_rate or a clip_norm in the model's manifest.",
        )

    def _introduce(self) -> None:
        data = self.data
        parameters = sum(weight.numel() for weight in self.engine.captioner.parameters())
        failed = len(data.train.failed) + (len(data.val.failed) if data.val else 0)
        left_out = f", {failed:,} left out for their features have failed" if failed else ""
        self.journal.say(
            f"{self.config.name}: {parameters / 1e6:.2f} M parameters on {self.engine.device}, "
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
            print(
                f"stopped at step {self.progress.step:,} of {self.steps:,}; the same command goes "
                f"on after step {self.saved:,}, the last that is saved",
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
