"""Attention on Attention over the encoder, from arXiv 1908.06954 (see attention/aoa.py).

x + AoA(LayerNorm(x), Attention(LayerNorm(x), M, M))       norm first
LayerNorm(x + AoA(x, Attention(x, M, M)))                  norm last

symbol      argument
x           hidden
M           memory.last
AoA         Aoa.on_attention

The authors' decoder is an LSTM whose state is the query, without a residual connection. In a
transformer it stands where VisualGPT (arXiv 2102.10407, section 3) has it: after the attention
over the encoder, inside add and norm. The attention keeps its W^O, for it may be of any kind.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from regionprep.models.attention import Mechanism, MemoryCache
from regionprep.models.attention.aoa import AttentionOnAttention
from regionprep.models.blocks import Residual
from regionprep.models.connections.connection import Connection, Memory


class Aoa(Connection):
    """Adds what one attention over the encoder's last layer found, as far as it concerns x."""

    def __init__(
        self,
        *,
        attention: Callable[[], Mechanism],
        width: int,
        dropout: float,
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.attention = attention()
        self.on_attention = AttentionOnAttention(width=width)
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

        def look(query: Tensor) -> Tensor:
            attended = self.attention(
                query,
                memory.last,
                memory.last,
                mask=memory.mask,
                query_mask=words,
                cache=caches[0] if caches else None,
            )
            return self.on_attention(query, attended)

        return self.residual(hidden, look)

    def caches(self, memory: Memory) -> list[MemoryCache]:
        """Return the cache of the only attention."""
        del memory
        return [MemoryCache()]
