"""Tensor dense synthesizer (STT): "Synthesizer Based Efficient Self-Attention" (arXiv 2201.01410).

    (X ×_n A_n)_{i_1 .. j_n .. i_N} = Σ_{i_n} x_{i_1 .. i_n .. i_N} a_{j_n i_n}           (7)
    Z   = X ×_1 A_(H) ×_2 A_(W) ×_3 A_(C)                                                (11)
    S   = Softmax(Z)                                                                     (12)
    Y   = S V                                                                            (13)
    Y   = Softmax(Z_H) V + Softmax(Z_W) V + Softmax(Z_C) V                               (14)

    map         A_(H)       A_(W)       A_(C)       its rows, its columns   registered as
    Z_H         1 x H       HW x W      HW x C      width, channels         stt_height
    Z_W         HW x H      1 x W       HW x C      height, channels        stt_width
    Z_C         HW x H      HW x W      1 x C       height, width           stt_channel, stt
    all three                                                               stt_sum

    symbol              argument
    X in H x W x C      query, its cells row by row
    A_(H), .., A_(C)    TensorMap.matrices
    V                   TensorDenseSynthesizer.value(value)

Departures:
- Eq. 11 is Z_C of section 3.2.1, so `stt` and `stt_channel` are one mechanism under two names.
- STTH and STTW ("full-rank in height", in width) are taken to be Z_H and Z_W.
- The three softmaxes of eq. 14 are summed as printed: rows of its map sum to 3.
- Biases, heads and the axis of the softmax are unstated: see synthesizer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regionprep.models.attention.synthesizer import Synthesizer, drawn
from regionprep.models.options import Rate

HEIGHT, WIDTH, CHANNEL = range(3)
"""The modes of a feature map."""


def mode_product(
    x: Float[Tensor, "*before"], matrix: Float[Tensor, "j i"], mode: int
) -> Float[Tensor, "*after"]:
    """Return x ×_mode A, for modes counted from 0: its length i becomes j."""
    return (x.movedim(mode, -1) @ matrix.mT).movedim(-1, mode)  # Eq. 7


def tensor_map(
    x: Float[Tensor, "b H W C"], matrices: Sequence[Float[Tensor, "_ _"]], *, reduced: int
) -> Float[Tensor, "b k k"]:
    """Return Z of A_(H), A_(W), A_(C), of which that of the mode `reduced` has one row."""
    # The order changes nothing but the cost: first what makes the tensor small.
    for mode in sorted((CHANNEL, WIDTH, HEIGHT), key=lambda mode: mode != reduced):
        x = mode_product(x, matrices[mode], mode + 1)  # Eq. 11
    return x.squeeze(reduced + 1)


class TensorMap(nn.Module):
    """Z_H, Z_W or Z_C, as the mode that is reduced says."""

    def __init__(self, *, grid: tuple[int, int], width: int, reduced: int) -> None:
        super().__init__()
        self.grid, self.reduced = grid, reduced
        cells = grid[0] * grid[1]
        self.matrices = nn.ParameterList(
            drawn(1 if mode == reduced else cells, length)
            for mode, length in enumerate((*grid, width))
        )

    def forward(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "b k k"]:
        """Return the map before its softmax."""
        return tensor_map(x.unflatten(1, self.grid), list(self.matrices), reduced=self.reduced)


class TensorDenseSynthesizer(Synthesizer):
    """STT: a map made of the feature map by one product a mode, the channels reduced to one."""

    reduced: ClassVar[tuple[int, ...]] = (CHANNEL,)

    def __init__(
        self, *, width: int, heads: int, grid: tuple[int, int], dropout: Rate = 0.0
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        self.maps = nn.ModuleList(
            TensorMap(grid=grid, width=width, reduced=mode) for mode in self.reduced
        )

    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "b k k"]:
        """Return S, or the sum of the three."""
        return torch.stack([one(x).softmax(-1) for one in self.maps]).sum(0)  # Eq. 12, 14


class TensorHeightSynthesizer(TensorDenseSynthesizer):
    """STTH: the height reduced to one."""

    reduced: ClassVar[tuple[int, ...]] = (HEIGHT,)


class TensorWidthSynthesizer(TensorDenseSynthesizer):
    """STTW: the width reduced to one."""

    reduced: ClassVar[tuple[int, ...]] = (WIDTH,)


class TensorSumSynthesizer(TensorDenseSynthesizer):
    """Eq. 14: the sum of the three."""

    reduced: ClassVar[tuple[int, ...]] = (HEIGHT, WIDTH, CHANNEL)
