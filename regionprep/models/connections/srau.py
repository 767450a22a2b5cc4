"""Self-resurrecting activation units, from "VisualGPT" (arXiv 2102.10407), section 4.1.

    B^vis ⊗ EncDecAttn(H, I) + B^lan ⊗ H                                                  (4)
    B^vis = σ(H) 1(σ(H) > τ)
    B^lan = (1 - σ(H)) 1(1 - σ(H) > τ)                                                    (5)
    B~^vis = B^vis / (B^vis + B^lan),   B~^lan = B^lan / (B^vis + B^lan)                  (6)

    symbol          argument
    H               hidden
    I               memory.last, or each of memory.layers where `meshed`
    EncDecAttn      Srau.attention (eq. 2)
    B^vis, B^lan    Gates.visual, Gates.language
    τ               tau, at least 0 and below 0.5: from there on both gates can be 0, and eq. 6 0/0

The indicator 1(.) is a constant to the gradient, which reaches H through σ(H) where it is 1.

`srau` is eq. 4-5 and `srau_normalized` eq. 6. `srau_released` is what the authors' code computes:

    g_k = σ(W_k [H, EncDecAttn(H, I_k)] + b_k)
    Σ_k [g_k 1(g_k > τ) ⊗ H + (1 - g_k) 1(1 - g_k > τ) ⊗ EncDecAttn(H, I_k)] / sqrt(K)

whose gate has weights, W_k = SrauReleased.gates[k], and weighs the words and not the image.

Departures:
- Eq. 4 has one I, while section 4.2 and figure 1 speak of all layers of the encoder, "meshed like
  in M^2 Transformer". `meshed` sums eq. 4 over them and divides by sqrt(K), as the release does.
- Where the decoder normalises first, so that H is a sum that no norm has seen, the attention looks
  with LayerNorm(H); norm last is eq. 4 to the letter. The gates read H, and nothing normalises the
  output, since they stand "instead of AddNorm".
- Dropout falls on what the attention brings, as in every other branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models.attention import Mechanism, MemoryCache
from regionprep.models.connections.connection import Connection, Gates, Memory

Pair = tuple[Float[Tensor, "n t m"], Float[Tensor, "n t m"]]


def srau(score: Float[Tensor, "n t m"], tau: float) -> Pair:
    """Return the two gates of a score: one that rises with it, and one that falls."""
    rising = score.sigmoid()
    falling = 1 - rising
    return rising * (rising > tau), falling * (falling > tau)  # Eq. 5


def normalized(visual: Float[Tensor, "n t m"], language: Float[Tensor, "n t m"]) -> Pair:
    """Return the gates as shares of their sum, which is above 0 for a tau below 0.5."""
    total = visual + language
    return visual / total, language / total  # Eq. 6


class Srau(Connection):
    """Weighs each value of the words, and of what they find in the image, by the words alone."""

    def __init__(
        self,
        *,
        attention: Callable[[], Mechanism],
        width: int,
        dropout: float,
        norm_first: bool,
        tau: float = 0.2,
        meshed: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= tau < 0.5:
            raise InputError(
                f"a tau of {tau}, where both gates of a self-resurrecting unit could be 0",
                mend="Choose a tau that is at least 0 and below 0.5; the paper's best are 0.1 to "
                "0.3.",
            )
        self.attention = attention()
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.tau, self.meshed = tau, meshed

    def weigh(
        self, hidden: Float[Tensor, "n t m"], found: Float[Tensor, "n t m"], layer: int
    ) -> Pair:
        """Return the visual and the language gate for what was found in a layer of the encoder."""
        del found, layer  # What the gates of the paper do not know.
        return srau(hidden, self.tau)

    def forward(
        self,
        hidden: Float[Tensor, "n t m"],
        memory: Memory,
        *,
        words: Bool[Tensor, "n t"] | None = None,
        caches: list[MemoryCache] | None = None,
    ) -> Float[Tensor, "n t m"]:
        """Return the hidden states after a look at the memory; see Connection."""
        layers = self._layers(memory)
        query, mixed, weights = self.norm(hidden), torch.zeros_like(hidden), []
        for number, layer in enumerate(layers):
            found = self.dropout(
                self.attention(
                    query,
                    layer,
                    layer,
                    mask=memory.mask,
                    query_mask=words,
                    cache=caches[number] if caches else None,
                )
            )
            visual, language = self.weigh(hidden, found, number)
            mixed = mixed + visual * found + language * hidden  # Eq. 4
            weights.append((visual, language))
        self._keep(weights)
        return mixed / math.sqrt(len(layers))

    def caches(self, memory: Memory) -> list[MemoryCache]:
        """Return a cache for each layer of the encoder that is looked at."""
        return [MemoryCache() for _ in self._layers(memory)]

    def _layers(self, memory: Memory) -> tuple[Tensor, ...]:
        return memory.layers if self.meshed else memory.layers[-1:]

    def _keep(self, weights: list[Pair]) -> None:
        if self.keep_gates:
            visual, language = (torch.stack(side).detach() for side in zip(*weights, strict=True))
            self.kept_gates = Gates(visual, language)


class SrauNormalized(Srau):
    """Self-resurrecting units whose two gates sum to one."""

    def weigh(
        self, hidden: Float[Tensor, "n t m"], found: Float[Tensor, "n t m"], layer: int
    ) -> Pair:
        """Return the visual and the language gate for what was found in a layer of the encoder."""
        return normalized(*super().weigh(hidden, found, layer))


class SrauReleased(Srau):
    """Self-resurrecting units with weights, over all layers of the encoder, as released."""

    def __init__(
        self,
        *,
        attention: Callable[[], Mechanism],
        width: int,
        dropout: float,
        norm_first: bool,
        layers: int,
        tau: float = 0.2,
    ) -> None:
        super().__init__(
            attention=attention,
            width=width,
            dropout=dropout,
            norm_first=norm_first,
            tau=tau,
            meshed=True,
        )
        self.gates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def weigh(
        self, hidden: Float[Tensor, "n t m"], found: Float[Tensor, "n t m"], layer: int
    ) -> Pair:
        """Return the visual and the language gate for what was found in a layer of the encoder."""
        language, visual = srau(self.gates[layer](torch.cat([hidden, found], -1)), self.tau)
        return visual, language
