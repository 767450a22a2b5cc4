"""The main job: a workspace's stages in order, which of them are done, and doing the rest.

What the user made comes before what nobody has: of several detectors, features or runs the
dataset's default is meant if it is made, else the newest that is finished.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regionprep.captioning import caption_split, draw_sheet, evaluate_split, result_file
from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.freshness import (
    Stale,
    Tables,
    stale_results,
    stale_run,
    stale_shards,
    stale_vocabulary,
)
from regionprep.workspace import Workspace

if TYPE_CHECKING:
    from regionprep.evaluation import Retrieval
    from regionprep.training import Score
    from regionprep.training.runs import Precision, RunConfig

UNSCORED = "no image is in test or val, so prep caption and prep evaluate are left out"


@dataclass(frozen=True)
class Step:
    """One stage of a workspace: the command, what shows that it is done, and what does it."""

    command: str
    product: Path
    do: Callable[[], object]
    stale: Stale | None = None
    note: str = ""

    @property
    def done(self) -> bool:
        """Tell whether the stage's last file is there, and belongs to the rest."""
        return self.stale is None and self.product.is_file()

    def __str__(self) -> str:
        state = "stale" if self.stale else "done " if self.done else "to do"
        notes = [part for part in (self.stale.why if self.stale else "", self.note) if part]
        command = self.stale.command if self.stale else self.command
        return f"{state}  {command}" + (f"  # {'; '.join(notes)}" if notes else "")


@dataclass(frozen=True)
class Pair:
    """The detector and backbone that are meant; no backbone where none could be."""

    detector: str
    backbone: str | None
    note: str = ""


def steps(workspace: Workspace, *, device: str = "auto") -> list[Step]:
    """Return the stages that apply to this workspace, each with the settings that it would use.

    Raises StorageError for a damaged table of images.
    """
    from regionprep.pipeline.splits import make_splits
    from regionprep.pipeline.vocab import make_vocabulary

    captioned = workspace.dataset.captions is not None
    tables, pair = Tables.read(workspace), choose_pair(workspace)
    product = workspace.captions if captioned and tables else workspace.images
    found = [Step("prep splits", product, lambda: make_splits(workspace))]
    if captioned:
        made = tables is not None and workspace.vocabulary.is_file()
        stale = stale_vocabulary(workspace, tables) if tables and made else None
        make = Step("prep vocab", workspace.vocabulary, lambda: make_vocabulary(workspace), stale)
        found.append(make)
    found += _features_steps(workspace, tables, pair, device)
    return [*found, *_run_steps(workspace, tables, pair, device)] if captioned else found


def _features_steps(
    workspace: Workspace, tables: Tables | None, pair: Pair, device: str
) -> list[Step]:
    from regionprep.pipeline.detect import run_detect
    from regionprep.pipeline.extract import MAP, run_extract
    from regionprep.pipeline.shards import MANIFEST

    detector, backbone = pair.detector, pair.backbone
    is_map = detector == MAP
    regions = workspace.regions(detector)
    features = workspace.features(detector, backbone or "NAME")
    detect = f"prep detect --detector {detector}"
    where = "--grid" if is_map else f"--detector {detector}"
    extract = f"prep extract {where} --backbone {backbone or 'NAME'}"

    def fault(folder: Path, command: str, boxes: Path | None = None) -> Stale | None:
        made = tables is not None and (folder / MANIFEST).is_file()
        return stale_shards(folder, tables, command, regions=boxes) if tables and made else None

    found = Step(
        detect,
        regions / MANIFEST,
        lambda: run_detect(workspace, detector, device=device),
        None if is_map else fault(regions, detect),
    )
    described = Step(
        extract,
        features / MANIFEST,
        # Without a backbone it says which there are.
        lambda: run_extract(workspace, detector, backbone, device=device),
        fault(features, extract, None if is_map else regions),
        pair.note,
    )
    # A feature map, or imported vectors: there never were regions.
    alone = is_map or (described.done and not found.product.is_file())
    return [described] if alone else [found, described]


