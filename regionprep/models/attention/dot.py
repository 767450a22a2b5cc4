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
"""

from __future__ import annotations

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
    dropout: float = 0.0,
) -> Float[Tensor, "b h q d"]:
    """Return the heads, 0 for a query that may look at nothing."""
    attend = functional.scaled_dot_product_attention
    if allowed is None:
        return attend(query, key, value, dropout_p=dropout)  # Eq. 1
    # A softmax of nothing is 0 or not a number, as the kernel has it: let such queries look at
    # everything, and drop what they take.
    some = allowed.any(-1, keepdim=True)
    heads = attend(query, key, value, attn_mask=allowed | ~some, dropout_p=dropout)  # Eq. 1
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
        rate = self.dropout if self.training else 0.0
        heads = dot(queries, keys, values, allowed=seen, dropout=rate)
        return self.output(self.merge(heads)).reshape(query.shape)
