"""Make one folder of several that hold other images under the same settings.

The merged folder is, byte for byte, the one that a single run over all the images would have made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regionprep.errors import InputError, MismatchError, MissingError, StorageError
from regionprep.pipeline.executor import Outcome, run_plan
from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.shards import UNBOUND, Columns, ImageRow, Plan, flat
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.verify import verify
from regionprep.workspace import Workspace

BATCH = 64


def merge(
    target: Path,
    sources: Sequence[Path],
    *,
    shard_size: int | None = None,
    force: bool = False,
    progress: bool = True,
) -> Outcome:
    """Make `target` of finished folders made of disjoint image ids under the same settings.

    `shard_size` is that of the sources unless it is given. Which images there were (and, of
    features, which regions) is a part of the settings that differs among sources of other
    workspaces: then `target` has to lie in a workspace of all the images, whose own tables and
    merged regions say what a single run would have recorded.

    Raises MismatchError naming the settings that differ, InputError naming ids that occur twice,
    StorageError where a source is damaged, and what opening a store and `run_plan` raise.
    """
    target = target.absolute()
    folders = [source.absolute() for source in sources]
    if target.resolve() in [folder.resolve() for folder in folders]:
        raise InputError("is the target and a source", where=target, mend="Name a new folder.")
    stores = [FeatureStore(folder) for folder in folders]
    _require_disjoint(stores)
    plan = _plan(target, stores, shard_size)
    for folder in folders:
        _require_whole(folder)
    stage = MergeStage(stores)
    return run_plan(plan, target, lambda: stage, force=force, progress=progress)


class MergeStage:
    """The rows of several stores, by image id: the stage that the executor runs."""

    batch_size = BATCH

    def __init__(self, stores: Sequence[FeatureStore]) -> None:
        self.stores = {image_id: store for store in stores for image_id in store}
        self.schema = _columns(stores[0])

    def read(self, image_id: str) -> ImageRow:
        """Return the image's row, or raise the ImageFault that it records."""
        row = self.stores[image_id][image_id]
        if not row.ok:
            raise ImageFault(row.status, row.error, width=row.width, height=row.height)
        return row

    def __call__(self, items: list[ImageRow]) -> list[ImageRow]:
        """Return the rows as they are."""
        return items


def _columns(store: FeatureStore) -> Columns:
    return store.manifest.columns


def _require_disjoint(stores: Sequence[FeatureStore]) -> None:
    counts = Counter(image_id for store in stores for image_id in store)
    twice = sorted(image_id for image_id, count in counts.items() if count > 1)
    if not twice:
        return
    holders = [str(store.folder) for store in stores if twice[0] in store]
    named = ", ".join(twice[:5]) + (", ..." if len(twice) > 5 else "")
    raise InputError(
        f"{len(twice):,} image ids occur more than once: {named} ({twice[0]} in "
        f"{' and in '.join(holders)})",
        mend="Merge folders of different images.",
    )


def _require_whole(folder: Path) -> None:
    """Raise StorageError for a source of which a part is not as its manifest says."""
    for fault in verify(folder):
        if fault.kind not in ("surplus", "leftover"):
            raise StorageError(f"{fault.kind}: {fault.what}", where=fault.path, mend=fault.mend)


def _plan(target: Path, stores: Sequence[FeatureStore], shard_size: int | None) -> Plan:
    first = stores[0].plan
    image_ids = [image_id for store in stores for image_id in store]
    told = [_bound(store, shard_size) for store in stores]
    differing = {
        key
        for one in told
        for key in one.keys() | told[0].keys()
        if one.get(key) != told[0].get(key)
    }
    settings: dict[str, Any] = dict(first.settings)
    of_images = {"images", "regions.images"} | ({"boxes"} if first.stage == "features" else set())
    if differing - of_images:
        raise _other_settings(stores, told, sorted(differing - of_images))
    if differing:
        settings |= _of_workspace(target, stores, image_ids, sorted(differing), told)
    settings |= _recorded(stores)
    return Plan.make(
        image_ids,
        stage=first.stage,
        settings=settings,
        shard_size=shard_size or first.shard_size,
    )


def _bound(store: FeatureStore, shard_size: int | None) -> dict[str, Any]:
    """Return all that has to be the same of every source, flat."""
    columns = _columns(store)
    told = {key: value for key, value in store.plan.settings.items() if key not in UNBOUND}
    size = {} if shard_size else {"shard_size": store.plan.shard_size}
    width, dtype = columns.feature_width, columns.dtype
    return {
        **flat(told),
        **size,
        "stage": store.plan.stage,
        "feature_width": width,
        "stored as": dtype,
    }


def _other_settings(
    stores: Sequence[FeatureStore], told: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> MismatchError:
    place = next(n for n, one in enumerate(told) if any(one.get(k) != told[0].get(k) for k in keys))
    unset = "not set"
    named = "; ".join(
        f"{key} is {told[place].get(key, unset)}, there {told[0].get(key, unset)}"
        for key in keys
        if told[place].get(key) != told[0].get(key)
    )
    return MismatchError(
        f"was made under other settings than {stores[0].folder}: {named}",
        where=stores[place].folder,
        mend="Make them under the same settings"
        + (", or give a --shard-size." if "shard_size" in keys else "."),
    )


def _of_workspace(
    target: Path,
    stores: Sequence[FeatureStore],
    image_ids: Sequence[str],
    keys: Sequence[str],
    told: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the settings that tell of the images, as a run in the target's workspace has them."""
    from regionprep.pipeline.tables import images_fingerprint, read_images

    try:
        workspace = Workspace.find(target.parent)
    except MissingError:
        raise _other_settings(stores, told, keys) from None
    images = read_images(workspace)
    if sorted(image_ids) != [image.image_id for image in images]:
        raise MismatchError(
            f"the sources have {len(image_ids):,} images, and images.parquet {len(images):,}, or "
            "others",
            where=workspace.images,
            mend="Merge into a workspace of just these images.",
        )
    fingerprint = images_fingerprint(workspace, images)
    settings = {"images": fingerprint}
    regions = stores[0].metadata.get("regions")
    if stores[0].plan.stage == "regions" or not regions:
        return settings
    merged = FeatureStore(workspace.regions(str(stores[0].metadata["detector"])))
    _require_boxes(stores, merged)
    return settings | {
        "regions": {**regions, "images": fingerprint},
        "boxes": merged.fingerprint,
    }


def _require_boxes(stores: Sequence[FeatureStore], regions: FeatureStore) -> None:
    """Raise MismatchError where features are of other boxes than the target's regions."""
    for store in stores:
        for row in store.rows():
            known = row.image_id in regions
            if row.ok and not (known and _same_boxes(row, regions[row.image_id])):
                raise MismatchError(
                    f"{row.image_id} has other boxes than in {regions.folder}",
                    where=store.folder,
                    mend="Merge the regions that these features were made of first.",
                )


def _same_boxes(one: ImageRow, two: ImageRow) -> bool:
    return one.boxes.tobytes() == two.boxes.tobytes()


def _recorded(stores: Sequence[FeatureStore]) -> dict[str, Any]:
    """Return what the sources record without being bound to it: of differing versions, all."""
    versions: dict[str, str] = {}
    every = [store.plan.settings.get("versions", {}) for store in stores]
    for library in sorted({library for one in every for library in one}):
        found = sorted({one[library] for one in every if library in one})
        versions[library] = ", ".join(found)
    return {"versions": versions}
