"""The main job: a workspace's stages in order, which of them are done, and doing the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regionprep.captioning import caption_split, draw_sheet, evaluate_split, result_file
from regionprep.workspace import Workspace

if TYPE_CHECKING:
    from regionprep.evaluation import Retrieval
    from regionprep.training import Score
    from regionprep.training.runs import Precision


@dataclass(frozen=True)
class Step:
    """One stage of a workspace: the command, what shows that it is done, and what does it."""

    command: str
    product: Path
    do: Callable[[], object]

    @property
    def done(self) -> bool:
        """Tell whether the stage's last file is there; it is only ever written whole."""
        return self.product.is_file()


def steps(workspace: Workspace, *, device: str = "auto") -> list[Step]:
    """Return the stages that apply to this workspace, each with the settings that it would use."""
    from regionprep.pipeline.detect import run_detect
    from regionprep.pipeline.extract import run_extract
    from regionprep.pipeline.splits import make_splits
    from regionprep.pipeline.vocab import make_vocabulary

    defaults = workspace.dataset.defaults
    captioned = workspace.dataset.captions is not None
    detector = workspace.choose_detector(None)
    pairs = sorted(workspace.root.glob("features/*/*/manifest.json"))
    detector, backbone = (
        (pairs[0].parent.parent.name, pairs[0].parent.name)
        if len(pairs) == 1
        else (detector, defaults.backbone or "roi")
    )
    found = [
        Step("prep splits", workspace.images, lambda: make_splits(workspace)),
        Step("prep vocab", workspace.vocabulary, lambda: make_vocabulary(workspace)),
        Step(
            f"prep detect --detector {detector}",
            workspace.regions(detector) / "manifest.json",
            lambda: run_detect(workspace, detector, device=device),
        ),
        Step(
            f"prep extract --detector {detector} --backbone {backbone}",
            workspace.features(detector, backbone) / "manifest.json",
            lambda: run_extract(workspace, detector, backbone, device=device),
        ),
    ]
    if found[3].done and not found[2].done:
        del found[2]  # a feature map, or imported vectors: there never were regions
    if not captioned:
        return [step for step in found if step.product != workspace.vocabulary]
    run = run_folder(workspace)
    return [
        *found,
        Step(
            f"prep train --model {defaults.model} --preset {defaults.preset}",
            run / "finished.json",
            lambda: train_captioner(workspace, name=run.name, device=device),
        ),
        Step(
            "prep caption",
            result_file(run, "captions", "test"),
            lambda: caption_split(workspace, run=run.name, device=device),
        ),
        Step(
            "prep evaluate",
            result_file(run, "scores", "test"),
            lambda: evaluate_split(workspace, run=run.name),
        ),
    ]


def run_all(workspace: Workspace, *, device: str = "auto") -> dict[str, float]:
    """Do every stage that is not done, tell about each, and return the seconds of each command."""
    seconds: dict[str, float] = {}
    # Asked anew after each stage: what one makes decides what the next would use.
    while (step := _next(workspace, device)) is not None:
        print(f"== {step.command}", flush=True)
        started = time.perf_counter()
        print(step.do())
        seconds[step.command] = time.perf_counter() - started
        print(f"   {seconds[step.command]:.0f} s", flush=True)
    if not seconds:
        print("nothing to do: every stage is done")
    return seconds


def describe(workspace: Workspace) -> str:
    """Return a line a stage, done or to do, for `prep status`."""
    lines = [f"{workspace.root}: {workspace.dataset.summary}"]
    lines += [f"  {'done ' if step.done else 'to do'}  {step.command}" for step in steps(workspace)]
    return "\n".join(lines)


def run_demo(folder: Path, *, device: str = "auto") -> dict[str, float]:
    """Do the main job on the embedded scenes in `folder`; return the seconds of each command."""
    from regionprep.pipeline.datasets import initialise

    workspace = initialise(folder, dataset="scenes")
    seconds = run_all(workspace, device=device)
    run = run_folder(workspace)
    sheet = draw_sheet(workspace, run=run.name)
    print(evaluate_split(workspace, run=run.name))
    print(f"captions  {result_file(run, 'captions', 'test')}")
    print(f"scores    {result_file(run, 'scores', 'test')}")
    print(f"pictures  {sheet}")
    return seconds


def train_captioner(
    workspace: Workspace,
    *,
    model: str | None = None,
    preset: str | None = None,
    detector: str | None = None,
    backbone: str | None = None,
    name: str | None = None,
    seed: int = 0,
    epochs: int | None = None,
    batch_images: int | None = None,
    device: str = "auto",
    precision: Precision = "32-true",
    force: bool = False,
) -> Path:
    """Train a captioner on the features here, validated by CIDEr-D; return the run's folder.

    What is not named is the dataset's default. A preset other than "base" is only taken from the
    defaults for the default model, since it is that model's.
    """
    from regionprep import manifests
    from regionprep.evaluation import References, read_references, score
    from regionprep.pipeline.splits import read_images
    from regionprep.training import train

    defaults = workspace.dataset.defaults
    detector, backbone = workspace.choose_features(detector, backbone)
    if preset is None:
        preset = defaults.preset if model in (None, defaults.model) else "base"
    validate: Score | None = None
    if any(image.split == "val" for image in read_images(workspace)):
        told = read_references(workspace, "val")

        def validate(captions: dict[str, list[str]]) -> dict[str, float]:
            references = References.of({image_id: told[image_id] for image_id in captions})
            return score(captions, references, ["bleu_4", "cider_d"]).corpus

    return train(
        workspace,
        manifests.load("models", model or defaults.model),
        detector=detector,
        backbone=backbone,
        preset=preset,
        name=name,
        seed=seed,
        epochs=epochs,
        batch_images=batch_images,
        device=device,
        precision=precision,
        score=validate,
        force=force,
    )


def check_retrieval(
    workspace: Workspace,
    *,
    detector: str | None = None,
    backbone: str | None = None,
) -> Retrieval:
    """Return whether images near each other by features share more caption words than chance."""
    from regionprep.evaluation import check_features

    detector, backbone = workspace.choose_features(detector, backbone)
    return check_features(workspace, detector, backbone)


def run_folder(workspace: Workspace) -> Path:
    """Return the folder of the only run here, else of the one that the defaults lead to."""
    made = [path.parent for path in workspace.root.glob("runs/*/config.yaml")]
    if len(made) == 1:
        return made[0]
    defaults = workspace.dataset.defaults
    suffix = "" if defaults.preset == "base" else f"-{defaults.preset}"
    return workspace.run(defaults.model + suffix)


def _next(workspace: Workspace, device: str) -> Step | None:
    return next((step for step in steps(workspace, device=device) if not step.done), None)
