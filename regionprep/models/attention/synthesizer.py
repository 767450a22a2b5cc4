"""Dense synthesizer (SD), from "Synthesizer" (arXiv 2005.00743), section 3.1, and the base of all.

    B_i = F(X_i),    F(X) = W_2 ReLU(W_1 X),    W_1 in m x m, W_2 in N x m
    Y   = Softmax(B) G(X)

    symbol      argument
    X           query
    N           the cells of the grid
    W_1, W_2    MatrixDenseSynthesizer.inner, .outer
    G           Synthesizer.value

Departures, here and in the tensor synthesizers, whose paper (arXiv 2201.01410) states nothing of
this; so that all of them differ in their maps alone:
- One map for all heads, where 2005.00743 has one for each: the number of heads changes nothing.
- No bias in what makes the map; the softmax goes over the keys.
- Values and output are projected with biases, and dropout falls on the map, both as in `dot`.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regionprep.models.attention.grid import GridMechanism
from regionprep.models.options import Rate


def drawn(rows: int, columns: int) -> nn.Parameter:
    """Return a new weight of a map, as the transformer draws all its matrices."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(rows, columns)))


class Synthesizer(GridMechanism):
    """Attention whose map is made without comparing queries with keys."""

    @abstractmethod
    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "#b k k"]:
        """Return the attention map after its softmax; its last axis is the keys."""

    def look(
        self,
        query: Float[Tensor, "b k m"],
        key: Float[Tensor, "b k m"],
        value: Float[Tensor, "b k m"],
    ) -> Float[Tensor, "b k m"]:
        """Return S V, with a dropout of its own for each image."""
        del key  # The map is made of the queries alone.
        weights = self.weights(query).expand(len(value), -1, -1)
        return self.dropout(weights) @ self.value(value)


class MatrixDenseSynthesizer(Synthesizer):
    """SD: each cell makes its row of the map with a small network."""

    def __init__(
        self, *, width: int, heads: int, grid: tuple[int, int], dropout: Rate = 0.0
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        self.inner = nn.Linear(width, width, bias=False)
        self.outer = nn.Linear(width, self.cells, bias=False)

    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "b k k"]:
        """Return Softmax(B)."""
        return self.outer(self.inner(x).relu()).softmax(-1)
