"""Backbones of every family: crops through the model's own transform, maps cell by cell."""

from __future__ import annotations

import json
import logging

import numpy as np
import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_data_config

from regionprep import manifests, scenes
from regionprep.errors import InputError, ManifestError, MismatchError, MissingError
from regionprep.manifests import BackboneManifest
from regionprep.pipeline import backbones, detectors
from regionprep.pipeline.backbones import Resources
from regionprep.pipeline.backbones.open_clip import OpenClipBackbone

TINY_TEXT = {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1}
TINY = {
    "tiny-vit": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 16},
    "tiny-resnet": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "patch_size": None},
}
TIMM = ("test_resnet", "test_vit", "test_convnext", "test_efficientnet")
NAMES = (*(f"timm:{name}" for name in TIMM), *(f"open_clip:{name}" for name in TINY))

IMAGES = [
    np.asarray(
        Image.fromarray(
            np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        ).resize(size, Image.Resampling.BICUBIC)
    )
    for seed, size in enumerate([(90, 70), (50, 120), (33, 33)])
]
BOXES = [
    np.array([[0, 0, 90, 70], [10, 5, 40, 60], [3.5, 2.5, 30.2, 20.9]], np.float32),
    np.zeros((0, 4), np.float32),
    np.array([[1, 1, 2, 2], [0, 0, 33, 10]], np.float32),
]


@pytest.fixture(scope="module", autouse=True)
def tiny_models(tmp_path_factory):
    """Make open_clip know the tiny models."""
    folder = tmp_path_factory.mktemp("open_clip")
    for name, vision in TINY.items():
        config = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": TINY_TEXT}
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)
    return folder


def random_open_clip(name):
    handlers = logging.root.handlers[:]
    torch.manual_seed(0)
    model = open_clip.create_model(name, pretrained=None)
    logging.root.handlers[:] = handlers
    return model


@pytest.fixture(scope="module")
def weights(tiny_models, timm_weights):
    """Return a function that gives a file of random weights of a model of either library."""

    def weights(name):
        library, _, model = name.partition(":")
        if library == "timm":
            return timm_weights(model)
        path = tiny_models / f"{model}.safetensors"
        if not path.exists():
            save_file(random_open_clip(model).state_dict(), path)
        return path

    return weights


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def backbone(name, weights):
    return backbones.load(backbones.manifest(name), Resources(weights(name), device="cpu"))


def own_way(name, weights):
    """Return the library's own model and transform, without this package."""
    library, _, model = name.partition(":")
    if library == "timm":
        network = timm.create_model(model)
        network.load_state_dict(load_file(weights(name)))
        network.reset_classifier(0)
        transform = create_transform(**resolve_data_config({}, model=network))
        return network.eval(), transform
    handlers = logging.root.handlers[:]
    network, _, transform = open_clip.create_model_and_transforms(
        model, pretrained=str(weights(name))
    )
    logging.root.handlers[:] = handlers
    return network.eval().encode_image, transform


def test_a_region_equals_its_crop_through_the_models_own_transform(name, backbone, weights):
    network, transform = own_way(name, weights)
    found = backbone.regions(IMAGES, BOXES)
    for image, boxes, features in zip(IMAGES, BOXES, found, strict=True):
        assert features.shape == (len(boxes), backbone.width)
        assert features.dtype == np.float32
        for box, feature in zip(boxes, features, strict=True):
            edges = (*np.floor(box[:2]).astype(int), *np.ceil(box[2:]).astype(int))
            crop = Image.fromarray(image).crop(tuple(map(int, edges)))
            with torch.inference_mode():
                expected = network(transform(crop)[None])[0].numpy()
            np.testing.assert_allclose(feature, expected, rtol=1e-3, atol=1e-4)


def test_batches_move_nothing_but_the_last_digits(name, backbone, weights):
    found = backbone.regions(IMAGES, BOXES)
    one_by_one = backbones.load(
        backbones.manifest(name), Resources(weights(name), batch_size=1, device="cpu")
    )
    for some, other in zip(found, one_by_one.regions(IMAGES, BOXES), strict=True):
        np.testing.assert_allclose(some, other, rtol=1e-3, atol=1e-4)


