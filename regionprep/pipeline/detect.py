"""The stage that finds regions: images to boxes, scores and classes."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regionprep.errors import InputError, MismatchError
from regionprep.manifests import DetectorManifest, load
from regionprep.pipeline import detectors
from regionprep.pipeline.detectors.detector import Candidates, Detector, Pixels, Resources
from regionprep.pipeline.executor import Outcome, run_plan
from regionprep.pipeline.images import ImageReader
from regionprep.pipeline.selection import Selected, Selection, select, strongest
from regionprep.pipeline.shards import MANIFEST, Columns, ImageRow, Plan, shard_size_of
from regionprep.pipeline.share import Share
from regionprep.pipeline.tables import ImageRecord, images_fingerprint, read_images
from regionprep.workspace import Workspace

if TYPE_CHECKING:
    from regionprep.pipeline.cluster import Team


def run_detect(
    workspace: Workspace,
    detector: str | None = None,
    *,
    weights: Path | None = None,
    boxes_file: Path | None = None,
    min_boxes: int | None = None,
    max_boxes: int | None = None,
    score_threshold: float | None = None,
    nms_threshold: float | None = None,
    shard_size: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    team: Team | None = None,
    share: Share | None = None,
    force: bool = False,
    progress: bool = True,
) -> Outcome:
    """Find the regions of every image of the workspace, into `regions/DETECTOR/`.

    `detector` names a manifest or is the path of one. What is None is as the manifest has it.
    Raises what `detectors.load` and `executor.run_plan` raise, and InputError for a threshold that
    the detector has no use for.
    """
    manifest: DetectorManifest = load("detectors", workspace.choose_detector(detector))
    images = read_images(workspace)
    source = detectors.load(manifest, Resources(weights, boxes_file, images, device))
    selection = _selection(
        manifest,
        source,
        min_boxes=min_boxes,
        max_boxes=max_boxes,
        score_threshold=score_threshold,
        nms_threshold=nms_threshold,
    )
    size = batch_size or source.batch_size
    settings = {
        "detector": manifest.name,
        "adapter": manifest.model_dump(
            mode="json", include={"kind", "model", "weights", "options"}
        ),
        **source.provenance,
        "classes": source.classes,
        "selection": _bounds(selection, source),
        "images": images_fingerprint(workspace, images),
        "batch_size": size,
        "notes": notes(device, weights=weights, boxes=boxes_file),
        "versions": versions("torch", "torchvision"),
    }
    folder = workspace.regions(manifest.name)
    plan = Plan.make(
        [image.image_id for image in images],
        stage="regions",
        settings=settings,
        shard_size=shard_size or shard_size_of(folder, anew=force),
    )
    if not (folder / MANIFEST).exists():
        source.load()  # what is wrong with it is told before anything is written
    return run_plan(
        plan,
        folder,
        lambda: DetectStage(source, selection, Photographs(workspace, images), size),
        elsewhere=partial(_stage_elsewhere, workspace, weights, boxes_file, device),
        team=team,
        share=share,
        force=force,
        progress=progress,
    )


def detect_batch(
    images: Sequence[Pixels],
    detector: Detector,
    selection: Selection,
    image_ids: Sequence[str] | None = None,
) -> list[ImageRow]:
    """Return the regions of `images`, uint8 (height, width, 3) RGB, the most confident first.

    Without `image_ids` the images are called "0", "1", ...
    """
    names = [str(number) for number in range(len(images))] if image_ids is None else image_ids
    found = detector.detect(images, names)
    return [
        _row(name, image, candidates, _choose(candidates, detector, selection))
        for name, image, candidates in zip(names, images, found, strict=True)
    ]


def rebuild(
    settings: Mapping[str, Any], *, device: str = "auto", weights: Path | None = None
) -> tuple[Detector, Selection]:
    """Return the detector and selection that made regions with these settings.

    `weights` says where the user's file of weights lies now, if it was moved. Raises MismatchError
    where the weights are no longer the same, InputError for boxes that came from a file: it knows
    no other images.
    """
    manifest = DetectorManifest(name=settings["detector"], summary="", **settings["adapter"])
    if "boxes" in settings:
        raise InputError(
            f"the regions of detector '{manifest.name}' came from a file, which knows only its own "
            "images",
            mend="Use a run whose detector finds boxes itself.",
        )
    source = detectors.load(
        manifest, Resources(weights or noted(settings, "weights"), device=device)
    )
    require_same_weights(source.provenance, settings, manifest.name)
    return source, Selection(**settings["selection"])


@dataclass(frozen=True)
class Photographs:
    """A workspace's images by id."""

    reader: ImageReader
    paths: Mapping[str, str]

    def __init__(self, workspace: Workspace, images: Sequence[ImageRecord]) -> None:
        object.__setattr__(self, "reader", ImageReader(workspace))
        object.__setattr__(self, "paths", {image.image_id: image.path for image in images})

    def __getitem__(self, image_id: str) -> Pixels:
        return self.reader.read(self.paths[image_id])


