"""A workspace with features of nothing real, in which a caption names what the features show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regionprep.manifests import DatasetManifest, ModelManifest, TrainingRecipe
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import Columns, ImageRow, Plan
from regionprep.pipeline.tables import CaptionRecord, ImageRecord, write_tables
from regionprep.pipeline.vocab import make_vocabulary
from regionprep.workspace import Workspace

WIDTH = 16
COLOURS = ("red", "green", "blue", "white")
SHAPES = ("disc", "square", "star", "ring")
DETECTOR, BACKBONE = "made", "up"


class Rows:
    """A stage that gives rows made beforehand."""

    batch_size = 8

    def __init__(self, rows: dict[str, ImageRow], width: int | None) -> None:
        self.rows = rows
        self.schema = Columns(width, "float16")

    def read(self, image_id: str) -> ImageRow:
        return self.rows[image_id]

    def __call__(self, items: list[Any]) -> list[ImageRow]:
        return items


def image_id(index: int) -> str:
    return f"image-{index:04d}"


def words(index: int) -> tuple[str, str]:
    return COLOURS[index % 4], SHAPES[index // 4 % 4]


def row(index: int, *, width: int = WIDTH) -> ImageRow:
    """Return two regions, one whose features tell the colour, one the shape."""
    random = np.random.default_rng(index)
    features = random.normal(scale=0.1, size=(2, width)).astype(np.float16)
    features[0, index % 4] += 3
    features[1, 4 + index // 4 % 4] += 3
    boxes = np.array([[0, 0, 20, 20], [10, 10, 40, 30]], np.float32)
    scores, classes = np.ones(2, np.float32), np.zeros(2, np.int32)
    return ImageRow(image_id(index), 40, 30, boxes, scores, classes, features)


def captions(index: int) -> list[list[str]]:
    colour, shape = words(index)
    return [["a", colour, shape], ["there", "is", "a", colour, shape, "here"]]


def write_dataset(workspace: Workspace, splits: dict[str, Sequence[int]]) -> None:
    """Write the tables of images and captions, and the vocabulary."""
    split_of = {index: split for split, indices in splits.items() for index in indices}
    images = [ImageRecord(image_id(i), f"{i}.jpg", 40, 30, split_of[i]) for i in sorted(split_of)]
    texts = [
        CaptionRecord(image_id(index), f"{index}#{number}", " ".join(tokens), tokens)
        for index in sorted(split_of)
        for number, tokens in enumerate(captions(index))
    ]
    write_tables(workspace, images, texts)
    make_vocabulary(workspace, min_count=1, max_length=8)


def write_features(
    workspace: Workspace,
    rows: Sequence[ImageRow],
    *,
    width: int = WIDTH,
    boxes: str = "",
    force: bool = False,
) -> None:
    """Write regions and features with these rows; `boxes` names other boxes than the regions'."""
    by_id = {row.image_id: row for row in rows}
    regions = Plan.make(by_id, stage="regions", settings={"detector": DETECTOR}, shard_size=8)
    folder = workspace.regions(DETECTOR)
    run_plan(regions, folder, lambda: Rows(by_id, None), force=force, progress=False)
    settings = {"boxes": boxes or regions.fingerprint}
    plan = Plan.make(by_id, stage="features", settings=settings, shard_size=8)
    folder = workspace.features(DETECTOR, BACKBONE)
    run_plan(plan, folder, lambda: Rows(by_id, width), force=force, progress=False)


def manifest(**recipe: Any) -> ModelManifest:
    """Return a model of a few thousand weights."""
    given = {"epochs": 3, "batch_images": 6, "captions_per_image": 2, "learning_rate": 5e-3}
    return ModelManifest(
        name="tiny",
        summary="A transformer for tests.",
        captioner="transformer",
        arguments={
            "width": 16,
            "heads": 2,
            "feed_forward": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "dropout": 0.1,
        },
        training=TrainingRecipe(**(given | {"schedule": "constant"} | recipe)),
    )


def make_workspace(root: Path, *, train: int = 32, val: int = 8) -> Workspace:
    workspace = Workspace.create(root, DatasetManifest(name="made-up", summary="For tests."))
    write_dataset(workspace, {"train": range(train), "val": range(train, train + val)})
    write_features(workspace, [row(index) for index in range(train + val)])
    return workspace


def right(found: dict[str, list[str]]) -> dict[str, float]:
    """Return a score: the share of images whose caption names their colour and shape."""
    hits = [set(words(int(name[-4:]))) <= set(caption) for name, caption in found.items()]
    return {"right": sum(hits) / len(hits)}