def test_the_same_batches_give_the_same_bytes(backbone):
    first, second = (np.concatenate(backbone.regions(IMAGES, BOXES)) for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_images_without_regions_have_no_features(backbone):
    none = np.zeros((0, 4), np.float32)
    assert [some.shape for some in backbone.regions(IMAGES[:2], [none, none])] == [
        (0, backbone.width)
    ] * 2


def test_a_map_has_a_row_a_cell(backbone):
    for image, found in zip(IMAGES, backbone.maps(IMAGES), strict=True):
        cells = found.height * found.width
        assert found.features.shape == (cells, backbone.map_width)
        assert found.features.dtype == found.boxes.dtype == np.float32
        assert found.boxes.shape == (cells, 4)
        assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
        assert (found.boxes[:, 2:] <= [image.shape[1], image.shape[0]]).all()


def test_a_maps_rows_go_along_the_image(backbone):
    """Change one corner of the image: the cell there changes most."""
    image = np.full((96, 96, 3), 128, np.uint8)
    changed = image.copy()
    changed[64:, :32] = np.random.default_rng(0).integers(0, 256, (32, 32, 3))
    plain, other = backbone.maps([image, changed])
    moved = np.linalg.norm(plain.features - other.features, axis=1)
    row, column = divmod(int(moved.argmax()), plain.width)
    assert row >= plain.height / 2
    assert column < plain.width / 2


@pytest.mark.parametrize("name", ["timm:test_resnet"], indirect=True)
def test_the_mean_of_a_resnets_map_is_its_pooled_feature(backbone):
    [found] = backbone.maps(IMAGES[:1])
    height, width = IMAGES[0].shape[:2]
    [whole] = backbone.regions(IMAGES[:1], [np.array([[0, 0, width, height]], np.float32)])
    np.testing.assert_allclose(found.features.mean(0), whole[0], rtol=1e-3, atol=1e-4)


def test_a_vision_transformers_map_leaves_out_its_class_token(weights):
    name = "timm:test_vit"
    backbone = backbones.load(backbones.manifest(name), Resources(weights(name), device="cpu"))
    [found] = backbone.maps(IMAGES[:1])
    with torch.inference_mode():
        tokens = backbone.model.forward_features(
            backbone.transform(Image.fromarray(IMAGES[0]))[None]
        )[0]
    np.testing.assert_allclose(found.features, tokens[1:].numpy(), atol=1e-4)


def test_vgg19s_map_for_show_attend_and_tell_is_conv5_4_before_its_pooling():
    """Layers as arXiv 1409.1556 counts them: conv5_4 is the last of 16, before the fifth pool."""
    with torch.device("meta"):
        network = timm.create_model("vgg19", num_classes=0).eval()
    network.pre_logits = torch.nn.Identity()  # Most of the weights, and of no use to a map.
    network.to_empty(device="cpu")
    torch.manual_seed(0)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.03)
    backbone = backbones.load(backbones.manifest("vgg19_conv5"), Resources(device="cpu"))
    backbone.model = network
    [found] = backbone.maps(IMAGES[:1])
    assert (found.height, found.width, found.features.shape[1]) == (14, 14, 512)
    hidden = backbone.transform(Image.fromarray(IMAGES[0]))[None]
    layers = [*network.features]
    assert isinstance(layers[-1], torch.nn.MaxPool2d)
    with torch.inference_mode():
        for layer in layers[:-1]:
            hidden = layer(hidden)
    expected = hidden[0].permute(1, 2, 0).flatten(0, 1).numpy()
    np.testing.assert_allclose(found.features, expected, rtol=1e-4, atol=1e-6)
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in layers) == 16


def strided(weights, stride):
    manifest = backbones.manifest("timm:test_resnet")
    manifest = manifest.model_copy(update={"options": {"map_stride": stride}})
    return backbones.load(manifest, Resources(weights("timm:test_resnet"), device="cpu"))


