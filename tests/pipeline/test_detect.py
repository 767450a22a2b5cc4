"""The stage that finds regions: faults stay rows, plans bind, nothing is half-written."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from regionprep import manifests, scenes
from regionprep.errors import InputError, ManifestError, MismatchError
from regionprep.pipeline import detectors
from regionprep.pipeline.detect import (
    detect_batch,
    images_fingerprint,
    rebuild,
    run_detect,
)
from regionprep.pipeline.detectors import Resources
from regionprep.pipeline.detectors.scenes import ScenesDetector
from regionprep.pipeline.selection import Selection
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.tables import read_images
from regionprep.scenes.detector import WEIGHTS


def detected(workspace, detector="scenes", **options):
    options = {"progress": False, "device": "cpu"} | options
    return run_detect(workspace, detector, **options)


@pytest.fixture
def other_weights(tmp_path):
    """Return weights of the embedded detector that differ from the shipped ones."""
    tensors = load_file(WEIGHTS)
    name = next(iter(tensors))
    path = tmp_path / "other.safetensors"
    save_file(tensors | {name: tensors[name] * 1.01}, path)
    return path


def test_an_image_that_cannot_be_used_is_a_row_with_its_reason(workspace):
    outcome = detected(workspace, "whole")
    store = FeatureStore(outcome.folder)
    assert store.statuses == {"ok": 5, "not_an_image": 1}
    broken = store["9-broken"]
    assert broken.error
    assert len(broken.boxes) == 0
    assert store["0"].boxes.tolist() == [[0, 0, 64, 48]]


def test_a_finished_folder_is_kept_and_no_model_loaded(workspace, monkeypatch):
    detected(workspace)
    monkeypatch.setattr(ScenesDetector, "build", lambda self: pytest.fail("a model was loaded"))
    again = detected(workspace)
    assert (again.shards_made, again.shards_kept) == (0, 1)


def test_a_shard_size_holds_until_another_is_asked_for(workspace):
    assert detected(workspace, "whole", shard_size=4).shards_made == 2
    assert detected(workspace, "whole").shards_kept == 2
    with pytest.raises(MismatchError, match="shard_size was 4, is 3"):
        detected(workspace, "whole", shard_size=3)
    assert detected(workspace, "whole", force=True).shards_made == 1


def test_another_threshold_is_refused_with_both_values_until_forced(workspace):
    detected(workspace)
    with pytest.raises(MismatchError, match=r"score_threshold was 0\.2, is 0\.9"):
        detected(workspace, score_threshold=0.9)
    assert detected(workspace, score_threshold=0.9, force=True).shards_made == 1


def test_other_weights_are_refused_with_their_fingerprints(workspace, other_weights):
    detected(workspace)
    with pytest.raises(MismatchError, match=r"weights\.sha256 was [0-9a-f]{64}, is [0-9a-f]{64}"):
        detected(workspace, weights=other_weights)


def test_moving_the_weights_changes_no_plan(workspace, tmp_path):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "one.safetensors", tmp_path / "a" / "two.safetensors"):
        path.write_bytes(WEIGHTS.read_bytes())
        outcome = detected(workspace, weights=path)
    assert outcome.shards_kept == 1


def test_wrong_weights_leave_nothing_behind(workspace, tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "wrong.safetensors")
    with pytest.raises(MismatchError, match="do not fit"):
        detected(workspace, weights=tmp_path / "wrong.safetensors")
    assert not workspace.regions("scenes").exists()


def test_new_splits_leave_regions_as_they_are(workspace):
    before = images_fingerprint(workspace, read_images(workspace))
    detected(workspace, "grid")
    make_splits(workspace, seed=3, val=2, test=1)
    assert images_fingerprint(workspace, read_images(workspace)) == before
    assert detected(workspace, "grid").shards_made == 0


def test_new_images_are_told(workspace, photographs):
    detected(workspace, "grid")
    Image.new("RGB", (9, 9)).save(photographs / "new.png")
    make_splits(workspace)
    with pytest.raises(MismatchError, match=r"1 images are new \(new\)"):
        detected(workspace, "grid")


@pytest.mark.parametrize("option", ["min_boxes", "score_threshold", "nms_threshold"])
@pytest.mark.parametrize("detector", ["grid", "whole"])
def test_thresholds_are_refused_where_boxes_are_taken_as_they_are(workspace, detector, option):
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} has no use"):
        detected(workspace, detector, **{option: 1})
    assert not workspace.regions(detector).exists()


def test_fewer_cells_than_there_are_may_be_asked_for(workspace):
    store = FeatureStore(detected(workspace, "grid", max_boxes=5).folder)
    assert len(store["0"].boxes) == 5


def test_at_least_and_at_most_must_agree(workspace):
    with pytest.raises(InputError, match="at least 30 and at most 20"):
        detected(workspace, min_boxes=30)


def test_a_misspelt_detector_is_told(workspace):
    with pytest.raises(ManifestError, match="Did you mean 'scenes'"):
        detected(workspace, "scene")


def test_a_detector_of_ones_own_is_a_file(workspace, tmp_path):
    (tmp_path / "fine.yaml").write_text(
        "summary: A fine grid\nkind: grid\nmax_boxes: 400\noptions: {rows: 20, columns: 20}\n"
    )
    outcome = detected(workspace, str(tmp_path / "fine.yaml"))
    assert outcome.folder == workspace.regions("fine")
    assert outcome.regions == 5 * 100 * 4


def test_ten_thousand_boxes_an_image(workspace, tmp_path):
    rng = np.random.default_rng(0)
    boxes = [
        {"image_id": 0, "category_id": 1, "bbox": [*rng.uniform(0, 30, 4).tolist()], "score": 0.5}
        for _ in range(10_000)
    ]
    (tmp_path / "boxes.json").write_text(json.dumps(boxes))
    outcome = detected(workspace, "boxes", boxes_file=tmp_path / "boxes.json", max_boxes=10_000)
    store = FeatureStore(outcome.folder)
    assert len(store["0"].boxes) == 10_000
    assert store["1"].ok
    assert len(store["1"].boxes) == 0


def test_what_decided_the_boxes_is_recorded(workspace):
    told = FeatureStore(detected(workspace, nms_threshold=0.4).folder).metadata
    assert told["stage"] == "regions"
    assert told["detector"] == "scenes"
    assert told["classes"] == list(scenes.CLASSES)
    assert told["selection"]["nms_threshold"] == 0.4
    assert len(told["weights"]["sha256"]) == 64
    assert told["notes"] == {"device": "cpu"}
    assert {"torch", "torchvision"} <= told["versions"].keys()


def test_regions_come_most_confident_first_and_hold_to_the_selection():
    image = scenes.draw(scenes.scene(1, 1))
    detector = detectors.load(manifests.load("detectors", "scenes"), Resources(device="cpu"))
    [row] = detect_batch([image], detector, Selection(4, 5, 0.9999, 0.3))
    assert 4 <= len(row.boxes) <= 5
    assert (np.diff(row.scores) <= 0).all()
    assert row.boxes.dtype == row.scores.dtype == np.float32
    assert row.classes.dtype == np.int32
    assert (row.width, row.height) == (scenes.WIDTH, scenes.HEIGHT)


def test_a_detector_is_rebuilt_from_what_was_recorded(workspace, other_weights):
    store = FeatureStore(detected(workspace, weights=other_weights, score_threshold=0.4).folder)
    detector, selection = rebuild(store.metadata, device="cpu")
    assert selection.score_threshold == 0.4
    image = np.asarray(Image.open(workspace.image_root() / "1.png"))
    [row] = detect_batch([image], detector, selection, ["1"])
    np.testing.assert_allclose(row.boxes, store["1"].boxes, atol=1e-3)
    np.testing.assert_allclose(row.scores, store["1"].scores, atol=1e-5)


def test_weights_that_changed_since_are_refused(workspace, other_weights):
    store = FeatureStore(detected(workspace, weights=other_weights).folder)
    other_weights.write_bytes(WEIGHTS.read_bytes())
    with pytest.raises(MismatchError, match=r"other\.safetensors(.|\n)*are not those"):
        rebuild(store.metadata)
    other_weights.unlink()
    with pytest.raises(MismatchError, match="Put that file back"):
        rebuild(store.metadata)


def test_boxes_out_of_a_file_are_not_rebuilt(workspace, tmp_path):
    (tmp_path / "boxes.json").write_text(
        json.dumps([{"image_id": "1", "category_id": 1, "bbox": [1, 1, 9, 9], "score": 1}])
    )
    store = FeatureStore(detected(workspace, "boxes", boxes_file=tmp_path / "boxes.json").folder)
    with pytest.raises(InputError, match="came from a file"):
        rebuild(store.metadata)
