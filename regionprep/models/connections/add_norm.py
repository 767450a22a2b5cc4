"""Add and norm, from "Attention Is All You Need" (arXiv 1706.03762), section 3.1.

x + Attention(LayerNorm(x), M, M)       norm first
LayerNorm(x + Attention(x, M, M))       norm last, as printed

symbol      argument
x           hidden
M           memory.last
"""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from regionprep.models.attention import Mechanism, MemoryCache
from regionprep.models.blocks import Residual
from regionprep.models.connections.connection import Connection, Memory


class AddNorm(Connection):
    """Adds one attention over the encoder's last layer."""

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
            return self.attention(
                query,
                memory.last,
                memory.last,
                mask=memory.mask,
                query_mask=words,
                cache=caches[0] if caches else None,
            )

        return self.residual(hidden, look)

    def caches(self, memory: Memory) -> list[MemoryCache]:
        """Return the cache of the only attention."""
        del memory
        return [MemoryCache()]