def test_a_maps_stride_is_part_of_what_decides_features(weights):
    backbone = strided(weights, 8)
    [fine] = backbone.maps(IMAGES[:1])
    [coarse] = strided(weights, 32).maps(IMAGES[:1])
    assert fine.height == 4 * coarse.height
    assert fine.boxes.shape == (fine.height * fine.width, 4)
    assert backbone.provenance["map_stride"] == 8
    assert "map_stride" not in strided(weights, None).provenance


def test_a_stride_that_no_map_has_is_told_before_anything_is_computed(weights):
    with pytest.raises(ManifestError, match=r"map_stride of timm's test_resnet '12'.*Known: .*16"):
        strided(weights, 12).load()


def test_fine_tuned_and_headless_weights_fit_too(tmp_path):
    torch.manual_seed(0)
    for classes in (7, 0):
        network = timm.create_model("test_convnext", num_classes=classes).eval()
        save_file(network.state_dict(), tmp_path / f"{classes}.safetensors")
        backbone = backbones.load(
            backbones.manifest("timm:test_convnext"),
            Resources(tmp_path / f"{classes}.safetensors", device="cpu"),
        )
        network.reset_classifier(0)
        batch = torch.randn(1, 3, 160, 160)
        with torch.inference_mode():
            assert torch.equal(backbone.pooled(batch), network(batch))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("timm:test_vit", "timm:test_resnet"),
        ("timm:test_resnet", "timm:test_convnext"),
        ("open_clip:tiny-vit", "open_clip:tiny-resnet"),
        ("open_clip:tiny-vit", "timm:test_vit"),
    ],
)
def test_weights_of_another_network_are_refused(weights, name, other):
    backbone = backbones.load(backbones.manifest(name), Resources(weights(other)))
    with pytest.raises(MismatchError, match=r"do not fit(.|\n)*is not in the file"):
        backbone.load()


@pytest.mark.parametrize("name", ["timm:test_vit", "open_clip:tiny-vit"])
def test_a_pickle_that_runs_code_is_refused(tmp_path, name):
    class Command:
        def __reduce__(self):
            return (tmp_path / "proof").touch, ()

    torch.save({"weight": Command()}, tmp_path / "evil.pt")
    backbone = backbones.load(backbones.manifest(name), Resources(tmp_path / "evil.pt"))
    with pytest.raises(InputError, match="holds more than tensors"):
        backbone.load()
    assert not (tmp_path / "proof").exists()


def test_openais_weights_run_with_their_own_activation(weights, monkeypatch):
    """Their tag says quick_gelu; open_clip itself would only warn."""
    tag = {"quick_gelu": True, "mean": (0.1, 0.2, 0.3), "interpolation": "bilinear"}
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda name: ["tag"])
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda name, pretrained: tag)
    name = "open_clip:tiny-vit"
    backbone = backbones.load(
        backbones.manifest(f"{name}/tag"), Resources(weights(name), device="cpu")
    )
    kinds = {type(module).__name__ for module in backbone.model.modules()}
    assert "QuickGELU" in kinds
    assert "GELU" not in kinds
    assert backbone.provenance["preprocessing"]["mean"] == (0.1, 0.2, 0.3)
    assert backbone.provenance["preprocessing"]["interpolation"] == "bilinear"


def test_building_leaves_the_processs_logging_alone(weights):
    before = logging.root.handlers[:], logging.root.manager.disable
    name = "open_clip:tiny-vit"
    backbones.load(backbones.manifest(name), Resources(weights(name))).load()
    assert (logging.root.handlers, logging.root.manager.disable) == before


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "timm:convnext_lrage",
            r"no model 'convnext_lrage'\. Did you mean convnext_large",
        ),
        ("timm:vgg16.nope", "unknown weights of timm's vgg16 'nope'.*Known: tv_in1k"),
        ("open_clip:ViT-B-33", r"open_clip has no model 'ViT-B-33'\. Did you mean .*ViT-B-32"),
        ("open_clip:ViT-B-32/opena", "'opena'. Did you mean 'openai'"),
        ("open_clip:ViT-B-32", "no weights are named(.|\n)*open_clip:ViT-B-32/TAG"),
        ("keras:vgg16", "names no backbone"),
        ("timm:", "names no backbone"),
        ("clip_vit_l41", "Did you mean 'clip_vit_l14'"),
    ],
)
def test_misspelt_names_are_told(name, told):
    with pytest.raises(ManifestError, match=told):
        backbones.load(backbones.manifest(name))


