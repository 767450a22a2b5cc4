"""Folders of other images under the same settings become one, as if made at once."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from dummy_stage import COLUMNS, DummyStage, contents, plan

from regionprep import FeatureStore
from regionprep.errors import InputError, MismatchError, StorageError
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.detect import run_detect
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.extract import run_extract
from regionprep.pipeline.merge import merge
from regionprep.pipeline.shards import Columns
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.verify import verify

IDS = [*(f"image-{number:02d}" for number in range(24)), "image-bad"]


def made(folder, ids, columns=COLUMNS, shard_size=10, **settings):
    run_plan(plan(ids, shard_size, **settings), folder, lambda: DummyStage(columns), progress=False)
    return folder


def merged(target, *sources, **options):
    return merge(target, sources, progress=False, **options)


def test_a_merged_folder_is_the_one_made_at_once(tmp_path):
    sources = [made(tmp_path / str(n), IDS[n::3], weights={"sha256": "1"}) for n in range(3)]
    outcome = merged(tmp_path / "target", *sources)
    assert (outcome.images, outcome.failed) == (25, 1)
    once = made(tmp_path / "once", IDS, weights={"sha256": "1"})
    assert contents(tmp_path / "target") == contents(once)
    assert merged(tmp_path / "target", *sources).shards_made == 0


def test_an_interrupted_merge_goes_on(tmp_path):
    sources = [made(tmp_path / str(n), IDS[n::2]) for n in range(2)]
    merged(tmp_path / "target", *sources)
    whole = contents(tmp_path / "target")
    (tmp_path / "target" / "part-00001.parquet").unlink()
    assert merged(tmp_path / "target", *sources).shards_made == 1
    assert contents(tmp_path / "target") == whole


def test_ids_that_occur_twice_are_named(tmp_path):
    one, two = made(tmp_path / "1", IDS[:10]), made(tmp_path / "2", IDS[8:])
    with pytest.raises(InputError, match="2 image ids occur more than once: image-08, image-09"):
        merged(tmp_path / "target", one, two)
    with pytest.raises(InputError, match="is the target and a source"):
        merged(one, one)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": {"sha256": "2"}}, r"weights\.sha256 is 2, there 1"),
        ({"extra": 1}, "extra is 1, there not set"),
        ({"columns": Columns(8, "float32")}, "stored as is float32, there float16"),
        ({"columns": Columns(9)}, "feature_width is 9, there 8"),
        ({"shard_size": 4}, "shard_size is 4, there 10"),
    ],
)
def test_settings_that_differ_are_named(tmp_path, options, named):
    one = made(tmp_path / "1", IDS[:10], weights={"sha256": "1"})
    two = made(tmp_path / "2", IDS[10:], **{"weights": {"sha256": "1"}} | options)
    with pytest.raises(MismatchError, match=named) as caught:
        merged(tmp_path / "target", one, two)
    assert str(one) in str(caught.value)
    assert caught.value.where == two


def test_a_shard_size_may_be_given(tmp_path):
    sources = made(tmp_path / "1", IDS[:10]), made(tmp_path / "2", IDS[10:], shard_size=4)
    merged(tmp_path / "target", *sources, shard_size=7)
    assert contents(tmp_path / "target") == contents(made(tmp_path / "once", IDS, shard_size=7))


def test_versions_that_differ_are_recorded_and_bind_nobody(tmp_path):
    one = made(tmp_path / "1", IDS[:10], versions={"torch": "2.6"}, notes={"device": "cpu"})
    two = made(tmp_path / "2", IDS[10:], versions={"torch": "2.7"}, notes={"device": "cuda"})
    merged(tmp_path / "target", one, two)
    assert FeatureStore(tmp_path / "target").metadata["versions"]["torch"] == "2.6, 2.7"


def test_a_damaged_source_is_refused(tmp_path):
    sources = made(tmp_path / "1", IDS[:10]), made(tmp_path / "2", IDS[10:])
    path = sources[1] / "part-00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"part-00001\.parquet: altered"):
        merged(tmp_path / "target", *sources)
    assert not (tmp_path / "target").exists()


# Workspaces: which images there are is a part of the settings.


@pytest.fixture
def parts_and_whole(tmp_path, photographs, timm_weights):
    """Return two workspaces of some photographs each and one of all, described but the last."""

    def described(name, keep, describe=True):
        images = tmp_path / name / "photographs"
        images.mkdir(parents=True)
        for path in photographs.iterdir():
            if keep(path.name):
                shutil.copy(path, images)
        made = initialise(tmp_path / name / "work", dataset=None, images=images, captions=[])
        make_splits(made)
        if describe:
            stages(made)
        return made

    def stages(workspace):
        run_detect(workspace, "grid", max_boxes=4, progress=False)
        weights = timm_weights("test_resnet", 0)
        options = {"device": "cpu", "progress": False, "batch_size": 1}
        run_extract(workspace, "grid", "timm:test_resnet", weights=weights, **options)

    low = described("low", lambda name: name < "2")
    high = described("high", lambda name: name >= "2")
    return low, high, described("all", lambda name: True, describe=False), stages


def test_workspaces_become_one_as_if_made_at_once(parts_and_whole, tmp_path):
    low, high, whole, stages = parts_and_whole
    pair = ("grid", "timm-test_resnet")
    with pytest.raises(MismatchError, match="images is "):
        merged(tmp_path / "nowhere", low.regions("grid"), high.regions("grid"))
    regions, features = whole.regions("grid"), whole.features(*pair)
    merged(regions, low.regions("grid"), high.regions("grid"))
    merged(features, low.features(*pair), high.features(*pair))
    assert verify(features) == verify(regions) == []
    before = contents(regions), contents(features)
    stages(whole)
    assert (contents(regions), contents(features)) == before
    shutil.rmtree(regions)
    shutil.rmtree(features)
    stages(whole)
    assert (contents(regions), contents(features)) == before


def test_features_of_other_boxes_than_the_target_s_are_refused(parts_and_whole):
    low, high, whole, _ = parts_and_whole
    pair = ("grid", "timm-test_resnet")
    run_detect(whole, "grid", max_boxes=1, progress=False)
    with pytest.raises(MismatchError, match="0 has other boxes than in"):
        merged(whole.features(*pair), low.features(*pair), high.features(*pair))
    with pytest.raises(MismatchError, match=r"4 images, and images\.parquet 6"):
        merged(whole.regions("other"), low.regions("grid"), other_images(low))


def other_images(workspace):
    """Return a folder of regions under the workspace's settings, and for no image of its own."""
    folder = workspace.regions("more")
    store = FeatureStore(workspace.regions("grid"))
    ids = [f"other-{name}" for name in store]
    moved = replace(
        store.plan, image_ids=tuple(ids), settings={**store.plan.settings, "images": ""}
    )
    run_plan(moved, folder, lambda: DummyStage(Columns()), progress=False)
    return folder
