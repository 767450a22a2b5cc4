"""Attention on Attention, from "Attention on Attention for Image Captioning" (arXiv 1908.06954).

    v        = f_att(Q, K, V)                      any attention, here scaled dot product
    i        = W^i_q q + W^i_v v + b^i             the information
    g        = σ(W^g_q q + W^g_v v + b^g)          the gate
    AoA      = g ⊙ i

    symbol          argument
    q               query
    v               attended
    W^i, b^i        AttentionOnAttention.information, over [q; v]
    W^g, b^g        AttentionOnAttention.gate, over [q; v]
    f_att           AoaAttention.query, .key, .value

Departures:
- q is the query before its projection, as in the authors' code; the paper's encoder passes W^Q q.
- No dropout falls on [q; v]: the code has it, with a rate of its own; the paper does not.
- Heads are joined without W^O, as in the paper's f_mh-att: W^i and W^g take its place.
- A query that may look at nothing has v = 0, and still its own part of i and g.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.models.attention.dot import DotAttention
from regionprep.models.attention.mechanism import Cache, Layout
from regionprep.models.options import Rate


def attention_on_attention(
    query: Float[Tensor, "n q m"],
    attended: Float[Tensor, "n q m"],
    *,
    information: Callable[[Tensor], Tensor],
    gate: Callable[[Tensor], Tensor],
) -> Float[Tensor, "n q m"]:
    """Return g ⊙ i: what was attended to, as far as it concerns the query."""
    both = torch.cat([query, attended], -1)
    return gate(both).sigmoid() * information(both)


class AttentionOnAttention(nn.Module):
    """The gate and the information over a query and what any attention has found for it."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.information = nn.Linear(2 * width, width)
        self.gate = nn.Linear(2 * width, width)

    def forward(
        self, query: Float[Tensor, "n q m"], attended: Float[Tensor, "n q m"]
    ) -> Float[Tensor, "n q m"]:
        """Return g ⊙ i."""
        return attention_on_attention(query, attended, information=self.information, gate=self.gate)


class AoaAttention(DotAttention):
    """Multi-head scaled dot-product attention with Attention on Attention in place of W^O."""

    def __init__(self, *, width: int, heads: int, dropout: Rate = 0.0) -> None:
        super().__init__(width=width, heads=heads, dropout=dropout)
        self.register_module("output", nn.Identity())
        self.on_attention = AttentionOnAttention(width=width)

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
        """Return what each query takes from the values; see Mechanism."""
        attended = super().forward(
            query,
            key,
            value,
            mask=mask,
            query_mask=query_mask,
            causal=causal,
            layout=layout,
            cache=cache,
        )
        return self.on_attention(query, attended)
