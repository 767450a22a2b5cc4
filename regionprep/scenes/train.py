"""Train the detector of scenes: `python -m regionprep.scenes.train`.

The scenes that it learns from are those of another seed than any dataset's by default; the AP50
that is printed, and kept in the weights' metadata, is that of the default dataset's test split.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torchvision
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.detection import FasterRCNN

from regionprep.errors import InputError
from regionprep.scenes.detector import ATTRIBUTES, WEIGHTS, untrained
from regionprep.scenes.draw import draw
from regionprep.scenes.layout import CLASSES, Scene, boxes, scene

TRAINING_SEED = 20_171
"""The seed of the scenes trained on; datasets start at seed 0."""

TEST_SCENES = range(4500, 5000)
"""The default dataset's test split, of seed 0."""

_JITTER = 0.06
"""How far, in sides of a box, a corner moves before attributes are learnt from the box."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save the detector as the command line says."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    wall, cpu = time.perf_counter(), time.process_time()
    model = train(seed=options.seed, steps=options.steps, batch_images=options.batch_images)
    minutes = f"{(time.perf_counter() - wall) / 60:.1f}"
    cpu_minutes = f"{(time.process_time() - cpu) / 60:.1f}"
    ap50 = average_precision(model, [scene(0, index) for index in TEST_SCENES[: options.test]])
    metadata = {
        "command": _command(options),
        "seed": str(options.seed),
        "ap50": f"{ap50:.4f}",
        "minutes": minutes,
        "cpu_minutes": cpu_minutes,
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"torchvision {torchvision.__version__}, numpy {np.__version__}",
    }
    save(model, options.output, metadata)
    print(f"AP50 {ap50:.4f} on {options.test} scenes; trained in {minutes} minutes")
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB")


def train(*, seed: int, steps: int, batch_images: int, learning_rate: float = 2e-3) -> FasterRCNN:
    """Return the detector, trained on `steps` batches of scenes, in eval mode."""
    if steps < 1 or batch_images < 1:
        raise InputError(f"{steps} steps of {batch_images} images: both must be 1 or more")
    torch.manual_seed(seed)
    model = untrained()
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=learning_rate, total_steps=steps + 1, pct_start=0.1
    )
    start = time.perf_counter()
    for step, batch in enumerate(itertools.islice(_batches(batch_images), steps), start=1):
        losses = _losses(model, *_tensors(batch))
        total = torch.stack(list(losses.values())).sum()
        optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            left = (time.perf_counter() - start) / step * (steps - step)
            parts = "  ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
            print(f"step {step}/{steps}  {parts}  {left / 60:.1f} minutes left", flush=True)
    return model.eval()


def average_precision(model: FasterRCNN, scenes: Sequence[Scene], batch_images: int = 16) -> float:
    """Return AP at an IoU of 0.5 (pycocotools, all classes and sizes) of a model on scenes."""
    found = []
    for first in range(0, len(scenes), batch_images):
        images, _ = _tensors(scenes[first : first + batch_images])
        with torch.inference_mode():
            found += model(images)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = _truth(scenes)
        evaluation = COCOeval(truth, truth.loadRes(_results(found)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return float(evaluation.stats[1])


def save(model: FasterRCNN, path: Path, metadata: dict[str, str]) -> None:
    """Write a model's weights and their metadata as safetensors, whole or not at all."""
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(weights, temporary, metadata)
        temporary.chmod(0o644)  # safetensors leaves it to its owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m regionprep.scenes.train", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="safetensors file to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, sampling and jitter")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-images", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2, help="the result depends on it a little")
    parser.add_argument(
        "--test", type=int, default=len(TEST_SCENES), help="test scenes to measure AP50 on"
    )
    return parser


def _command(options: argparse.Namespace) -> str:
    """Return the command that makes these weights again, all settings but the path spelt out."""
    settings = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(options).items()
        if name != "output"
    ]
    return " ".join(["python -m regionprep.scenes.train", *settings])


def _batches(size: int) -> Iterator[list[Scene]]:
    """Yield batches of the scenes trained on, without end."""
    for first in itertools.count(0, size):
        yield [scene(TRAINING_SEED, index) for index in range(first, first + size)]


def _tensors(scenes: Sequence[Scene]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images (3, height, width) in 0 .. 1 and what torchvision's detectors learn from."""
    images, targets = [], []
    for each in scenes:
        images.append(torch.from_numpy(draw(each)).permute(2, 0, 1) / 255)
        corners, classes = boxes(each)
        target = {
            "boxes": torch.from_numpy(corners),
            "labels": torch.from_numpy(classes).long() + 1,
        }
        for name, values in ATTRIBUTES.items():
            places = [values.index(getattr(thing, name)) for thing in each.objects]
            target[name] = torch.tensor(places)
        targets.append(target)
    return images, targets


def _losses(
    model: FasterRCNN, images: list[Tensor], targets: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the losses of Faster R-CNN and of the attributes.

    The steps are those of the model's own forward; only here can the attributes share its
    feature map.
    """
    batch, targets = model.transform(images, targets)
    features = {"0": model.backbone(batch.tensors)}
    proposals, proposal_losses = model.rpn(batch, features, targets)
    _, head_losses = model.roi_heads(features, proposals, batch.image_sizes, targets)
    nearby = [_jittered(target["boxes"]) for target in targets]
    pooled = model.roi_heads.box_roi_pool(features, nearby, batch.image_sizes)
    guesses = model.roi_heads.box_predictor.attributes(model.roi_heads.box_head(pooled))
    attribute_losses = {
        name: F.cross_entropy(guess, torch.cat([target[name] for target in targets]))
        for name, guess in guesses.items()
    }
    losses: dict[str, Tensor] = proposal_losses | head_losses | attribute_losses
    return losses


def _jittered(boxes: Tensor) -> Tensor:
    """Return boxes as a detector would give them: a little off."""
    sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    return boxes + _JITTER * sides * torch.randn_like(boxes).clamp(-2, 2)


def _truth(scenes: Sequence[Scene]) -> COCO:
    """Return the true boxes of scenes, numbered from 1, as a COCO data set."""
    annotations: list[dict[str, Any]] = []
    for number, each in enumerate(scenes, start=1):
        for thing in each.objects:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": CLASSES.index(thing.shape) + 1,
                    "bbox": [thing.left, thing.top, thing.side, thing.side],
                    "area": thing.side * thing.side,
                    "iscrowd": 0,
                }
            )
    dataset: dict[str, Any] = {
        "info": {},
        "images": [{"id": number} for number in range(1, len(scenes) + 1)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)],
        "annotations": annotations,
    }
    truth = COCO()
    truth.dataset = cast("Any", dataset)
    truth.createIndex()
    return truth


def _results(found: Sequence[dict[str, Tensor]]) -> np.ndarray:
    """Return detections as pycocotools' rows: image, x, y, width, height, score, category."""
    rows = [
        torch.cat(
            [
                torch.full((len(image["boxes"]), 1), number),
                image["boxes"][:, :2],
                image["boxes"][:, 2:] - image["boxes"][:, :2],
                image["scores"][:, None],
                image["labels"][:, None],
            ],
            dim=1,
        )
        for number, image in enumerate(found, start=1)
    ]
    return torch.cat(rows).double().numpy()


if __name__ == "__main__":
    main()
