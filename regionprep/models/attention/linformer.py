"""Linformer (CL), "Self-Attention with Linear Complexity" (arXiv 2006.04768), section 4.

    head_i = softmax(Q W_i^Q (E_i K W_i^K)^T / sqrt(d_k)) F_i V W_i^V                     (7)

    symbol              argument
    Q, K, V             query, key, value
    E, F in k x n       LinformerAttention.shorten_keys, .shorten_values
    k                   rank
    n                   the cells of the grid
    W^Q, W^K, W^V       LinformerAttention.query, .key, .value

Departures:
- E and F are shared by the heads of a layer, one of the paper's ways, and have no bias.
- `rank` is half the cells unless given, as the paper's 256 of 512; arXiv 2201.01410, whose baseline
  this is, does not state its own.
- Projections have biases and dropout falls on the attention's weights, as in `dot`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models.attention.dot import dot
from regionprep.models.attention.grid import GridMechanism
from regionprep.models.attention.synthesizer import drawn
from regionprep.models.options import Count, Rate


class LinformerAttention(GridMechanism):
    """Dot-product attention over a few learned mixtures of the cells."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        grid: tuple[int, int],
        rank: Count | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        rank = (self.cells + 1) // 2 if rank is None else rank
        if rank > self.cells:
            raise InputError(
                f"a rank of {rank} for {self.cells} cells shortens nothing",
                mend=f"Choose a rank from 1 to {self.cells}.",
            )
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.shorten_keys = drawn(rank, self.cells)
        self.shorten_values = drawn(rank, self.cells)

    def look(
        self,
        query: Float[Tensor, "b k m"],
        key: Float[Tensor, "b k m"],
        value: Float[Tensor, "b k m"],
    ) -> Float[Tensor, "b k m"]:
        """Return the heads next to each other."""
        heads = dot(
            self.split(self.query(query)),
            self.split(self.shorten_keys @ self.key(key)),
            self.split(self.shorten_values @ self.value(value)),
            dropout=self.dropout.p if self.training else 0.0,
        )  # Eq. 7
        return self.merge(heads)
