"""Detectors that are networks, held against torchvision's own way through them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision import models
from torchvision.ops import box_iou

from regionprep import manifests, scenes
from regionprep.errors import ManifestError, MismatchError, MissingError
from regionprep.manifests import DetectorManifest
from regionprep.pipeline import detectors
from regionprep.pipeline.detect import detect_batch
from regionprep.pipeline.detectors import Resources
from regionprep.pipeline.detectors import faster_rcnn as module
from regionprep.pipeline.selection import Selection

MOBILENET = "fasterrcnn_mobilenet_v3_large_320_fpn"


@pytest.fixture(scope="module")
def drawn():
    return [scenes.scene(7, index) for index in range(12)]


@pytest.fixture(scope="module")
def images(drawn):
    return [scenes.draw(scene) for scene in drawn]


@pytest.fixture(scope="module")
def names(images):
    return [str(number) for number in range(len(images))]


@pytest.fixture(scope="module")
def embedded():
    return detectors.load(manifests.load("detectors", "scenes"), Resources(device="cpu"))


@pytest.fixture(scope="module")
def mobilenet(tmp_path_factory):
    """Return torchvision's smallest Faster R-CNN with random weights, seeing 64 pixels."""
    torch.manual_seed(0)
    network = models.get_model(MOBILENET, weights=None, weights_backbone=None)
    path = tmp_path_factory.mktemp("weights") / "mobilenet.safetensors"
    save_file(network.state_dict(), path)
    manifest = manifests.load("detectors", MOBILENET)
    small = manifest.model_copy(update={"options": {"min_size": 64, "max_size": 128}})
    return detectors.load(small, Resources(weights=path, device="cpu"))


@pytest.fixture(params=["embedded", "mobilenet"])
def detector(request):
    return request.getfixturevalue(request.param)


def test_the_embedded_detector_finds_the_true_boxes(embedded, drawn, images, names):
    rows = detect_batch(images, embedded, Selection(0, 20, 0.5, 0.3), names)
    found = total = 0
    for scene, row in zip(drawn, rows, strict=True):
        truth, classes = scenes.boxes(scene)
        overlap = box_iou(torch.from_numpy(truth), torch.from_numpy(row.boxes))
        right = torch.from_numpy(classes)[:, None] == torch.from_numpy(row.classes)[None, :]
        found += int(((overlap > 0.5) & right).any(1).sum())
        total += len(truth)
    assert total > 30
    assert found / total > 0.85


def test_candidates_are_torchvisions_scores_and_its_boxes_of_the_best_class(
    detector, images, names
):
    found = detector.detect(images[:2], names[:2])
    network = detector.network
    for image, candidates in zip(images[:2], found, strict=True):
        pixels = torch.from_numpy(image).permute(2, 0, 1) / 255
        with torch.inference_mode():
            inputs, _ = network.transform([pixels])
            maps = network.backbone(inputs.tensors)
            maps = maps if isinstance(maps, dict) else {"0": maps}
            proposals, _ = network.rpn(inputs, maps)
            heads = network.roi_heads
            pooled = heads.box_roi_pool(maps, proposals, inputs.image_sizes)
            logits, offsets = heads.box_predictor(heads.box_head(pooled))
            heads.score_thresh, heads.nms_thresh, heads.detections_per_img = 0.0, 1.0, 10**6
            theirs = heads.postprocess_detections(logits, offsets, proposals, inputs.image_sizes)
        [boxes], [scores], [labels] = theirs
        height, width = image.shape[:2]
        high, wide = inputs.image_sizes[0]
        boxes = boxes * torch.tensor([width / wide, height / high] * 2)
        top = candidates.scores.max(1)
        assert len(top) > 5
        # Each candidate is one of torchvision's own results, by score, class and place.
        for box, score, label in zip(
            candidates.boxes, top, candidates.scores.argmax(1), strict=True
        ):
            near = (scores - score).abs() + (boxes - torch.from_numpy(box)).abs().sum(1)
            best = int(near.argmin())
            assert near[best] < 1e-2
            assert labels[best] == label + 1


def test_no_image_depends_on_its_batch_mates(detector, images, names):
    together = detector.detect(images[:3], names[:3])
    for number in range(3):
        [alone] = detector.detect(images[number : number + 1], names[:1])
        np.testing.assert_allclose(together[number].boxes, alone.boxes, atol=1e-3)
        np.testing.assert_allclose(together[number].scores, alone.scores, atol=1e-5)


def test_images_of_many_shapes_keep_their_order(mobilenet, images, names):
    mixed = [images[0], images[1][:50], images[2][:, :70], images[3][:50], images[4]]
    together = mobilenet.detect(mixed, names[:5])
    for image, candidates in zip(mixed, together, strict=True):
        [alone] = mobilenet.detect([image], ["0"])
        np.testing.assert_array_equal(candidates.boxes, alone.boxes)
        assert (candidates.boxes[:, 2] <= image.shape[1]).all()
        assert (candidates.boxes[:, 3] <= image.shape[0]).all()


