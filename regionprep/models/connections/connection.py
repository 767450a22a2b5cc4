"""What all connections share: the encoded images, and the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.models.attention import MemoryCache


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoded images: what each encoder layer made of the regions, first to last."""

    layers: tuple[Float[Tensor, "b r m"], ...]
    mask: Bool[Tensor, "b r"]

    @property
    def last(self) -> Float[Tensor, "b r m"]:
        """Return what the whole encoder made of the regions."""
        return self.layers[-1]


@dataclass(frozen=True, eq=False)
class Gates:
    """How much of what was found in an image, and of the words before it, went on: 0 to 1.

    One after the other for each layer of the encoder that was looked at.
    """

    visual: Float[Tensor, "layers n t m"]
    language: Float[Tensor, "layers n t m"]


class Connection(nn.Module, ABC):
    """Brings the encoder's memory into the hidden states of a decoder's layer.

    One that weighs image against language keeps both gates of its latest call in `kept_gates`,
    without their gradients, if `keep_gates` was set to True before: for plots, as they take room.
    """

    keep_gates: bool = False
    kept_gates: Gates | None = None

    @abstractmethod
    def forward(
        self,
        hidden: Float[Tensor, "n t m"],
        memory: Memory,
        *,
        words: Bool[Tensor, "n t"] | None = None,
        caches: list[MemoryCache] | None = None,
    ) -> Float[Tensor, "n t m"]:
        """Return the hidden states after a look at the memory, which rows of an image share.

        `words` is True at real words. `caches` come from `caches()`, one list a search.
        """

    @abstractmethod
    def caches(self, memory: Memory) -> list[MemoryCache]:
        """Return empty caches for a search in `memory`, one for each attention over it."""