def test_a_name_without_a_manifest_makes_a_folders_name():
    assert backbones.manifest("timm:vgg16.tv_in1k").name == "timm-vgg16.tv_in1k"
    made = backbones.manifest("open_clip:ViT-B-32/laion2b_e16")
    assert made.name == "open_clip-ViT-B-32-laion2b_e16"
    assert (made.model, made.pretrained) == ("ViT-B-32", "laion2b_e16")


def test_an_option_that_nobody_knows_is_told():
    manifest = backbones.manifest("vgg16").model_copy(update={"options": {"pool": "max"}})
    with pytest.raises(ManifestError, match="unknown option 'pool'"):
        backbones.load(manifest)


def test_missing_weights_of_a_name_are_told_with_their_address(monkeypatch):
    import huggingface_hub

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    for name, address in [
        ("vgg19", "huggingface.co/timm/vgg19.tv_in1k/resolve/main/model.safetensors"),
        ("clip_rn50", "huggingface.co/timm/resnet50_clip.openai/resolve/main/open_clip_model"),
    ]:
        with pytest.raises(MissingError, match=address):
            backbones.load(backbones.manifest(name)).provenance  # noqa: B018


def test_roi_gives_the_detectors_pooled_features():
    detector = detectors.load(
        manifests.load("detectors", "scenes"), detectors.Resources(device="cpu")
    )
    roi = backbones.load(backbones.manifest("roi"), Resources(detector=detector))
    image = scenes.draw(scenes.scene(0, 0))
    boxes = scenes.boxes(scenes.scene(0, 0))[0]
    [features] = roi.regions([image], [boxes])
    assert features.shape == (len(boxes), roi.width)
    np.testing.assert_array_equal(features, detector.features([image], [boxes])[0])


def test_roi_refuses_what_it_has_not(tmp_path):
    with pytest.raises(InputError, match="has no feature map"):
        backbones.load(backbones.manifest("roi"))
    with pytest.raises(InputError, match="--weights to `prep detect`"):
        backbones.load(backbones.manifest("roi"), Resources(tmp_path))


@pytest.mark.parametrize("name", manifests.names("backbones"))
def test_every_shipped_manifest_names_a_model_that_is_there(name):
    manifest = backbones.manifest(name)
    assert isinstance(manifest, BackboneManifest)
    assert manifest.library in backbones.BACKBONES
    assert manifest.licence
    assert manifest.source
    if manifest.library != "roi":
        backbone = backbones.load(manifest)
        assert backbone.view.size[0] in (224, 336)
        assert manifest.width


@pytest.mark.parametrize(
    "name",
    [n for n in manifests.names("backbones") if manifests.load("backbones", n).library == "timm"],
)
def test_timms_widths_are_those_of_the_manifests(name):
    manifest = backbones.manifest(name)
    backbone = backbones.load(manifest)
    with torch.device("meta"):
        network = timm.create_model(backbone.name, num_classes=0)
        shape = network(torch.zeros(1, 3, *backbone.view.size)).shape
    assert shape == (1, manifest.width)


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in manifests.names("backbones")
        if manifests.load("backbones", n).library == "open_clip"
    ],
)
def test_open_clips_widths_are_those_of_the_manifests(name):
    manifest = backbones.manifest(name)
    assert isinstance(backbones.load(manifest), OpenClipBackbone)
    assert open_clip.get_model_config(manifest.model)["embed_dim"] == manifest.width
