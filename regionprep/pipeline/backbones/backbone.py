"""What every backbone is to the pipeline, and what those that look at crops share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from regionprep.pipeline.backbones.cutting import View, cut
from regionprep.pipeline.devices import choose_device

Pixels = NDArray[np.uint8]
Boxes = NDArray[np.float32]
Features = NDArray[np.float32]

# The same on every device: which crops go together is part of a plan.
BATCH_CROPS = 64


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """An image's feature map: `features` (height * width, D) row by row.

    `boxes` (height * width, 4) are the cells in pixels of the image. Where a model's own transform
    crops the image, they cover what it leaves and no more.
    """

    features: Features
    boxes: Boxes
    height: int
    width: int


class Backbone(Protocol):
    """Turns regions, or whole images, into features.

    Made without loading a model; the first batch, or `load`, loads it. `provenance` is what decides
    its features (weights, preprocessing), as JSON can hold it.
    """

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the features."""

    def load(self) -> None:
        """Load the model now, or raise what is wrong with it."""

    @property
    def width(self) -> int:
        """Return how many values a region has."""

    @property
    def map_width(self) -> int:
        """Return how many values a cell of a feature map has; InputError where there is none."""

    def regions(self, images: Sequence[Pixels], boxes: Sequence[Boxes]) -> list[Features]:
        """Return the features (r, D) of each image's boxes (r, 4)."""

    def maps(self, images: Sequence[Pixels]) -> list[FeatureMap]:
        """Return each image's feature map; InputError where the model has none."""


class CropBackbone(ABC):
    """A backbone that sees each region as an image of its own.

    A region is cut out as `PIL.crop` does (see `cutting`) and goes through the model's own
    transform. Crops of several images share a batch; which ones depends on their order alone.
    """

    def __init__(self, *, batch_size: int = BATCH_CROPS, device: str = "auto") -> None:
        self.batch_size = batch_size
        self.device = choose_device(device)

    @property
    @abstractmethod
    def provenance(self) -> dict[str, Any]:
        """Return what decides the features."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model with its weights."""

    @property
    @abstractmethod
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Return the model's own transform of an image."""

    @abstractmethod
    def pooled(self, batch: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Return one vector an input."""

    @abstractmethod
    def mapped(self, batch: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b y x d"]:
        """Return one vector a cell."""

    @cached_property
    def model(self) -> Any:  # noqa: ANN401 - timm's and open_clip's have no types
        """Return the model, loaded at its first use."""
        return self.build().eval().requires_grad_(False).to(self.device)

    @cached_property
    def view(self) -> View:
        """Return how the transform looks at an image."""
        return View.of(self.transform)

    def load(self) -> None:
        """Load the model now, or raise what is wrong with it."""
        self.width  # noqa: B018 - one forward pass shows that it runs

    @cached_property
    def width(self) -> int:
        """Return how many values a region has."""
        return int(self._compute(self.pooled, [self._blank()]).shape[-1])

    @cached_property
    def map_width(self) -> int:
        """Return how many values a cell of a feature map has."""
        return int(self._compute(self.mapped, [self._blank()]).shape[-1])

    def regions(self, images: Sequence[Pixels], boxes: Sequence[Boxes]) -> list[Features]:
        """Return the features (r, D) of each image's boxes (r, 4)."""
        crops = [(image, box) for image, some in zip(images, boxes, strict=True) for box in some]
        computed = [np.zeros((0, self.width), np.float32)]
        computed += [self._compute(self.pooled, batch) for batch in self._prepared(crops)]
        ends = np.cumsum([len(some) for some in boxes])
        return np.split(np.concatenate(computed), ends[:-1])

    def maps(self, images: Sequence[Pixels]) -> list[FeatureMap]:
        """Return each image's feature map."""
        whole = [(image, _whole(image)) for image in images]
        maps = [one for batch in self._prepared(whole) for one in self._compute(self.mapped, batch)]
        return [self._feature_map(one, image) for one, image in zip(maps, images, strict=True)]

    def prepare(self, image: Pixels, box: Boxes) -> Float[Tensor, "3 h w"]:
        """Return the model's input for a region."""
        return self.transform(self.view.narrow(cut(image, box)))

    def _prepared(self, crops: Sequence[tuple[Pixels, Boxes]]) -> Iterator[list[Tensor]]:
        """Yield batches of inputs, the next one prepared by threads while this one is used."""
        ahead: deque[list[Future[Tensor]]] = deque()
        with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="crop") as pool:
            for start in range(0, len(crops), self.batch_size):
                batch = crops[start : start + self.batch_size]
                ahead.append([pool.submit(self.prepare, *crop) for crop in batch])
                if len(ahead) > 1:
                    yield [future.result() for future in ahead.popleft()]
            for futures in ahead:
                yield [future.result() for future in futures]

    @torch.inference_mode()
    def _compute(self, forward: Callable[[Tensor], Tensor], batch: list[Tensor]) -> Features:
        result = forward(torch.stack(batch).to(self.device))
        features: Features = result.float().cpu().numpy()
        return features

    def _blank(self) -> Tensor:
        return self.transform(Image.new("RGB", (64, 64)))

    def _feature_map(self, features: NDArray[np.float32], image: Pixels) -> FeatureMap:
        high, wide, depth = features.shape
        boxes = self.view.cells(image.shape[1], image.shape[0], wide, high)
        return FeatureMap(features.reshape(-1, depth), boxes, high, wide)


def channels_last(maps: Tensor, depth: int, prefix: int, cells: tuple[int, int]) -> Tensor:
    """Return a model's unpooled output as (b, y, x, d).

    It comes as (b, d, y, x), as (b, y, x, d), or as tokens (b, prefix + y * x, d) of which the
    first `prefix` stand for no place; `cells` is (y, x) of the latter.
    """
    if maps.ndim == 3:
        tokens: Tensor = maps[:, prefix:].unflatten(1, cells)
        return tokens
    return maps if maps.shape[-1] == depth else maps.permute(0, 2, 3, 1)


def _whole(image: Pixels) -> Boxes:
    height, width = image.shape[:2]
    return np.array([0, 0, width, height], np.float32)
