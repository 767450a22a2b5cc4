"""The stage that describes regions: images and boxes to feature vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.manifests import BackboneManifest, names
from regionprep.pipeline import backbones
from regionprep.pipeline.backbones import Backbone, FeatureMap
from regionprep.pipeline.backbones.backbone import BATCH_CROPS
from regionprep.pipeline.detect import (
    Photographs,
    detect_batch,
    noted,
    notes,
    rebuild,
    require_planned,
    require_same_weights,
    versions,
)
from regionprep.pipeline.detectors import Detector
from regionprep.pipeline.detectors.detector import Pixels
from regionprep.pipeline.executor import Outcome, run_plan
from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.selection import Selection
from regionprep.pipeline.shards import (
    MANIFEST,
    UNBOUND,
    Columns,
    DType,
    ImageRow,
    Plan,
    shard_size_of,
)
from regionprep.pipeline.share import Share
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.tables import images_fingerprint, read_images
from regionprep.workspace import Workspace

if TYPE_CHECKING:
    from regionprep.pipeline.cluster import Team

IMAGES = 32
"""Images that a stage works on together; how many crops share a forward pass is `batch_size`."""

MAP = "feature_map"
"""What takes the detector's place in `features/DETECTOR/BACKBONE` where the regions are a map."""


def run_extract(
    workspace: Workspace,
    detector: str | None = None,
    backbone: str | None = None,
    *,
    weights: Path | None = None,
    grid: bool = False,
    dtype: DType = "float16",
    shard_size: int | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    team: Team | None = None,
    share: Share | None = None,
    force: bool = False,
    progress: bool = True,
) -> Outcome:
    """Describe every region of the workspace, into `features/DETECTOR/BACKBONE/`.

    With `grid`, or "feature_map" for a detector, a region is a cell of the backbone's last feature
    map over the whole image, row by row, and no detector is asked; the folder is
    `features/feature_map/BACKBONE/`. The map is that of the model's own transform: where this crops
    the image, the cells' boxes say what is left. Raises MissingError before `prep detect`,
    MismatchError for regions of other images, InputError where names do not go together, and what
    loading the backbone and `executor.run_plan` raise.
    """
    manifest = _backbone(workspace, backbone)
    if grid and detector not in (None, MAP):
        raise InputError("--grid takes a map of the whole image: --detector does not go with it")
    grid = grid or detector == MAP
    images = read_images(workspace)
    regions = None if grid else FeatureStore(workspace.regions(workspace.choose_detector(detector)))
    source = _load(manifest, regions, weights=weights, device=device, batch_size=batch_size)
    settings = {
        "detector": MAP if regions is None else regions.metadata["detector"],
        "backbone": manifest.name,
        "adapter": manifest.model_dump(
            mode="json", include={"library", "model", "pretrained", "package", "options"}
        ),
        **source.provenance,
        "boxes": "" if regions is None else regions.fingerprint,
        "regions": {} if regions is None else _parts(regions.metadata)[0],
        "grid": grid,
        "dtype": dtype,
        "images": images_fingerprint(workspace, images),
        "batch_size": batch_size or BATCH_CROPS,
        "notes": notes(device, weights=weights)
        | ({} if regions is None else {"regions": _parts(regions.metadata)[1]}),
        "versions": versions("torch", "torchvision", "timm", "open_clip_torch"),
    }
    folder = workspace.features(str(settings["detector"]), manifest.name)
    plan = Plan.make(
        [image.image_id for image in images],
        stage="features",
        settings=settings,
        shard_size=shard_size or shard_size_of(folder, anew=force),
    )
    if regions is not None:
        _require_same_images(plan, regions, str(settings["images"]))
    if not (folder / MANIFEST).exists():
        source.load()  # what is wrong with it is told before anything is written
    return run_plan(
        plan,
        folder,
        lambda: ExtractStage(source, Photographs(workspace, images), regions, dtype),
        elsewhere=partial(
            _stage_elsewhere,
            workspace,
            None if regions is None else regions.folder,
            weights,
            device,
        ),
        team=team,
        share=share,
        force=force,
        progress=progress,
    )


