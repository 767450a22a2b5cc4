"""Memory-augmented attention, from "Meshed-Memory Transformer" (arXiv 1912.08226), section 3.1.

    M_mem(X) = Attention(W_q X, K, V)
    K        = [W_k X, M_k]
    V        = [W_v X, M_v]

    symbol          argument
    X               query, key, value: the same regions
    M_k, M_v        MemoryAttention.slot_keys, .slot_values, scaled
    number of M's   slots
    W_q, W_k, W_v   MemoryAttention.query, .key, .value

Departures:
- M_k is sqrt(d_k) and M_v sqrt(slots) times the weights, as in the authors' code, where the weights
  start from deviations of 1 / d_k and 1 / slots. They have its shape, (1, slots, width), which
  decides how Xavier's rule, drawn over all weights of a captioner as there, sees them.
- A query of an image without any region does not see the slots either: it takes nothing.
- W^O, biases and dropout are those of scaled dot-product attention (see dot.py).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.models.attention.dot import DotAttention, dot
from regionprep.models.attention.mechanism import Cache, Layout
from regionprep.models.attention.mechanism import allowed as visible
from regionprep.models.options import Count, Rate


def memory_augmented(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b h k d"],
    value: Float[Tensor, "b h k d"],
    slot_keys: Float[Tensor, "1 h s d"],
    slot_values: Float[Tensor, "1 h s d"],
    *,
    allowed: Bool[Tensor, "#b 1 #q k"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b h q d"]:
    """Return the heads of M_mem, 0 for a query that may look at no key."""
    keys = torch.cat([key, slot_keys.expand(len(key), -1, -1, -1)], 2)
    values = torch.cat([value, slot_values.expand(len(key), -1, -1, -1)], 2)
    if allowed is not None:
        some = allowed.any(-1, keepdim=True)
        allowed = torch.cat([allowed, some.expand(-1, -1, -1, slot_keys.shape[2])], -1)
    return dot(query, keys, values, allowed=allowed, dropout=dropout)


class MemoryAttention(DotAttention):
    """Multi-head attention of regions over each other and over learned slots."""

    decodes: ClassVar[bool] = False

    def __init__(self, *, width: int, heads: int, slots: Count = 40, dropout: Rate = 0.0) -> None:
        super().__init__(width=width, heads=heads, dropout=dropout)
        self.slot_keys = nn.Parameter(torch.randn(1, slots, width) * heads / width)
        self.slot_values = nn.Parameter(torch.randn(1, slots, width) / slots)

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
        """Return what each region takes from the others and the slots; see Mechanism."""
        assert not causal and cache is None, "words do not look through memory slots"
        seen = visible(
            mask,
            causal=False,
            images=len(key),
            queries=query.shape[1],
            keys=key.shape[1],
            device=query.device,
        )
        _, slots, width = self.slot_keys.shape
        heads = memory_augmented(
            self.split(self.query(query)),
            self.split(self.key(key)),
            self.split(self.value(value)),
            self.split(self.slot_keys) * math.sqrt(width / self.heads),
            self.split(self.slot_values) * math.sqrt(slots),
            allowed=seen,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(self.merge(heads))
