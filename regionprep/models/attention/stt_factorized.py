"""Factorized tensor synthesizers (FSD, FSR): arXiv 2201.01410, section 3.3.

    A ⊗ B     = [A_11 B .. A_1k B; ..; A_a1 B .. A_ak B]                                 (10)
    D(A_(H))  = A_(H)1 ⊗ A_(H)2 ⊗ .. ⊗ A_(H)N                                            (16)
    Z         = X ×_H D_H(A_(H)) ×_W D_W(A_(W)) ×_C D_C(A_(C))                           (17)
    S         = Softmax(Z),    Y = S V
    R         = R_1 ⊗ R_2 ⊗ .. ⊗ R_N,    Y = Softmax(R) V                                (18)

    symbol                      argument
    X                           query, its cells row by row
    α_i x β_i of A_(H)i, ..     height_factors, width_factors, channel_factors: [[α_1, β_1], ..]
    α_i x β_i of R_i            factors
    A_(H)i, .., R_i             FactorizedMap.height, .width, .channel, RandomFactors.factors
    V                           Synthesizer.value(value)

Departures:
- Number and sizes of the factors are unstated. By default there are two, those of rows and of
  columns of the grid: A_(H) = (H x H) ⊗ (W x 1), A_(W) = (H x 1) ⊗ (W x W), R = (H x H) ⊗ (W x W);
  A_(C) is split as evenly as its length allows. With one factor each they are eq. 11 and 15.
- A mode is multiplied by its factors one after the other, for cells are row-major as the indices
  of a Kronecker product are. R is written out: its softmax needs all entries.
- What else is unstated is listed in synthesizer.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models.attention.stt import CHANNEL, HEIGHT, WIDTH, mode_product
from regionprep.models.attention.synthesizer import Synthesizer, drawn
from regionprep.models.options import Count, Rate

Factors = Annotated[
    list[Annotated[list[Count], Field(min_length=2, max_length=2)]], Field(min_length=1)
]
"""The rows and columns of the factors of a Kronecker product, first to last."""


def kronecker_mode_product(
    x: Float[Tensor, "*before"], factors: Sequence[Float[Tensor, "_ _"]], mode: int
) -> Float[Tensor, "*after"]:
    """Return x ×_mode (A_1 ⊗ .. ⊗ A_N), without that product, for modes counted from 0."""
    x = x.unflatten(mode, [factor.shape[1] for factor in factors])
    for place, factor in enumerate(factors, start=mode):
        x = mode_product(x, factor, place)  # Eq. 16
    return x.flatten(mode, mode + len(factors) - 1)


def factorized_map(
    x: Float[Tensor, "b H W C"], factors: Sequence[Sequence[Float[Tensor, "_ _"]]]
) -> Float[Tensor, "b k k"]:
    """Return Z of the factors of A_(H), A_(W), A_(C); the last product has one row."""
    for mode in (CHANNEL, WIDTH, HEIGHT):  # The channels first: one number a cell is left.
        x = kronecker_mode_product(x, factors[mode], mode + 1)  # Eq. 17
    return x.squeeze(CHANNEL + 1)


def factorized(factors: Factors, *, rows: int, columns: int, matrix: str) -> nn.ParameterList:
    """Return new factors of a matrix, or raise InputError where they do not multiply up to it."""
    high, wide = (math.prod(shape[side] for shape in factors) for side in (0, 1))
    if (high, wide) != (rows, columns):
        given = " and ".join(f"{shape[0]} x {shape[1]}" for shape in factors)
        raise InputError(
            f"factors of {matrix}, {rows} x {columns}, multiply up to {high} x {wide}: {given}",
            mend=f"Choose factors [rows, columns] whose rows multiply up to {rows} and whose "
            f"columns multiply up to {columns}.",
        )
    return nn.ParameterList(drawn(*shape) for shape in factors)


class FactorizedMap(nn.Module):
    """Z of eq. 17, before its softmax."""

    def __init__(
        self,
        *,
        grid: tuple[int, int],
        width: int,
        height_factors: Factors | None = None,
        width_factors: Factors | None = None,
        channel_factors: Factors | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        high, wide = grid
        even = max(part for part in range(1, math.isqrt(width) + 1) if width % part == 0)
        self.height = factorized(
            height_factors or [[high, high], [wide, 1]],
            rows=high * wide,
            columns=high,
            matrix="A_(H)",
        )
        self.width = factorized(
            width_factors or [[high, 1], [wide, wide]],
            rows=high * wide,
            columns=wide,
            matrix="A_(W)",
        )
        self.channel = factorized(
            channel_factors or [[1, even], [1, width // even]],
            rows=1,
            columns=width,
            matrix="A_(C)",
        )

    def forward(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "b k k"]:
        """Return the map before its softmax."""
        factors = [list(mode) for mode in (self.height, self.width, self.channel)]
        return factorized_map(x.unflatten(1, self.grid), factors)


class RandomFactors(nn.Module):
    """R of eq. 18, before its softmax."""

    def __init__(self, *, grid: tuple[int, int], factors: Factors | None = None) -> None:
        super().__init__()
        high, wide = grid
        self.factors = factorized(
            factors or [[high, high], [wide, wide]],
            rows=high * wide,
            columns=high * wide,
            matrix="R",
        )

    def forward(self) -> Float[Tensor, "k k"]:
        """Return the Kronecker product of all factors."""
        return functools.reduce(torch.kron, self.factors)  # Eq. 18


class TensorFactorizedSynthesizer(Synthesizer):
    """FSD: the tensor dense synthesizer with Kronecker products for its three matrices."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        grid: tuple[int, int],
        height_factors: Factors | None = None,
        width_factors: Factors | None = None,
        channel_factors: Factors | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        self.dense = FactorizedMap(
            grid=grid,
            width=width,
            height_factors=height_factors,
            width_factors=width_factors,
            channel_factors=channel_factors,
        )

    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "b k k"]:
        """Return S."""
        return self.dense(x).softmax(-1)  # Eq. 17


class TensorRandomFactorizedSynthesizer(Synthesizer):
    """FSR: the tensor random synthesizer with a Kronecker product for its matrix."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        grid: tuple[int, int],
        factors: Factors | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        self.random = RandomFactors(grid=grid, factors=factors)

    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "1 k k"]:
        """Return Softmax(R), whatever the image."""
        del x
        return self.random().softmax(-1)[None]  # Eq. 18
