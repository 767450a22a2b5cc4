"""A run's folder: what the run was made from, and how to open it again.

config.yaml             the model as resolved, and the fingerprints of all that it was made from
vocab.json              the run's own copy of the vocabulary
checkpoints/            last.safetensors, best.safetensors
metrics.jsonl           a JSON object for every logged step and every epoch
failure.json            the step that went wrong, where one did
finished.json           written last: how many steps, and which epoch was best
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import Field

from regionprep import __version__
from regionprep.errors import InputError, ManifestError, MismatchError, MissingError, unknown
from regionprep.manifests import ModelManifest, Part, Preset, TrainingRecipe, parse, read_yaml
from regionprep.models import Captioner, build
from regionprep.pipeline.claim import HOLDER, LOCK
from regionprep.pipeline.devices import choose_device
from regionprep.pipeline.vocab import Vocabulary
from regionprep.training import checkpoints
from regionprep.workspace import write_text

CONFIG = "config.yaml"
VOCABULARY = "vocab.json"
METRICS = "metrics.jsonl"
FAILURE = "failure.json"
FINISHED = "finished.json"

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


class RunConfig(Part):
    """Everything that decides a run's weights, and the versions it was begun with."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")
    model: ModelManifest
    preset: str
    dataset: str
    detector: str
    backbone: str
    features: str
    boxes: str
    feature_width: int = Field(ge=1)
    grid: tuple[int, int] | None = None
    vocabulary: str
    vocabulary_size: int
    max_length: int
    seed: int = Field(ge=0)
    precision: Precision
    max_steps: int | None = Field(ge=1)
    select_by: str
    beam_size: int = Field(ge=1)
    versions: dict[str, str]

    def binding(self) -> dict[str, Any]:
        """Return what two runs of one name must agree on: neither prose nor versions."""
        binding = self.model_dump(mode="json", exclude={"name", "versions", "model"})
        model = self.model.model_dump(mode="json")
        return binding | {
            "model": model["name"],
            "captioner": model["captioner"],
            "arguments": model["arguments"],
            "training": model["training"],
        }

    @property
    def command(self) -> str:
        """Return the command that trains this model on these features."""
        return (
            f"prep train --model {self.model.name} --preset {self.preset} "
            f"--detector {self.detector} --backbone {self.backbone} --name {self.name}"
        )

    def save(self, folder: Path) -> None:
        """Write `config.yaml` into a run's folder."""
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_text(folder / CONFIG, text)

    @classmethod
    def load(cls, folder: Path) -> RunConfig:
        """Return the configuration of the run in `folder`; MissingError when there is no run."""
        file = folder / CONFIG
        if not file.is_file():
            raise MissingError(
                "there is no such run", where=folder, mend="Train one with `prep train`."
            )
        return parse(cls, read_yaml(file), where=file)


def begin(folder: Path, config: RunConfig, vocabulary: Vocabulary, *, force: bool) -> None:
    """Make a run's folder ready to train in: as it is where its configuration is the same.

    Raises MismatchError where it is another, unless `force` clears the folder, or nothing has been
    trained in it yet.
    """
    if force:
        _clear(folder)
    elif has_trained(folder):
        there = RunConfig.load(folder).binding()
        checkpoints.require_same(config.binding(), there, where=f"run '{config.name}'")
        return
    # Without its configuration nobody can tell what a checkpoint is worth.
    _clear(folder)
    (folder / "checkpoints").mkdir()
    vocabulary.save(folder / VOCABULARY)
    config.save(folder)


def has_trained(folder: Path) -> bool:
    """Return whether a run's folder holds weights, and what they were trained for."""
    there = any(checkpoint_path(folder, name).exists() for name in ("last", "best"))
    return there and (folder / CONFIG).exists()


def _clear(folder: Path) -> None:
    """Remove all that a run has made but the claim on its folder, the configuration last."""
    ours = (LOCK, HOLDER, CONFIG)
    for path in (item for item in folder.iterdir() if item.name not in ours):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (folder / CONFIG).unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class Run:
    """A trained captioner, in eval mode, with all that captioning needs."""

    folder: Path
    config: RunConfig
    vocabulary: Vocabulary
    model: Captioner[Any, Any]
    device: torch.device