def _run_steps(workspace: Workspace, tables: Tables | None, pair: Pair, device: str) -> list[Step]:
    from regionprep.training.runs import FINISHED, RunConfig

    name, note = choose_run(workspace)
    run = workspace.run(name)
    config = RunConfig.load(run) if name in workspace.begun_runs() else None
    options = _options_of(workspace, pair, config)
    train = "prep train" + "".join(
        f" --{option.replace('_', '-')} {shlex.quote(str(value))}"
        for option, value in options.items()
    )
    trained = workspace.trained_runs()
    stale = (
        stale_run(workspace, config, tables, train)
        if config is not None and tables is not None and name in trained
        else None
    )
    # Named for the call even where the command can do without.
    chosen = {"detector": pair.detector, "backbone": pair.backbone, **options, "name": name}
    found = [
        Step(
            train,
            run / FINISHED,
            lambda: train_captioner(workspace, **chosen, device=device),
            stale,
            note,
        )
    ]
    split = _scored_split(tables)
    if split is None:
        return found
    suffix = f" --run {name}" if len({*trained, name}) > 1 else ""
    suffix += "" if split == "test" else f" --split {split}"

    def result(verb: str, kind: str, do: Callable[[], object]) -> Step:
        path, command = result_file(run, kind, split), f"prep {verb}{suffix}"
        there = tables is not None and path.is_file()
        stale = stale_results(path, tables.ids(split), command) if tables and there else None
        return Step(command, path, do, stale)

    return [
        *found,
        result(
            "caption",
            "captions",
            lambda: caption_split(workspace, run=name, split=split, device=device),
        ),
        result("evaluate", "scores", lambda: evaluate_split(workspace, run=name, split=split)),
    ]


def _options_of(workspace: Workspace, pair: Pair, config: RunConfig | None) -> dict[str, Any]:
    """Return what `prep train` is to be told for a run: begun with `config`, or by the defaults."""
    from regionprep import manifests
    from regionprep.training.runs import resolve

    defaults = workspace.dataset.defaults
    if config is None:
        named = {"model": defaults.model, "preset": defaults.preset}
        return named | _pair_options(workspace, pair.detector, pair.backbone)
    shipped = config.model.name in manifests.names("models")
    options: dict[str, Any] = {
        "model": config.model.name if shipped else f"{config.model.name}.yaml",
        "preset": config.preset,
        **_pair_options(workspace, config.detector, config.backbone),
    }
    if config.name != _run_name(config.model.name, config.preset):
        options["name"] = config.name
    usual: dict[str, Any] = {"seed": 0, "precision": "32-true"}
    given: dict[str, Any] = {"seed": config.seed, "precision": config.precision}
    if shipped:
        recipe = resolve(manifests.load("models", config.model.name), config.preset).training
        for key in ("epochs", "batch_images"):
            usual[key], given[key] = getattr(recipe, key), getattr(config.model.training, key)
    return options | {key: value for key, value in given.items() if value != usual[key]}


def _pair_options(workspace: Workspace, detector: str, backbone: str | None) -> dict[str, str]:
    """Return a pair's options where `prep train` would not come to it by itself."""
    try:
        alone = workspace.choose_features(None, None) == (detector, backbone)
    except MissingError:
        alone = True  # It will be the only one.
    except InputError:
        alone = False
    return {} if alone or backbone is None else {"detector": detector, "backbone": backbone}


