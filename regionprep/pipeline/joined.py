"""Several backbones' features of the same boxes, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from regionprep.errors import InputError, MismatchError
from regionprep.pipeline.shards import ImageRow
from regionprep.pipeline.store import Batch, FeatureStore, Rows, pad_rows


class JoinedStore(Rows):
    """Stores of the same images and boxes as one, joined by image id.

    A row's features are those of all stores one after the other, in the order given: (regions, sum
    of the widths), a copy. `each` and `get_batches` keep them apart, and views of the files. An
    image that failed in one store has failed.

    Raises MismatchError where the stores' features are not of the same boxes, told by the
    fingerprint of the regions that they were made of, or not of the same images.
    """

    def __init__(self, *stores: FeatureStore) -> None:
        if len(stores) < 2:
            raise InputError(f"{len(stores)} store: two or more are joined")
        for store in stores:
            _require_same(stores[0], store)
        self.stores = stores

    def __repr__(self) -> str:
        return f"JoinedStore{self.stores!r}"

    def __len__(self) -> int:
        return len(self.stores[0])

    def __contains__(self, image_id: object) -> bool:
        return image_id in self.stores[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stores[0])

    def __getitem__(self, image_id: str) -> ImageRow:
        rows = self.each(image_id)
        features = np.concatenate([row.features for row in rows if row.features is not None], 1)
        return replace(rows[0], features=features)

    @property
    def feature_width(self) -> int:
        """Return how many values a region has in all stores together."""
        return sum(store.feature_width or 0 for store in self.stores)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the joined features' type: the widest of the stores'."""
        return np.result_type(*(store.dtype for store in self.stores if store.dtype is not None))

    def each(self, image_id: str) -> tuple[ImageRow, ...]:
        """Return the image's row in every store; if one of them failed, all are as failed."""
        rows = [store[image_id] for store in self.stores]
        failed = next((row for row in rows if not row.ok), None)
        if failed is None:
            return tuple(rows)
        return tuple(_failed_as(failed, row) for row in rows)

    def get_batches(self, image_ids: Iterable[str]) -> tuple[Batch, ...]:
        """Return one padded batch a store, of the same images, boxes and mask."""
        rows = [self.each(image_id) for image_id in image_ids]
        if not rows:
            raise InputError("a batch of no images")
        return tuple(pad_rows(of_store) for of_store in zip(*rows, strict=True))

    def subset(self, image_ids: Iterable[str]) -> JoinedStore:
        """Return the joined store of some images only, in the order of the shards."""
        ids = list(image_ids)
        return JoinedStore(*(store.subset(ids) for store in self.stores))

    def split(self, name: str) -> JoinedStore:
        """Return the joined store of one split's images."""
        return JoinedStore(*(store.split(name) for store in self.stores))


def _require_same(first: FeatureStore, other: FeatureStore) -> None:
    boxes = [_boxes(store) for store in (first, other)]
    if boxes[0] != boxes[1]:
        raise MismatchError(
            f"has features of other boxes than {first.folder}: regions {boxes[1][:12]}... here, "
            f"{boxes[0][:12]}... there",
            where=other.folder,
            mend="Join features that `prep extract` made of the same regions.",
        )
    differing = sorted(set(first) ^ set(other))
    if differing:
        raise MismatchError(
            f"{len(differing):,} images are not both here and in {first.folder}: "
            + ", ".join(differing[:5]),
            where=other.folder,
            mend="Take the images of both with store.subset(ids), or make the others.",
        )


def _boxes(store: FeatureStore) -> str:
    """Return the fingerprint of the regions that a store's features are of."""
    if store.feature_width is None:
        raise MismatchError("has regions alone, and no features to join", where=store.folder)
    boxes = store.metadata.get("boxes")
    if not boxes:
        raise MismatchError(
            "does not say which regions its features are of (those of a feature map have none)",
            where=store.folder,
            mend="Join features that `prep extract` made of the same regions.",
        )
    return str(boxes)


def _failed_as(failed: ImageRow, row: ImageRow) -> ImageRow:
    assert row.features is not None, "a store without features was joined"
    return replace(failed, features=row.features[:0])
