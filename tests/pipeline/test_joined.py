"""Several backbones of the same boxes as one store."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from dummy_stage import BAD, DummyStage, image_ids, plan, row

from regionprep import FeatureStore, JoinedStore
from regionprep.errors import InputError, MismatchError
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import Columns

IDS = [*image_ids(12), "image-bad"]


class Backbone(DummyStage):
    """The dummy stage's boxes, with features that tell this backbone's number."""

    def __init__(self, columns, number, failing=()):
        super().__init__(columns)
        self.number, self.failing = number, failing

    def __call__(self, items):
        return [self.described(name) for name in items]

    def described(self, name):
        found = row(name, Columns())
        shape = (len(found.boxes), self.schema.feature_width)
        features = np.full(shape, self.number, self.schema.dtype)
        if name in self.failing and len(features):
            features[0, 0] = np.nan
        return replace(found, features=features)


def made(folder, columns, number=1, ids=IDS, failing=(), shard_size=10, **settings):
    settings = {"boxes": "regions-1", "backbone": number} | settings
    run_plan(
        plan(ids, shard_size, **settings),
        folder,
        lambda: Backbone(columns, number, failing),
        progress=False,
    )
    return FeatureStore(folder)


@pytest.fixture
def stores(tmp_path):
    return (
        made(tmp_path / "a", Columns(8, "float16"), 1),
        made(tmp_path / "b", Columns(3, "float32"), 2, shard_size=4),
    )


def test_features_stand_one_after_the_other(stores):
    joined = JoinedStore(*stores)
    assert joined.ids == IDS
    assert (joined.feature_width, joined.dtype) == (11, np.float32)
    for name in IDS:
        found = joined[name]
        np.testing.assert_array_equal(found.boxes, stores[0][name].boxes)
        assert found.features.dtype == np.float32
        assert found.features.shape == (len(found.boxes), 11)
        assert (found.features[:, :8] == 1).all()
        assert (found.features[:, 8:] == 2).all()
    batch = joined.get_batch(IDS)
    assert batch.features.shape == (13, batch.mask.shape[1], 11)


def test_features_apart_are_views_of_the_files(stores):
    joined = JoinedStore(*stores)
    first, second = joined.each("image-0001")
    assert (first.features.shape[1], second.features.shape[1]) == (8, 3)
    assert not first.features.flags.owndata
    batches = joined.get_batches(IDS)
    assert [batch.features.dtype for batch in batches] == [np.float16, np.float32]
    np.testing.assert_array_equal(batches[0].mask, batches[1].mask)
    with pytest.raises(InputError, match="no images"):
        joined.get_batches([])


def test_an_image_that_failed_in_one_has_failed(tmp_path):
    name = next(name for name in IDS if BAD not in name and len(row(name, Columns()).boxes))
    joined = JoinedStore(
        made(tmp_path / "a", Columns(8), 1),
        made(tmp_path / "b", Columns(3), 2, failing=(name,)),
    )
    assert joined[name].status == "not_finite"
    assert joined[name].features.shape == (0, 11)
    assert [len(found.boxes) for found in joined.each(name)] == [0, 0]
    assert not joined.get_batch([name]).mask.any()


def test_other_boxes_are_refused(stores, tmp_path):
    other = made(tmp_path / "c", Columns(4), 3, boxes="regions-2")
    with pytest.raises(MismatchError, match=r"regions regions-2\.\.\. here, regions-1\.\.\. there"):
        JoinedStore(stores[0], other)


def test_boxes_of_no_fingerprint_are_refused(stores, tmp_path):
    grid = made(tmp_path / "grid", Columns(4), boxes="")
    with pytest.raises(MismatchError, match="does not say which regions"):
        JoinedStore(grid, grid)
    run_plan(plan(IDS), tmp_path / "regions", lambda: DummyStage(Columns()), progress=False)
    with pytest.raises(MismatchError, match="regions alone"):
        JoinedStore(stores[0], FeatureStore(tmp_path / "regions"))


def test_other_images_are_refused_and_a_subset_mends_it(stores, tmp_path):
    fewer = made(tmp_path / "c", Columns(4), 3, ids=IDS[2:])
    with pytest.raises(MismatchError, match=r"2 images are not both here .*image-0000, image-0001"):
        JoinedStore(stores[0], fewer)
    assert JoinedStore(stores[0].subset(fewer.ids), fewer).ids == IDS[2:]
    with pytest.raises(InputError, match="two or more"):
        JoinedStore(stores[0])


def test_a_joined_store_is_sent_and_cut_like_one(stores):
    joined = pickle.loads(pickle.dumps(JoinedStore(*stores).subset(IDS[:4])))
    assert (len(joined), IDS[0] in joined, IDS[5] in joined) == (4, True, False)
    batch = joined.collate([joined[name] for name in joined.order(seed=5)])
    assert batch.image_ids == tuple(joined.order(seed=5))
    assert batch.features.shape[2] == 11