def extract_batch(
    images: Sequence[Pixels], rows: Sequence[ImageRow], backbone: Backbone, dtype: DType
) -> list[ImageRow]:
    """Return the rows with the features of their boxes in `images`."""
    found = backbone.regions(images, [row.boxes for row in rows])
    return [
        replace(row, features=_stored(features, dtype))
        for row, features in zip(rows, found, strict=True)
    ]


def map_batch(
    images: Sequence[Pixels], image_ids: Sequence[str], backbone: Backbone, dtype: DType
) -> list[ImageRow]:
    """Return rows whose regions are the cells of the images' feature maps, row by row."""
    return [
        _map_row(name, image, cells, dtype)
        for name, image, cells in zip(image_ids, images, backbone.maps(images), strict=True)
    ]


class ExtractStage:
    """Features of a batch of images: the stage that the executor runs."""

    batch_size = IMAGES

    def __init__(
        self,
        backbone: Backbone,
        photographs: Photographs,
        regions: FeatureStore | None,
        dtype: DType,
    ) -> None:
        """Load the backbone, whose width the columns need."""
        self.backbone, self.photographs = backbone, photographs
        self.regions, self.dtype = regions, dtype
        width = backbone.map_width if regions is None else backbone.width
        self.schema = Columns(width, dtype)

    def read(self, image_id: str) -> tuple[str, Pixels, ImageRow | None]:
        """Return the image and its regions, or raise ImageFault."""
        if self.regions is None:
            return image_id, self.photographs[image_id], None
        row = self.regions[image_id]
        if not row.ok:
            raise ImageFault(row.status, row.error, width=row.width, height=row.height)
        image = self.photographs[image_id]
        if image.shape[:2] != (row.height, row.width):
            raise ImageFault(
                "changed",
                f"{row.width} x {row.height} pixels when its regions were found, "
                f"{image.shape[1]} x {image.shape[0]} now",
            )
        return image_id, image, row

    def __call__(self, items: list[tuple[str, Pixels, ImageRow | None]]) -> list[ImageRow]:
        """Return the images' rows with features."""
        names, images, rows = zip(*items, strict=True)
        if self.regions is None:
            return map_batch(images, names, self.backbone, self.dtype)
        return extract_batch(images, rows, self.backbone, self.dtype)


def _stage_elsewhere(
    workspace: Workspace,
    folder: Path | None,
    weights: Path | None,
    device: str,
    settings: Mapping[str, Any],
) -> ExtractStage:
    """Return the stage of a features plan in a worker process, which may be on another host."""
    manifest = BackboneManifest(name=settings["backbone"], summary="", **settings["adapter"])
    images = read_images(workspace)
    regions = None if folder is None else FeatureStore(folder)
    batch_size = settings["batch_size"]
    source = _load(manifest, regions, weights=weights, device=device, batch_size=batch_size)
    seen = {
        **source.provenance,
        "images": images_fingerprint(workspace, images),
        "boxes": "" if regions is None else regions.fingerprint,
    }
    require_planned(seen, settings, workspace)
    return ExtractStage(source, Photographs(workspace, images), regions, settings["dtype"])


