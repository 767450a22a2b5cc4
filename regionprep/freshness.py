"""Whether what a stage made belongs to what is there now, told by fingerprints alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regionprep.errors import PrepError
from regionprep.workspace import Workspace

if TYPE_CHECKING:
    from regionprep.training.runs import RunConfig


@dataclass(frozen=True)
class Stale:
    """Why what is there cannot be gone on with, and the command that makes it anew."""

    why: str
    command: str


@dataclass(frozen=True)
class Tables:
    """What the tables of a workspace say: the split of every image, and their fingerprints."""

    splits: dict[str, str]
    images: str
    dataset: str

    @classmethod
    def read(cls, workspace: Workspace) -> Tables | None:
        """Return what the tables say, None before `prep splits`; StorageError if damaged."""
        from regionprep.pipeline.tables import dataset_fingerprint, images_fingerprint, read_images

        if not workspace.images.is_file():
            return None
        images = read_images(workspace)
        splits = {image.image_id: image.split for image in images}
        return cls(splits, images_fingerprint(workspace, images), dataset_fingerprint(workspace))

    def ids(self, split: str) -> set[str]:
        """Return the ids of a split's images."""
        return {image_id for image_id, its in self.splits.items() if its == split}


def stale_vocabulary(workspace: Workspace, tables: Tables) -> Stale | None:
    """Return what is wrong with the vocabulary, None if it was made from these tables."""
    from regionprep.pipeline.vocab import BpeVocabulary, Vocabulary, WordVocabulary

    command = "prep vocab"
    try:
        vocabulary = Vocabulary.load(workspace.vocabulary)
    except PrepError as error:
        return Stale(error.what, command)
    if vocabulary.dataset == tables.dataset:
        return None
    if isinstance(vocabulary, BpeVocabulary):
        command += f" --bpe {shlex.quote(vocabulary.tokenizer)}"
    if isinstance(vocabulary, WordVocabulary):
        command += f" --min-count {vocabulary.min_count}"
    return Stale(
        "it was made from other images, captions or splits",
        f"{command} --max-length {vocabulary.max_length}",
    )


def stale_shards(
    folder: Path, tables: Tables, command: str, *, regions: Path | None = None
) -> Stale | None:
    """Return what is wrong with regions or features, None if they are of these images.

    Features are held against `regions` too, where they were made of boxes that are still there.
    """
    from regionprep.pipeline.shards import Plan
    from regionprep.pipeline.store import FeatureStore

    try:
        store = FeatureStore(folder)
    except PrepError as error:
        force = " --force" if "--force" in (error.mend or "") else ""
        return Stale(error.what, command + force)
    made = store.metadata
    again = f"{command}{_options(made)} --force"
    there, now = set(store), set(tables.splits)
    if there != now:
        counts = f"{len(now - there)} images are new, {len(there - now)} are gone"
        return Stale(f"{counts} since it was made", again)
    if made.get("images", tables.images) != tables.images:
        return Stale("images have other paths or sizes than when it was made", again)
    if regions is not None and made.get("boxes"):
        try:
            boxes = Plan.read(regions)
        except PrepError:
            return None  # told where the regions are looked at
        if boxes is not None and boxes.fingerprint != made["boxes"]:
            return Stale(f"{regions.parent.name}/{regions.name} has other boxes by now", again)
    return None


def _options(made: dict[str, object]) -> str:
    """Return the options of the command that recorded files and a type, for giving it again."""
    notes = made.get("notes")
    files = notes if isinstance(notes, dict) else {}
    told = [
        f" --{name} {shlex.quote(files[name])}" for name in ("weights", "boxes") if name in files
    ]
    return "".join(told) + (" --dtype float32" if made.get("dtype") == "float32" else "")


def stale_run(
    workspace: Workspace, config: RunConfig, tables: Tables, command: str
) -> Stale | None:
    """Return what a run was trained on that is no longer there, None if all of it is."""
    from regionprep.pipeline import shards
    from regionprep.pipeline.store import FeatureStore
    from regionprep.pipeline.vocab import Vocabulary

    pair = f"{config.detector} + {config.backbone}"
    folder = workspace.features(config.detector, config.backbone)
    try:
        features = FeatureStore(folder).fingerprint
    except PrepError as error:
        make = shards.command("features", folder)
        return Stale(f"run '{config.name}' was trained on {pair}: {error.what}", make)
    try:
        vocabulary = Vocabulary.load(workspace.vocabulary).fingerprint
    except PrepError:
        return None  # told where the vocabulary is looked at
    differ = [
        name
        for name, then, now in (
            ("images, captions or splits", config.dataset, tables.dataset),
            (f"features of {pair}", config.features, features),
            ("a vocabulary", config.vocabulary, vocabulary),
        )
        if then != now
    ]
    if not differ:
        return None
    return Stale(f"it was trained on other {', '.join(differ)}", f"{command} --force")


def stale_results(path: Path, wanted: Iterable[str], command: str) -> Stale | None:
    """Return what is wrong with captions or scores, None if they are of these images."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        told = content["per_image"] if isinstance(content, dict) else content
        ids = {str(row["image_id"]) if isinstance(row, dict) else row for row in told}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Stale(f"{path.name} is damaged: {error}", command)
    return None if ids == set(wanted) else Stale(f"{path.name} is of other images", command)