@dataclass
class DetectStage:
    """Regions of a batch of images: the stage that the executor runs."""

    detector: Detector
    selection: Selection
    photographs: Photographs
    batch_size: int
    schema = Columns()

    def read(self, image_id: str) -> tuple[str, Pixels]:
        """Return the image, or raise ImageFault."""
        return image_id, self.photographs[image_id]

    def __call__(self, items: list[tuple[str, Pixels]]) -> list[ImageRow]:
        """Return the regions of the images."""
        names, images = zip(*items, strict=True)
        return detect_batch(images, self.detector, self.selection, names)


def _stage_elsewhere(
    workspace: Workspace,
    weights: Path | None,
    boxes_file: Path | None,
    device: str,
    settings: Mapping[str, Any],
) -> DetectStage:
    """Return the stage of a regions plan in a worker process, which may be on another host."""
    manifest = DetectorManifest(name=settings["detector"], summary="", **settings["adapter"])
    images = read_images(workspace)
    source = detectors.load(manifest, Resources(weights, boxes_file, images, device))
    seen = {**source.provenance, "images": images_fingerprint(workspace, images)}
    require_planned(seen, settings, workspace)
    selection = Selection(**settings["selection"])
    photographs = Photographs(workspace, images)
    return DetectStage(source, selection, photographs, settings["batch_size"])


def require_planned(
    seen: Mapping[str, Any], settings: Mapping[str, Any], workspace: Workspace
) -> None:
    """Raise MismatchError if a worker sees other images, weights or options than the plan has."""
    # As a plan holds them: JSON knows no tuples.
    seen = json.loads(json.dumps(seen))
    differing = sorted(name for name in seen if seen[name] != settings.get(name))
    if differing:
        raise MismatchError(
            f"on {platform.node()} these differ from the plan: {', '.join(differing)}",
            where=workspace.root,
            mend="Give every host the same workspace, weights and regionprep.",
        )


def versions(*libraries: str) -> dict[str, str]:
    """Return the installed versions of `libraries`."""
    from importlib.metadata import version

    return {name: version(name) for name in libraries}


def notes(device: str, **files: Path | None) -> dict[str, str]:
    """Return what a plan records of how it was made, without binding anybody to it."""
    from regionprep.pipeline.devices import choose_device

    paths = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    return {"device": choose_device(device).type, **paths}


def noted(settings: Mapping[str, Any], name: str) -> Path | None:
    """Return the path of a file that a plan recorded, if it did and the file is still there."""
    path = Path(settings.get("notes", {}).get(name, ""))
    return path if path.is_file() else None


def require_same_weights(now: Mapping[str, Any], settings: Mapping[str, Any], name: str) -> None:
    """Raise MismatchError if the weights at hand are not those of `settings`."""
    wanted = (settings.get("weights") or {}).get("sha256")
    found = (now.get("weights") or {}).get("sha256")
    if wanted != found:
        raise MismatchError(
            f"the weights of '{name}' are not those that the run's features were made with: "
            f"SHA-256 {str(wanted)[:12]}... then, {str(found)[:12]}... now",
            where=settings.get("notes", {}).get("weights"),
            mend="Put that file back, or make regions and features anew and train on them.",
        )


def _selection(manifest: DetectorManifest, source: Detector, **changes: float | None) -> Selection:
    changes = {name: value for name, value in changes.items() if value is not None}
    useless = sorted(changes.keys() - {"max_boxes"}) if source.given else []
    if useless:
        option = useless[0].replace("_", "-")
        raise InputError(
            f"detector '{manifest.name}' takes its boxes as they are: --{option} has no use",
            mend=f"Leave out --{option}; --max-boxes keeps those of the best scores.",
        )
    as_manifest = manifest.model_dump(include=set(Selection.__dataclass_fields__))
    return Selection(**as_manifest | changes)


def _bounds(selection: Selection, source: Detector) -> dict[str, Any]:
    if source.given:
        return {"min_boxes": 0, "max_boxes": selection.max_boxes}
    return {name: getattr(selection, name) for name in Selection.__dataclass_fields__}


def _choose(candidates: Candidates, detector: Detector, selection: Selection) -> Selected:
    if detector.given:
        return strongest(candidates.scores, selection.max_boxes)
    return select(candidates.boxes, candidates.scores, selection)


def _row(name: str, image: Pixels, candidates: Candidates, selected: Selected) -> ImageRow:
    height, width = image.shape[:2]
    boxes = np.ascontiguousarray(candidates.boxes[selected.indices], np.float32)
    return ImageRow(name, width, height, boxes, selected.scores, selected.classes)
