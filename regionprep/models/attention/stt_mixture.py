"""Mixture tensor synthesizer (MS): arXiv 2201.01410, section 3.3.3.

    Y = Softmax(θ_1 S_1(X) + .. + θ_M S_M(X)) V,    Σ θ_i = 1                            (19)
    Y = Softmax(θ_1 S + θ_2 R) V,    S of eq. 17, R of eq. 18                            (20)

    symbol      argument
    X           query, its cells row by row
    S, R        TensorMixtureSynthesizer.dense, .random: see stt_factorized.py
    θ           the softmax of TensorMixtureSynthesizer.theta
    V           TensorMixtureSynthesizer.value(value)

Departures:
- S of eq. 17 is a softmax already, and lies between 0 and 1: under a second one the image moves
  no weight by a ratio of more than e. So the logits of eq. 17 are mixed; mix="letter" is eq. 20.
- How the weights are made to sum to 1 is unstated: a softmax of free ones, equal at first.
- The text names the tensor dense synthesizer, eq. 20 the factorized one, which is taken. With one
  factor a matrix (height_factors [[HW, H]], ..) it is the former.
- What else is unstated is listed in synthesizer.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regionprep.models.attention.stt_factorized import FactorizedMap, Factors, RandomFactors
from regionprep.models.attention.synthesizer import Synthesizer
from regionprep.models.options import Rate


def mixture(
    dense: Float[Tensor, "b k k"], random: Float[Tensor, "k k"], theta: Float[Tensor, " 2"]
) -> Float[Tensor, "b k k"]:
    """Return the map of S and R with weights that sum to one."""
    return (theta[0] * dense + theta[1] * random).softmax(-1)  # Eq. 20


class TensorMixtureSynthesizer(Synthesizer):
    """MS: the factorized dense and random maps, mixed by learned weights."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        grid: tuple[int, int],
        mix: Literal["logits", "letter"] = "logits",
        height_factors: Factors | None = None,
        width_factors: Factors | None = None,
        channel_factors: Factors | None = None,
        random_factors: Factors | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        self.mix = mix
        self.dense = FactorizedMap(
            grid=grid,
            width=width,
            height_factors=height_factors,
            width_factors=width_factors,
            channel_factors=channel_factors,
        )
        self.random = RandomFactors(grid=grid, factors=random_factors)
        self.theta = nn.Parameter(torch.zeros(2))

    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "b k k"]:
        """Return the mixed map."""
        dense = self.dense(x)
        if self.mix == "letter":
            dense = dense.softmax(-1)  # Eq. 17
        return mixture(dense, self.random(), self.theta.softmax(-1))
