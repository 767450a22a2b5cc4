"""What all attention mechanisms share: the call, the heads, and what a search remembers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regionprep.errors import InputError

KeysAndValues = tuple[Float[Tensor, "b h k d"], Float[Tensor, "b h k d"]]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the keys lie in their image: boxes in pixels, image sizes, the shape of a grid."""

    boxes: Float[Tensor, "b k 4"]
    sizes: Float[Tensor, "b 2"]
    grid: tuple[int, int] | None = None


class Cache(ABC):
    """What one mechanism keeps between the steps of a search.

    `running` holds what it sums over the steps, with one row a hypothesis, or one for all.
    """

    def __init__(self) -> None:
        self.running: tuple[Tensor, ...] = ()

    @abstractmethod
    def keep(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Return all keys and values to look at; `project` makes those of this step."""

    def reorder(self, index: Int[Tensor, " n"]) -> None:
        """Make row i what row `index[i]` was."""
        self.running = tuple(
            total[index] if len(total) == len(index) else total for total in self.running
        )


class WordCache(Cache):
    """The keys and values of the words so far, in buffers of `length` places that never move."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.filled = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def keep(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Write this step's keys and values behind those of the steps before; return them all."""
        keys, values = project()
        if self.keys is None or self.values is None:
            self.keys, self.values = self._empty(keys), self._empty(values)
        start, self.filled = self.filled, self.filled + keys.shape[2]
        self.keys[:, :, start : self.filled] = keys
        self.values[:, :, start : self.filled] = values
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]

    def reorder(self, index: Int[Tensor, " n"]) -> None:
        """Make row i what row `index[i]` was."""
        super().reorder(index)
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[:, :, : self.filled] = buffer[index, :, : self.filled]

    def _empty(self, like: Tensor) -> Tensor:
        rows, heads, _, width = like.shape
        return like.new_zeros(rows, heads, self.length, width)


class MemoryCache(Cache):
    """The keys and values of an encoded image: made once, shared by its hypotheses."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: KeysAndValues | None = None

    def keep(self, project: Callable[[], KeysAndValues]) -> KeysAndValues:
        """Return the keys and values, projected at the first call only."""
        if self.kept is None:
            self.kept = project()
        return self.kept


class Mechanism(nn.Module, ABC):
    """Multi-head attention of any kind; the number of heads divides the width.

    Queries may have more rows than keys: row i of the queries looks at row i // (n / b) of the
    keys, so that the captions of an image, or the hypotheses of a search, share one memory.

    `decodes` says whether words can look through it, at each other and at an image; without that it
    is for encoders alone, where queries, keys and values are the same regions.
    """

    decodes: ClassVar[bool] = True

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        if width < 1 or heads < 1 or width % heads:
            raise InputError(
                f"{heads} heads do not divide a width of {width}",
                mend="Choose a width that is a multiple of the number of heads.",
            )
        self.width, self.heads = width, heads

    @classmethod
    def defaults(cls, *, dropout: float, decoder: bool) -> dict[str, Any]:
        """Return the options that a model sets where its manifest leaves them open."""
        del decoder  # Most mechanisms are the same on both sides.
        return {"dropout": dropout}

    @abstractmethod
    def forward(
        self,
        query: Float[Tensor, "n q m"],
        key: Float[Tensor, "b k m"],
        value: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | Bool[Tensor, "n q k"] | None = None,
        query_mask: Bool[Tensor, "n q"] | None = None,
        causal: bool = False,
        layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "n q m"]:
        """Return what each query takes from the values.

        `mask` is True at keys that may be looked at; `query_mask` is True at real queries, for
        mechanisms that take statistics over them. `causal`: queries and keys are the same
        sequence, and query i sees keys up to i. With a `cache`, `query` is only what is new since
        the last call. A query that may look at nothing has heads of 0.
        """

    def split(self, hidden: Float[Tensor, "b k m"]) -> Float[Tensor, "b h k d"]:
        """Return the heads of `hidden`."""
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def merge(self, heads: Float[Tensor, "b h q d"]) -> Float[Tensor, "b q m"]:
        """Return the heads next to each other."""
        return heads.transpose(1, 2).flatten(2)


def share(query: Float[Tensor, "n q m"], images: int) -> Float[Tensor, "b cq m"]:
    """Return the queries of each image in one row, so that they look at its keys together."""
    return query.reshape(images, -1, query.shape[-1])


def allowed(
    mask: Bool[Tensor, "b k"] | Bool[Tensor, "n q k"] | None,
    *,
    causal: bool,
    images: int,
    queries: int,
    keys: int,
    device: torch.device,
) -> Bool[Tensor, "#b 1 #cq k"] | None:
    """Return which keys each query may look at, or None for all; dimensions of 1 stand for all.

    `queries` counts those of one row; the last of them and the last key are the same moment.
    """
    together: Tensor | None = None
    if mask is not None:
        rows = mask[:, None] if mask.ndim == 2 else share_mask(mask, images)
        together = rows[:, None]
    if causal and queries > 1:
        past = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        together = past[None, None] if together is None else together & past
    return together


def share_mask(mask: Bool[Tensor, "n q k"], images: int) -> Bool[Tensor, "b cq k"]:
    """Return the rows of a mask for queries that `share` put together."""
    return mask.reshape(images, -1, mask.shape[-1])