def load_run(folder: Path, device: str = "auto", *, checkpoint: str = "best") -> Run:
    """Return the run in `folder` with the weights of a checkpoint, `best` or `last`.

    Raises MissingError before the first checkpoint, MismatchError when vocabulary or checkpoint
    are another run's, StorageError when the checkpoint is torn.
    """
    config = RunConfig.load(folder)
    vocabulary = Vocabulary.load(folder / VOCABULARY)
    if vocabulary.fingerprint != config.vocabulary:
        raise MismatchError(
            f"is another vocabulary ({vocabulary.fingerprint[:12]}, {vocabulary.size} ids) than "
            f"the run's ({config.vocabulary[:12]}, {config.vocabulary_size} ids)",
            where=folder / VOCABULARY,
            mend="Bring the run's own file back, or train anew with --force.",
        )
    path = checkpoint_path(folder, checkpoint)
    if not path.is_file():
        raise MissingError(
            f"the run has no {checkpoint} checkpoint yet",
            where=folder,
            mend="Go on with it: give its `prep train` command again.",
        )
    model = build_model(config, vocabulary)
    again = f"Train anew: `{config.command} --force`."
    saved = checkpoints.load(path, expected=config.binding(), mend=again)
    checkpoints.take_weights(model, saved, where=path, mend=again)
    chosen = choose_device(device)
    return Run(folder, config, vocabulary, model.to(chosen).eval(), chosen)


def build_model(config: RunConfig, vocabulary: Vocabulary) -> Captioner[Any, Any]:
    """Return the captioner that a configuration describes, with fresh weights."""
    try:
        return _build(config, vocabulary)
    except InputError as error:
        where = f"model '{config.model.name}'"
        raise InputError(error.what, where=error.where or where, mend=error.mend) from None


def _build(config: RunConfig, vocabulary: Vocabulary) -> Captioner[Any, Any]:
    return build(
        config.model.captioner,
        feature_width=config.feature_width,
        vocabulary_size=vocabulary.size,
        max_length=config.max_length,
        pad=vocabulary.pad,
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        grid=config.grid,
        **config.model.arguments,
    )


def resolve(
    manifest: ModelManifest,
    preset: str,
    *,
    epochs: int | None = None,
    batch_images: int | None = None,
) -> ModelManifest:
    """Return the manifest with a preset and the user's choices applied, and no presets left.

    "base" is the manifest itself where it names no such preset. What the paper reports, and how
    many parameters it counts, stays only where nothing is changed that bears on it. Raises
    ManifestError for an unknown preset, or one whose values do not fit.
    """
    presets = {"base": Preset()} | manifest.presets
    if preset not in presets:
        raise ManifestError(unknown("preset", preset, presets), where=f"model '{manifest.name}'")
    chosen = {"epochs": epochs, "batch_images": batch_images}
    recipe = manifest.training.model_dump(mode="json") | presets[preset].training
    recipe |= {key: value for key, value in chosen.items() if value is not None}
    where = f"model '{manifest.name}', preset '{preset}'"
    training = parse(TrainingRecipe, recipe, where=where)
    arguments = dict(manifest.arguments) | presets[preset].arguments
    update: dict[str, Any] = {"arguments": arguments, "training": training, "presets": {}}
    # What the paper says of its own size and recipe is not said of another.
    if arguments != manifest.arguments:
        update["parameters"] = None
    if arguments != manifest.arguments or training != manifest.training:
        update |= {"scores": {}, "command": ""}
    return manifest.model_copy(update=update)


def checkpoint_path(folder: Path, name: str) -> Path:
    """Return where a run keeps its checkpoint `last` or `best`."""
    return folder / "checkpoints" / f"{name}.safetensors"


def versions() -> dict[str, str]:
    """Return the versions that a run's numbers may depend on."""
    return {
        "regionprep": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
