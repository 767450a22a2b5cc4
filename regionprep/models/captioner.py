"""What every captioner is given, and what training and decoding may ask of it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Regions:
    """The regions of a batch of images, padded to the most regions of any of them.

    `mask` is True at real regions, of which an image may have none. Boxes are x1 y1 x2 y2 in
    pixels, sizes are width and height; what they hold at padding is never read. `grid` is the
    height and width of a feature map whose cells the regions are, row by row.
    """

    features: Float[Tensor, "b r f"]
    mask: Bool[Tensor, "b r"]
    boxes: Float[Tensor, "b r 4"]
    sizes: Float[Tensor, "b 2"]
    grid: tuple[int, int] | None = None

    def to(self, device: torch.device | str) -> Regions:
        """Return the regions on `device`; the copy overlaps with work where memory is pinned."""
        return dataclasses.replace(
            self,
            features=self.features.to(device, non_blocking=True),
            mask=self.mask.to(device, non_blocking=True),
            boxes=self.boxes.to(device, non_blocking=True),
            sizes=self.sizes.to(device, non_blocking=True),
        )


@runtime_checkable
class State(Protocol):
    """What a captioner remembers of the hypotheses of a search, one row each."""

    def reorder(self, index: Int[Tensor, " n"]) -> State:
        """Return the state whose row i was row `index[i]`; rows never leave their image.

        The old state must not be used again: its memory may be the new one's.
        """
        ...


@dataclass(frozen=True)
class Shape:
    """What a captioner must fit: the features, the vocabulary, the longest caption.

    `max_length` counts a caption's tokens without marks; `pad`, `bos` and `eos` are token ids;
    `grid` is the height and width of the feature map whose cells the regions are, if they are.
    """

    feature_width: int
    vocabulary_size: int
    max_length: int
    pad: int
    bos: int
    eos: int
    grid: tuple[int, int] | None = None


Criterion = Callable[[Tensor, Tensor], Tensor]
"""From logits (b, c, t, v) and targets (b, c, t) to their loss, a scalar."""

M = TypeVar("M")
S = TypeVar("S", bound=State)


class Captioner(nn.Module, ABC, Generic[M, S]):
    """A model that writes captions: trained on whole captions, decoded word by word.

    The tokens of a caption are [bos, word 1 .. word n], and what is predicted from each is the one
    that follows: [word 1 .. word n, eos]; n is at most `max_length`.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.feature_width = shape.feature_width
        self.vocabulary_size = shape.vocabulary_size
        self.max_length = shape.max_length
        self.pad, self.bos, self.eos = shape.pad, shape.bos, shape.eos
        self.grid = shape.grid

    def initialise(self) -> None:
        """Draw all matrices by Xavier's rule, for models to differ in their papers alone."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

    def warm_start(self) -> None:
        """Take over pretrained weights, where the model has such: before a new run's first step.

        Never called when a run goes on or is opened again, whose weights are in its checkpoint; so
        building a captioner touches neither files nor the network.
        """

    @abstractmethod
    def forward(self, regions: Regions, tokens: Int[Tensor, "b c t"]) -> Float[Tensor, "b c t v"]:
        """Return the logits of the token that follows each token; c captions share an image."""

    def loss(
        self,
        regions: Regions,
        tokens: Int[Tensor, "b c t"],
        targets: Int[Tensor, "b c t"],
        criterion: Criterion,
    ) -> Float[Tensor, ""]:
        """Return what training makes small: the criterion, and what a model adds of its own."""
        return criterion(self(regions, tokens), targets)

    @abstractmethod
    def encode(self, regions: Regions) -> M:
        """Return all that decoding needs of the images."""

    @abstractmethod
    def start(self, memory: M, beams: int) -> S:
        """Return the state before the first word: `beams` rows an image, next to each other."""

    @abstractmethod
    def step(self, tokens: Int[Tensor, " n"], state: S) -> tuple[Float[Tensor, "n v"], S]:
        """Return the logits that follow `tokens`, the latest of each row, and the next state.

        The old state must not be used again: its memory may be the new one's.
        """
