import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from regionprep import scenes
from regionprep.scenes import train
from regionprep.scenes.detector import ATTRIBUTES, FEATURE_WIDTH, WEIGHTS, build


@pytest.fixture(scope="module")
def model():
    return build()


def images(indices):
    return [
        torch.from_numpy(scenes.draw(scenes.scene(0, index))).permute(2, 0, 1) / 255
        for index in indices
    ]


def metadata(path):
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))["__metadata__"]


def test_shipped_weights_are_small_and_say_how_they_were_made():
    assert WEIGHTS.stat().st_size <= 5_000_000
    known = metadata(WEIGHTS)
    assert known["command"].startswith("python -m regionprep.scenes.train --seed ")
    assert f"--seed {known['seed']} " in known["command"]
    assert float(known["ap50"]) >= 0.90
    assert float(known["minutes"]) > 0
    assert "torch" in known["versions"]


def test_built_detector_holds_the_saved_weights(model):
    saved, held = load_file(WEIGHTS), model.state_dict()
    assert saved.keys() == held.keys()
    assert all(torch.equal(saved[name], held[name]) for name in saved)
    assert not model.training


def test_detector_finds_the_objects_of_held_out_scenes(model):
    held_out = [scenes.scene(0, index) for index in train.TEST_SCENES[:100]]
    assert train.average_precision(model, held_out) >= 0.90


def test_labels_count_classes_from_one(model):
    scene = scenes.scene(0, train.TEST_SCENES[0])
    with torch.inference_mode():
        [found] = model(images([scene.index]))
    sure = found["labels"][found["scores"] > 0.5].tolist()
    corners, classes = scenes.boxes(scene)
    assert sorted(sure) == sorted((classes + 1).tolist())
    nearest = torch.cdist(found["boxes"][: len(corners)], torch.from_numpy(corners)).min(dim=1)
    assert nearest.values.max() < 8


def test_detection_of_an_image_does_not_depend_on_its_batch(model):
    first, second, third = images([4500, 4501, 4502])
    with torch.inference_mode():
        [alone] = model([second])
        _, among, _ = model([first, second, third])
    torch.testing.assert_close(alone, among, rtol=1e-4, atol=1e-3)


def test_image_of_another_size_gets_boxes_in_its_own_pixels(model):
    [image] = images([4500])
    doubled = image.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    with torch.inference_mode():
        small, large = model([image]) + model([doubled])
    best = small["scores"].argmax()
    apart = torch.cdist(small["boxes"][best][None] * 2, large["boxes"])
    assert apart.min() < 12


def test_pooled_feature_of_a_true_box_tells_its_attributes(model):
    right = dict.fromkeys(ATTRIBUTES, 0)
    total = 0
    for index in range(4500, 4530):
        scene = scenes.scene(0, index)
        corners = torch.from_numpy(scenes.boxes(scene)[0])
        with torch.inference_mode():
            batch, _ = model.transform(images([index]))
            features = {"0": model.backbone(batch.tensors)}
            pooled = model.roi_heads.box_roi_pool(features, [corners], batch.image_sizes)
            feature = model.roi_heads.box_head(pooled)
            guesses = model.roi_heads.box_predictor.attributes(feature)
        assert feature.shape == (len(corners), FEATURE_WIDTH)
        total += len(corners)
        for name, values in ATTRIBUTES.items():
            guessed = [values[place] for place in guesses[name].argmax(dim=1)]
            truth = [getattr(thing, name) for thing in scene.objects]
            right[name] += sum(a == b for a, b in zip(guessed, truth, strict=True))
    assert all(count > 0.95 * total for count in right.values()), right
