"""Faster R-CNN as torchvision builds it: its candidates before suppression, its pooled features.

Of each proposal, the candidate box is the one regressed for its best class; selection then goes by
the scores of all classes. The pooled feature of a box is what the network's own box head makes of
it: `box_head(box_roi_pool(box))`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torchvision.models.detection import FasterRCNN
from torchvision.ops import clip_boxes_to_image

from regionprep.pipeline.detectors.detector import Candidates, Pixels, by_shape
from regionprep.pipeline.devices import choose_device

# Boxes that go through the box head together: bounds memory for images with thousands of boxes.
HEAD_BATCH = 1024


class FasterRCNNDetector(ABC):
    """A torchvision Faster R-CNN; what it is built of is a subclass's matter."""

    classes: tuple[str, ...]
    given = False

    def __init__(self, *, batch_size: int, device: str = "auto") -> None:
        self.batch_size = batch_size
        self.device = choose_device(device)

    @property
    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """Return what decides the boxes."""

    @abstractmethod
    def build(self) -> FasterRCNN:
        """Return the network with its weights."""

    @cached_property
    def network(self) -> Any:  # noqa: ANN401 - torchvision has no types
        """Return the network, loaded at its first use."""
        return self.build().eval().requires_grad_(False).to(self.device)

    def load(self) -> None:
        """Load the model now, or raise what is wrong with it."""
        self.network  # noqa: B018 - loaded at its first use

    @property
    def feature_width(self) -> int:
        """Return the width of the box head's output."""
        return int(self.network.roi_heads.box_predictor.cls_score.in_features)

    @torch.inference_mode()
    def detect(self, images: Sequence[Pixels], image_ids: Sequence[str]) -> list[Candidates]:
        """Return each image's candidates: its proposals, regressed for their best classes."""
        found: dict[int, Candidates] = {}
        for group in by_shape(images, self.batch_size):
            found |= zip(group, self._detect([images[i] for i in group]), strict=True)
        return [found[position] for position in range(len(images))]

    @torch.inference_mode()
    def features(
        self, images: Sequence[Pixels], boxes: Sequence[NDArray[np.float32]]
    ) -> list[NDArray[np.float32]]:
        """Return the pooled features (r, D) of each image's boxes (r, 4)."""
        found: dict[int, NDArray[np.float32]] = {}
        for group in by_shape(images, self.batch_size):
            pooled = self._features([images[i] for i in group], [boxes[i] for i in group])
            found |= zip(group, pooled, strict=True)
        return [found[position] for position in range(len(images))]

    def _detect(self, images: list[Pixels]) -> list[Candidates]:
        inputs, maps = self._maps(images)
        heads = self.network.roi_heads
        proposals, _ = self.network.rpn(inputs, maps)
        pooled = heads.box_head(heads.box_roi_pool(maps, proposals, inputs.image_sizes))
        logits, offsets = heads.box_predictor(pooled)
        scores = logits.softmax(-1)[:, 1:]  # 0 is the background
        best = scores.argmax(-1)
        regressed = heads.box_coder.decode(offsets, proposals)[:, 1:]
        regressed = regressed[torch.arange(len(best), device=self.device), best]
        sizes = [len(some) for some in proposals]
        return [
            self._candidates(boxes, some, size, image)
            for boxes, some, size, image in zip(
                regressed.split(sizes), scores.split(sizes), inputs.image_sizes, images, strict=True
            )
        ]

    def _candidates(
        self,
        boxes: Float[Tensor, "n 4"],
        scores: Float[Tensor, "n c"],
        size: tuple[int, int],
        image: Pixels,
    ) -> Candidates:
        """Return the candidates in pixels of the image, without those that have no area."""
        shape = image.shape[:2]
        boxes = clip_boxes_to_image(boxes * self._scale(shape, size), shape)
        usable = (boxes[:, 2:] > boxes[:, :2]).all(-1) & scores.isfinite().all(-1)
        return Candidates(boxes[usable].cpu().numpy(), scores[usable].cpu().numpy())

    def _features(
        self, images: list[Pixels], boxes: list[NDArray[np.float32]]
    ) -> list[NDArray[np.float32]]:
        inputs, maps = self._maps(images)
        heads = self.network.roi_heads
        scaled = [
            torch.from_numpy(np.array(some)).to(self.device) / self._scale(image.shape[:2], size)
            for some, image, size in zip(boxes, images, inputs.image_sizes, strict=True)
        ]
        pooled = [np.zeros((0, self.feature_width), np.float32)]
        for start in range(0, max(map(len, scaled), default=0), HEAD_BATCH):
            part = [some[start : start + HEAD_BATCH] for some in scaled]
            crops = heads.box_roi_pool(maps, part, inputs.image_sizes)
            pooled.append(heads.box_head(crops).cpu().numpy())
        return _per_image(pooled[1:], [len(some) for some in boxes], pooled[0])

    def _maps(self, images: list[Pixels]) -> tuple[Any, dict[str, Tensor]]:
        """Return the network's own input of images of one shape, and its feature maps."""
        pixels = torch.from_numpy(np.stack(images)).to(self.device)
        pixels = pixels.permute(0, 3, 1, 2).float() / 255
        inputs, _ = self.network.transform(list(pixels))
        maps = self.network.backbone(inputs.tensors)
        return inputs, maps if isinstance(maps, dict) else {"0": maps}

    def _scale(self, shape: tuple[int, ...], size: tuple[int, int]) -> Float[Tensor, " 4"]:
        """Return the pixels of the image, of `shape`, that one of the network's input covers."""
        high, wide = shape[0] / size[0], shape[1] / size[1]
        return torch.tensor([wide, high, wide, high], device=self.device)


def _per_image(
    parts: list[NDArray[np.float32]], counts: list[int], nothing: NDArray[np.float32]
) -> list[NDArray[np.float32]]:
    """Return each image's features from parts that hold `HEAD_BATCH` boxes of each in turn."""
    images: list[list[NDArray[np.float32]]] = [[nothing] for _ in counts]
    for number, part in enumerate(parts):
        sizes = [min(max(count - number * HEAD_BATCH, 0), HEAD_BATCH) for count in counts]
        for image, some in zip(images, np.split(part, np.cumsum(sizes)[:-1]), strict=True):
            image.append(some)
    return [np.concatenate(image) for image in images]