def test_candidates_lie_inside_the_image_and_have_area(detector, images, names):
    for image, candidates in zip(images, detector.detect(images, names), strict=True):
        boxes = candidates.boxes
        assert boxes.dtype == candidates.scores.dtype == np.float32
        assert candidates.scores.shape == (len(boxes), len(detector.classes))
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= [image.shape[1], image.shape[0]]).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_the_same_batch_gives_the_same_bytes(detector, images, names):
    first, second = (detector.detect(images[:2], names[:2]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.boxes.tobytes() == other.boxes.tobytes()
        assert one.scores.tobytes() == other.scores.tobytes()


@torch.inference_mode()
def test_a_network_gone_wrong_gives_no_candidates(mobilenet, images, names):
    bias = mobilenet.network.roi_heads.box_predictor.cls_score.bias
    before = bias.clone()
    try:
        bias.fill_(torch.nan)
        [candidates] = mobilenet.detect(images[:1], names[:1])
    finally:
        bias.copy_(before)
    assert candidates.boxes.shape == (0, 4)


def test_pooled_features_are_those_that_the_box_head_makes_of_the_proposals(detector, images):
    network, seen = detector.network, {}
    hooks = [
        network.rpn.register_forward_hook(lambda *call: seen.update(proposals=call[-1][0])),
        network.roi_heads.box_head.register_forward_hook(
            lambda *call: seen.update(features=call[-1])
        ),
        network.transform.register_forward_hook(lambda *call: seen.update(inputs=call[-1][0])),
    ]
    with torch.inference_mode():
        network([torch.from_numpy(images[0]).permute(2, 0, 1) / 255])
    for hook in hooks:
        hook.remove()
    high, wide = seen["inputs"].image_sizes[0]
    height, width = images[0].shape[:2]
    boxes = (seen["proposals"][0] * torch.tensor([width / wide, height / high] * 2)).numpy()
    [features] = detector.features(images[:1], [boxes])
    assert features.shape == (len(boxes), detector.feature_width)
    np.testing.assert_allclose(features, seen["features"].numpy(), atol=1e-3)


def test_pooling_in_parts_changes_nothing(embedded, images, monkeypatch):
    boxes = [
        np.array([[i, i, i + 30, i + 20] for i in range(count)], np.float32).reshape(-1, 4)
        for count in (7, 0, 3)
    ]
    whole = embedded.features(images[:3], boxes)
    monkeypatch.setattr(module, "HEAD_BATCH", 3)
    parts = embedded.features(images[:3], boxes)
    assert [len(some) for some in parts] == [7, 0, 3]
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_no_boxes_have_no_features(detector, images):
    none = np.zeros((0, 4), np.float32)
    found = detector.features(images[:2], [none, none])
    assert [some.shape for some in found] == [(0, detector.feature_width)] * 2


def test_classes_of_coco_leave_out_the_background(mobilenet):
    assert mobilenet.classes[0] == "person"
    assert len(mobilenet.classes) == 90


def test_the_fingerprint_of_the_weights_is_in_the_provenance(detector):
    assert len(detector.provenance["weights"]["sha256"]) == 64


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "fasterrcnn_resnet50"}, "Did you mean 'fasterrcnn_resnet50_fpn'"),
        ({"weights": "COCO_V9"}, "unknown weights.*'COCO_V9'.*Known: COCO_V1"),
        ({"options": {"min_sise": 3}}, "unknown option 'min_sise'. Did you mean 'min_size'"),
        ({"options": {"min_size": "large"}}, "options.min_size: 'large' is no int"),
    ],
)
def test_misspelt_manifests_are_told(changes, told):
    manifest = manifests.load("detectors", MOBILENET).model_copy(update=changes)
    with pytest.raises(ManifestError, match=told):
        detectors.load(manifest)


def test_weights_of_another_network_are_told(tmp_path):
    save_file({"backbone.body.0.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    manifest = manifests.load("detectors", "scenes")
    detector = detectors.load(manifest, Resources(weights=tmp_path / "other.safetensors"))
    with pytest.raises(MismatchError, match=r"other\.safetensors: these weights do not fit"):
        detector.load()


def test_without_weights_what_to_fetch_is_told(tmp_path, monkeypatch):
    def unreachable(*_):
        raise OSError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    detector = detectors.load(manifests.load("detectors", MOBILENET))
    with pytest.raises(MissingError, match=r"https://download.pytorch.org/models/fasterrcnn_mob"):
        detector.provenance  # noqa: B018


@pytest.mark.parametrize("name", manifests.names("detectors"))
def test_every_shipped_manifest_loads(name):
    manifest = manifests.load("detectors", name)
    assert isinstance(manifest, DetectorManifest)
    assert manifest.kind in detectors.DETECTORS
    if manifest.kind == "torchvision":
        assert detectors.load(manifest).classes