def run_all(workspace: Workspace, *, device: str = "auto") -> dict[str, float]:
    """Do every stage that is not done, tell about each, and return the seconds of each command.

    Raises MismatchError at what is stale: nothing that is there is made anew unasked.
    """
    seconds: dict[str, float] = {}
    # Asked anew after each stage: what one makes decides what the next would use.
    while (step := _next(workspace, device)) is not None:
        if step.stale is not None:
            raise MismatchError(
                f"stale: {step.stale.why}",
                where=step.product,
                mend=f"Make it anew: `{step.stale.command}`, then go on with `prep run`.",
            )
        print(f"== {step.command}", flush=True)
        started = time.perf_counter()
        print(step.do())
        seconds[step.command] = time.perf_counter() - started
        print(f"   {seconds[step.command]:.0f} s", flush=True)
    if not seconds:
        print("nothing to do: every stage is done")
    if _is_unscored(workspace):
        print(UNSCORED)
    return seconds


def describe(workspace: Workspace) -> str:
    """Return a line a stage, done, to do or stale with what mends it, for `prep status`."""
    lines = [f"{workspace.root}: {workspace.dataset.summary}"]
    lines += [f"  {step}" for step in steps(workspace)]
    return "\n".join(lines + ([f"  {UNSCORED}"] if _is_unscored(workspace) else []))


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


def choose_pair(workspace: Workspace) -> Pair:
    """Return the detector and backbone that are meant: made by default, newest, begun, default."""
    defaults = workspace.dataset.defaults
    for file in ("manifest.json", "plan.json"):
        pairs = workspace.pairs(file)
        if pairs:
            usual = (defaults.detector, defaults.backbone or "")
            note = _newest_of(pairs, [f"{d} + {b}" for d, b in pairs], usual)
            return Pair(*(usual if usual in pairs else pairs[0]), note)
    made = workspace.detectors() or workspace.detectors("plan.json")
    detector = defaults.detector if defaults.detector in made or not made else made[0]
    backbone = defaults.backbone or "roi"
    if backbone == "roi" and not _is_network(workspace, detector):
        return Pair(detector, None)
    return Pair(detector, backbone, _newest_of(made, made, defaults.detector))


def choose_run(workspace: Workspace) -> tuple[str, str]:
    """Return the run that is meant and why: finished before trained before begun."""
    defaults = workspace.dataset.defaults
    usual = _run_name(defaults.model, defaults.preset)
    begun, trained = workspace.begun_runs(), workspace.trained_runs()
    finished = [name for name in trained if (workspace.run(name) / "finished.json").is_file()]
    for names in (finished, trained, begun):
        known = [name for name in names if name in begun]
        if known:
            return usual if usual in known else known[0], _newest_of(known, known, usual)
    return usual, ""


def run_folder(workspace: Workspace) -> Path:
    """Return the folder of the run that is meant, see `choose_run`."""
    return workspace.run(choose_run(workspace)[0])


def _newest_of(made: Sequence[object], told: Sequence[str], usual: object) -> str:
    """Return the note that a choice was made by age, "" where there was none to make."""
    return f"the newest of {', '.join(told)}" if len(made) > 1 and usual not in made else ""


def _run_name(model: str, preset: str) -> str:
    return model if preset == "base" else f"{model}-{preset}"


def _is_network(workspace: Workspace, detector: str) -> bool:
    """Tell whether a detector has features of its own that `roi` could pool."""
    from regionprep import manifests
    from regionprep.pipeline.shards import Plan

    plan = Plan.read(workspace.regions(detector))
    kind = (
        plan.settings["adapter"]["kind"]
        if plan is not None
        else manifests.load("detectors", detector).kind
    )
    return kind in ("scenes", "torchvision")


def _scored_split(tables: Tables | None) -> str | None:
    """Return the split to caption and score; test is taken for granted before `prep splits`."""
    there = {"test"} if tables is None else set(tables.splits.values())
    return next((split for split in ("test", "val") if split in there), None)


def _is_unscored(workspace: Workspace) -> bool:
    captioned = workspace.dataset.captions is not None
    return captioned and _scored_split(Tables.read(workspace)) is None


def _next(workspace: Workspace, device: str) -> Step | None:
    return next((step for step in steps(workspace, device=device) if not step.done), None)
