"""A stage that needs no images: rows drawn from each id, the same in every process."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np

from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.shards import Columns, ImageRow, Plan
from regionprep.pipeline.store import FeatureStore

BAD = "bad"
COLUMNS = Columns(8, "float16")


def row(image_id, columns, longest=6):
    """Return the row of an id: up to `longest` regions, none for some."""
    seed = int.from_bytes(hashlib.sha256(image_id.encode()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    regions = int(rng.integers(0, longest + 1))
    width = columns.feature_width
    return ImageRow(
        image_id,
        int(rng.integers(1, 5000)),
        int(rng.integers(1, 5000)),
        rng.random((regions, 4), np.float32) * 100,
        rng.random(regions, np.float32),
        rng.integers(0, 90, regions).astype(np.int32),
        None if width is None else rng.normal(size=(regions, width)).astype(columns.dtype),
    )


class DummyStage:
    """Draws rows; ids that hold "bad" fail; counts its calls."""

    def __init__(self, columns=COLUMNS, *, batch_size=4, pause=0.0, longest=6):
        self.schema, self.batch_size = columns, batch_size
        self.pause, self.longest = pause, longest
        self.batches = []

    def read(self, image_id):
        if BAD in image_id:
            raise ImageFault("truncated", f"{image_id} ends early", width=3, height=4)
        return image_id

    def __call__(self, items):
        time.sleep(self.pause)
        self.batches.append(list(items))
        return [row(name, self.schema, self.longest) for name in items]


def image_ids(count):
    return [f"image-{number:04d}" for number in range(count)]


def plan(ids, shard_size=10, **settings):
    ids = image_ids(ids) if isinstance(ids, int) else ids
    return Plan.make(ids, stage="features", settings=settings, shard_size=shard_size)


def contents(folder):
    """Return what the folder's files hold, without those of the lock."""
    return {
        path.name: path.read_bytes()
        for path in sorted(Path(folder).iterdir())
        if not path.name.startswith(".lock")
    }


def same_rows(first, second):
    names = ("image_id", "width", "height", "status", "error", "grid_height", "grid_width")
    arrays = ("boxes", "scores", "classes", "features")
    for name in names:
        assert getattr(first, name) == getattr(second, name), name
    for name in arrays:
        one, two = getattr(first, name), getattr(second, name)
        if one is None or two is None:
            assert one is two
        else:
            assert one.dtype == two.dtype and one.shape == two.shape, name
            np.testing.assert_array_equal(one, two)


def read_features(store, names, queue):
    """Put what a child process reads into a queue; here, where a spawned one imports little."""
    queue.put([np.array(store[name].features) for name in names])


def collate_views(rows):
    """Return rows as a loader's batch, and whether all values were views of the file."""
    views = all(not (found.features.flags.owndata or found.boxes.flags.owndata) for found in rows)
    return FeatureStore.collate(rows), views