class FeaturePipeline:
    """The detector and backbone that made a store's features, for images outside of it."""

    def __init__(self, store: FeatureStore, *, device: str = "auto") -> None:
        """Rebuild both from the store's settings.

        Raises MismatchError where their weights are no longer the same, InputError for boxes that
        came from a file and for features that were imported.
        """
        settings = store.metadata
        if "source" in settings:
            raise InputError(
                "these features were imported, and nobody here knows what made them",
                where=store.folder,
                mend="Caption the images that they are of: `prep caption --split test`.",
            )
        manifest = BackboneManifest(name=settings["backbone"], summary="", **settings["adapter"])
        self.dtype: DType = settings["dtype"]
        self.detector: Detector | None = None
        self.selection: Selection | None = None
        if not settings["grid"]:
            self.detector, self.selection = rebuild(_regions_settings(settings), device=device)
        resources = backbones.Resources(
            noted(settings, "weights"), self.detector, settings["batch_size"], device
        )
        self.backbone = backbones.load(manifest, resources)
        require_same_weights(self.backbone.provenance, settings, manifest.name)

    def __call__(self, images: Sequence[Pixels], image_ids: Sequence[str]) -> list[ImageRow]:
        """Return each image's row, as the stages would have stored it."""
        if self.detector is None or self.selection is None:
            return map_batch(images, image_ids, self.backbone, self.dtype)
        rows = detect_batch(images, self.detector, self.selection, image_ids)
        return extract_batch(images, rows, self.backbone, self.dtype)


def _backbone(workspace: Workspace, name: str | None) -> BackboneManifest:
    name = name or workspace.dataset.defaults.backbone
    if name is None:
        raise InputError(
            "no backbone is named, and the dataset has no default",
            where="prep extract",
            mend=f"Name one with --backbone: {', '.join(names('backbones'))}, timm:NAME or "
            "open_clip:NAME/TAG.",
        )
    return backbones.manifest(name)


def _load(
    manifest: BackboneManifest,
    regions: FeatureStore | None,
    *,
    weights: Path | None,
    device: str,
    batch_size: int | None,
) -> Backbone:
    detector = None
    if manifest.library == "roi" and regions is not None:
        detector = _pooling_detector(regions.metadata, device)
    resources = backbones.Resources(weights, detector, batch_size, device)
    return backbones.load(manifest, resources)


def _pooling_detector(settings: Mapping[str, Any], device: str) -> Detector:
    """Return the detector that found the boxes; InputError where it is no network."""
    name = settings["detector"]
    if settings["adapter"]["kind"] in ("boxes", "grid", "whole"):
        raise InputError(
            f"detector '{name}' is no network, so it has no features of its own to pool",
            mend="Take a backbone other than 'roi', or regions of a detector that is a network.",
        )
    return rebuild(settings, device=device)[0]


def _parts(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a regions plan's settings for features to carry: what binds them, and the notes."""
    binding = {key: settings[key] for key in settings if key not in ("stage", *UNBOUND)}
    return binding, settings.get("notes", {})


def _regions_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the regions that features were made of, with their notes."""
    return {**settings["regions"], "notes": settings["notes"].get("regions", {})}


def _require_same_images(plan: Plan, regions: FeatureStore, images: str) -> None:
    missing = [image_id for image_id in plan.image_ids if image_id not in regions]
    if missing:
        raise MissingError(
            f"{len(missing)} of the {len(plan.image_ids)} images have no regions "
            f"({', '.join(missing[:3])})",
            where=regions.folder,
            mend=f"Make them: `prep detect --detector {regions.folder.name} --force`.",
        )
    if regions.metadata["images"] != images:
        raise MismatchError(
            "these regions are of images under other paths or of other sizes than images.parquet "
            "has now",
            where=regions.folder,
            mend=f"Make them anew: `prep detect --detector {regions.folder.name} --force`.",
        )


def _map_row(name: str, image: Pixels, cells: FeatureMap, dtype: DType) -> ImageRow:
    height, width = image.shape[:2]
    return ImageRow(
        name,
        width,
        height,
        cells.boxes,
        np.ones(len(cells.boxes), np.float32),
        np.zeros(len(cells.boxes), np.int32),
        _stored(cells.features, dtype),
        grid_height=cells.height,
        grid_width=cells.width,
    )


def _stored(features: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Return features as they are stored; the writer marks a row with an overflow."""
    with np.errstate(over="ignore"):
        return features.astype(dtype)
