"""Scaled dot-product attention, from "Attention Is All You Need" (arXiv 1706.03762), section 3.2.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                                     (1)
    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O,
    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)

    symbol          argument
    Q, K, V         query, key, value
    h, d_k          heads, width / heads
    W^Q, W^K, W^V   DotAttention.query, .key, .value
    W^O             DotAttention.output

Departures: the projections have biases, and dropout falls on the attention's weights, both as in
the implementations that captioning papers build on.

Relatives change two stages: `prepare`, what becomes of queries and keys before they are matched,
and `score_bias`, what is added to the scores.
"""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from regionprep.models.attention.mechanism import (
    Cache,
    KeysAndValues,
    Layout,
    Mechanism,
    allowed,
    share,
)
from regionprep.models.options import Rate


def dot(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b h k d"],
    value: Float[Tensor, "b h k d"],
    *,
    allowed: Bool[Tensor, "#b 1 #q k"] | None = None,
    bias: Float[Tensor, "#b #h q k"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b h q d"]:
    """Return the heads, 0 for a query that may look at nothing; `bias` is added to the scores."""
    attend = functional.scaled_dot_product_attention
    if allowed is None:
        return attend(query, key, value, attn_mask=bias, dropout_p=dropout)  # Eq. 1
    # A softmax of nothing is 0 or not a number, as the kernel has it: let such queries look at
    # everything, and drop what they take.
    some = allowed.any(-1, keepdim=True)
    seen = allowed | ~some
    mask = seen if bias is None else bias.masked_fill(~seen, -math.inf)
    heads = attend(query, key, value, attn_mask=mask, dropout_p=dropout)  # Eq. 1
    return heads.masked_fill(~some, 0)


class DotAttention(Mechanism):
    """Multi-head scaled dot-product attention through torch's fused kernels."""

    def __init__(self, *, width: int, heads: int, dropout: Rate = 0.0) -> None:
        super().__init__(width=width, heads=heads)
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

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

        def project() -> KeysAndValues:
            return self.split(self.key(key)), self.split(self.value(value))

        images = len(key)
        queries = self.split(self.query(share(query, images)))
        keys, values = cache.keep(project) if cache else project()
        seen = allowed(
            mask,
            causal=causal,
            images=images,
            queries=query.shape[1],
            keys=keys.shape[2],
            device=query.device,
        )
        real = real_regions(mask, query_mask)
        queries, keys = self.prepare(queries, keys, real)
        bias = self.score_bias(query, key, layout=layout, real=real)
        rate = self.dropout if self.training else 0.0
        heads = dot(queries, keys, values, allowed=seen, bias=bias, dropout=rate)
        return self.output(self.merge(heads)).reshape(query.shape)

    def prepare(
        self,
        queries: Float[Tensor, "b h q d"],
        keys: Float[Tensor, "b h k d"],
        real: Bool[Tensor, "_ r"] | None,
    ) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b h k d"]]:
        """Return the queries and keys that are matched; for relatives of encoders."""
        del real
        return queries, keys

    def score_bias(
        self,
        query: Float[Tensor, "n q m"],
        key: Float[Tensor, "b k m"],
        *,
        layout: Layout | None,
        real: Bool[Tensor, "_ r"] | None,
    ) -> Float[Tensor, "#b #h q k"] | None:
        """Return what is added to the scaled scores; for relatives of encoders."""
        del query, key, layout, real
        return None


def real_regions(
    mask: Bool[Tensor, "b k"] | Bool[Tensor, "n q k"] | None, query_mask: Bool[Tensor, "n q"] | None
) -> Bool[Tensor, "n r"] | None:
    """Return which regions are real, None for all, where queries and keys are the same regions."""
    whole = query_mask is None and mask is not None and mask.ndim == 2
    return mask if whole else query_mask
