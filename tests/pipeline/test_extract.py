"""The stage that describes regions: what goes together, what is refused, what stays a row."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from regionprep.errors import InputError, MismatchError
from regionprep.pipeline import extract
from regionprep.pipeline.detect import Photographs, run_detect
from regionprep.pipeline.extract import FeaturePipeline, run_extract
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.verify import verify


@pytest.fixture
def extracted(workspace, timm_weights):
    """Return a function that extracts with a small network of random weights."""

    def extracted(detector=None, model="test_resnet", seed=0, **options):
        options = {"progress": False, "device": "cpu"} | options
        weights = timm_weights(model, seed)
        return run_extract(workspace, detector, f"timm:{model}", weights=weights, **options)

    return extracted


@pytest.fixture
def grid(workspace):
    return run_detect(workspace, "grid", max_boxes=6, progress=False)


def test_what_decided_the_features_is_recorded(grid, extracted):
    store = FeatureStore(extracted("grid").folder)
    told, regions = store.metadata, FeatureStore(grid.folder)
    assert (told["detector"], told["backbone"]) == ("grid", "timm-test_resnet")
    assert told["boxes"] == regions.fingerprint
    assert told["regions"]["detector"] == "grid"
    assert told["preprocessing"]["input_size"] == [3, 160, 160]
    assert len(told["weights"]["sha256"]) == 64
    assert {"torch", "timm", "open_clip_torch"} <= told["versions"].keys()
    assert not verify(store.folder)


def test_rows_keep_the_regions_they_were_made_of(grid, extracted):
    store, regions = FeatureStore(extracted("grid").folder), FeatureStore(grid.folder)
    for name in ("0", "4"):
        np.testing.assert_array_equal(store[name].boxes, regions[name].boxes)
        np.testing.assert_array_equal(store[name].scores, regions[name].scores)
        assert store[name].features.shape == (6, store.feature_width)
        assert store[name].features.dtype == np.float16


def test_how_many_crops_go_together_moves_only_the_last_digits(grid, extracted):
    few = FeatureStore(extracted("grid", batch_size=3, dtype="float32").folder)
    first = {name: few[name].features.copy() for name in few}
    many = FeatureStore(extracted("grid", batch_size=100, dtype="float32", force=True).folder)
    for name in many:
        np.testing.assert_allclose(many[name].features, first[name], rtol=1e-3, atol=1e-4)


def test_an_image_is_decoded_once(grid, extracted, monkeypatch):
    read = []
    original = Photographs.__getitem__
    monkeypatch.setattr(
        Photographs, "__getitem__", lambda self, name: read.append(name) or original(self, name)
    )
    extracted("grid")
    assert sorted(read) == ["0", "1", "2", "3", "4"]


def test_images_without_regions_are_rows_even_if_they_fill_a_batch(
    workspace, extracted, tmp_path, monkeypatch
):
    monkeypatch.setattr(extract, "IMAGES", 2)
    monkeypatch.setattr(extract.ExtractStage, "batch_size", 2)
    (tmp_path / "boxes.json").write_text(
        '[{"image_id": "4", "category_id": 1, "bbox": [1, 1, 9, 9], "score": 1}]'
    )
    run_detect(workspace, "boxes", boxes_file=tmp_path / "boxes.json", progress=False)
    store = FeatureStore(extracted("boxes").folder)
    assert [len(store[name].features) for name in "01234"] == [0, 0, 0, 0, 1]
    assert store["0"].ok


def test_an_image_that_changed_its_size_is_a_row_with_the_reason(grid, extracted, photographs):
    Image.new("RGB", (20, 10)).save(photographs / "0.png")
    store = FeatureStore(extracted("grid").folder)
    assert store["0"].status == "changed"
    assert "64 x 48 pixels when its regions were found, 20 x 10 now" in store["0"].error
    assert store["1"].ok


def test_regions_of_other_images_are_refused(workspace, grid, extracted, photographs):
    Image.new("RGB", (20, 10)).save(photographs / "0.png")
    make_splits(workspace)
    with pytest.raises(MismatchError, match="prep detect --detector grid --force"):
        extracted("grid")
    assert not (workspace.root / "features").exists()


def test_features_of_other_boxes_are_refused_until_forced(workspace, grid, extracted):
    extracted("grid")
    run_detect(workspace, "grid", max_boxes=3, force=True, progress=False)
    with pytest.raises(MismatchError, match=r"regions\.selection\.max_boxes was 6, is 3"):
        extracted("grid")
    assert extracted("grid", force=True).regions == 15


def test_other_weights_are_refused(grid, extracted):
    extracted("grid")
    with pytest.raises(MismatchError, match=r"weights\.sha256 was"):
        extracted("grid", seed=1)


def test_wrong_weights_leave_nothing_behind(workspace, grid, timm_weights):
    with pytest.raises(MismatchError, match="do not fit"):
        run_extract(workspace, "grid", "timm:test_vit", weights=timm_weights("test_resnet"))
    assert not (workspace.root / "features").exists()


def test_a_map_goes_by_a_name_of_its_own(workspace, extracted):
    outcome = extracted(grid=True)
    assert outcome.folder == workspace.features(extract.MAP, "timm-test_resnet")
    assert extracted(extract.MAP).shards_kept == 1
    store = FeatureStore(outcome.folder)
    assert store.grid == (5, 5)
    assert store.metadata["boxes"] == ""
    assert store["9-broken"].status == "not_an_image"


def test_a_map_of_a_detector_is_refused(extracted):
    with pytest.raises(InputError, match="--detector does not go with it"):
        extracted("grid", grid=True)


def test_there_is_no_map_of_pooled_features(workspace):
    with pytest.raises(InputError, match="has no feature map"):
        run_extract(workspace, None, "roi", grid=True)


def test_pooled_features_come_from_the_detector_that_found_the_boxes(workspace, tmp_path):
    from regionprep.scenes.detector import WEIGHTS

    moved = tmp_path / "detector.safetensors"
    moved.write_bytes(WEIGHTS.read_bytes())
    run_detect(workspace, "scenes", weights=moved, progress=False, device="cpu")
    outcome = run_extract(workspace, "scenes", "roi", progress=False, device="cpu")
    store = FeatureStore(outcome.folder)
    assert store.metadata["notes"]["regions"]["weights"] == str(moved)
    image = np.asarray(Image.open(workspace.image_root() / "2.png"))
    [row] = FeaturePipeline(store, device="cpu")([image], ["2"])
    np.testing.assert_allclose(
        row.features.astype(np.float32), store["2"].features.astype(np.float32), atol=2e-2
    )
    assert row.features.dtype == np.float16


def test_a_maps_pipeline_needs_no_detector(workspace, extracted):
    store = FeatureStore(extracted(grid=True).folder)
    image = np.asarray(Image.open(workspace.image_root() / "2.png"))
    [row] = FeaturePipeline(store, device="cpu")([image], ["2"])
    np.testing.assert_allclose(
        row.features.astype(np.float32), store["2"].features.astype(np.float32), atol=2e-2
    )
    assert (row.grid_height, row.grid_width) == (5, 5)
