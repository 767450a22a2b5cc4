"""What attention that is made for one feature map shares: the grid, all of it or nothing.

Queries, keys and values are the cells of one grid, row by row. An image has the whole grid, or
none of it where its features have failed: what looks at less than all cells takes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models.attention.mechanism import Cache, Layout, Mechanism
from regionprep.models.options import Rate


class GridMechanism(Mechanism):
    """Attention with weights of the shape of one grid, (height, width)."""

    decodes: ClassVar[bool] = False

    def __init__(
        self, *, width: int, heads: int, grid: tuple[int, int], dropout: Rate = 0.0
    ) -> None:
        super().__init__(width=width, heads=heads)
        self.grid = grid
        self.cells = grid[0] * grid[1]
        self.dropout = nn.Dropout(dropout)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    @abstractmethod
    def look(
        self,
        query: Float[Tensor, "b k m"],
        key: Float[Tensor, "b k m"],
        value: Float[Tensor, "b k m"],
    ) -> Float[Tensor, "b k m"]:
        """Return what each cell takes from all, before the output projection."""

    def forward(
        self,
        query: Float[Tensor, "b k m"],
        key: Float[Tensor, "b k m"],
        value: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | Bool[Tensor, "b k k"] | None = None,
        query_mask: Bool[Tensor, "b k"] | None = None,
        causal: bool = False,
        layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b k m"]:
        """Return what each cell takes from the values; see Mechanism.

        Raises InputError for regions that are not the cells of this grid, and for words.
        """
        if causal or cache is not None:
            raise InputError(
                "words cannot look through attention that is made for a feature map",
                mend="Give decoder_attention and cross_attention, each one that decodes.",
            )
        of_grid = layout is None or layout.grid == self.grid
        if key.shape[1] != self.cells or not of_grid:
            if mask is not None and not mask.any():
                # The features of all images have failed, so that none is left to tell the grid.
                return self.output(torch.zeros_like(query))
            raise self._other(key.shape[1], layout.grid if layout else None)
        heads = self.look(query, key, value)
        if mask is not None:
            whole = mask.all(-1).reshape(len(mask), -1, 1)
            heads = heads.masked_fill(~whole, 0)
        return self.output(heads)

    def _other(self, regions: int, grid: tuple[int, int] | None) -> InputError:
        own = "{} x {}".format(*self.grid)
        given = "of a grid of {} x {}".format(*grid) if grid else f"{regions} of no known grid"
        return InputError(
            f"the model is made for a grid of {own} cells, and these regions are {given}",
            mend="Use the features it was trained on, made with `prep extract --backbone NAME "
            "--grid`, or train a model on these.",
        )
