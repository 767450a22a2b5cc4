"""Meshed cross-attention, from "Meshed-Memory Transformer" (arXiv 1912.08226), section 3.2.

    C(X_i, Y)    = Attention(W_q Y, W_k X_i, W_v X_i)
    α_i          = σ(W_i [Y, C(X_i, Y)] + b_i)
    M_mesh(X, Y) = Σ_i α_i ⊙ C(X_i, Y) / sqrt(N)
    Z            = LayerNorm(Y + M_mesh(X, Y))              norm last, as printed

    symbol          argument
    Y               hidden
    X_1 .. X_N      memory.layers
    N               layers
    W_i, b_i        Meshed.gates
    C               Meshed.attention: one, which all layers of the encoder go through

Departures:
- The sum is divided by sqrt(N), as in the authors' code; the equation has no divisor.
- Add and norm stand around the sum, as printed. In the code they are inside C: α_i sees and weighs
  LayerNorm(Y + attention), and nothing is added after the sum.
- With norm first only the last X_i has passed the encoder's closing norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.models.attention import Mechanism, MemoryCache
from regionprep.models.blocks import Residual
from regionprep.models.connections.connection import Connection, Memory


def meshed(
    query: Float[Tensor, "n t m"],
    attended: Sequence[Float[Tensor, "n t m"]],
    gates: Sequence[Callable[[Tensor], Tensor]],
) -> Float[Tensor, "n t m"]:
    """Return M_mesh of Y and of what it found in each layer of the encoder."""
    weighed = [
        gate(torch.cat([query, found], -1)).sigmoid() * found  # α_i ⊙ C(X_i, Y)
        for gate, found in zip(gates, attended, strict=True)
    ]
    return torch.stack(weighed).sum(0) / math.sqrt(len(weighed))


class Meshed(Connection):
    """Adds what one attention finds in every layer of the encoder, each by its own gate."""

    def __init__(
        self,
        *,
        attention: Callable[[], Mechanism],
        width: int,
        dropout: float,
        norm_first: bool,
        layers: int,
    ) -> None:
        super().__init__()
        self.attention = attention()
        self.gates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.residual = Residual(width=width, dropout=dropout, norm_first=norm_first)

    def forward(
        self,
        hidden: Float[Tensor, "n t m"],
        memory: Memory,
        *,
        words: Bool[Tensor, "n t"] | None = None,
        caches: list[MemoryCache] | None = None,
    ) -> Float[Tensor, "n t m"]:
        """Return the hidden states after a look at the memory; see Connection."""
        kept: Sequence[MemoryCache | None] = caches or [None] * len(memory.layers)

        def look(query: Tensor) -> Tensor:
            found = [
                self.attention(query, layer, layer, mask=memory.mask, query_mask=words, cache=cache)
                for layer, cache in zip(memory.layers, kept, strict=True)
            ]
            return meshed(query, found, list(self.gates))

        return self.residual(hidden, look)

    def caches(self, memory: Memory) -> list[MemoryCache]:
        """Return a cache for each layer of the encoder."""
        return [MemoryCache() for _ in memory.layers]
