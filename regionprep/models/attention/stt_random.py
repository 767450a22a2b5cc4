"""Tensor random synthesizer (SR): "Synthesizer Based Efficient Self-Attention" (arXiv 2201.01410).

    Y = Softmax(R) V                                                                     (15)

    symbol          argument
    R in HW x HW    TensorRandomSynthesizer.random
    V               TensorRandomSynthesizer.value(value)

Departures: how R is drawn is unstated; here as all matrices of the model. What else is unstated is
listed in synthesizer.py.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from regionprep.models.attention.synthesizer import Synthesizer, drawn
from regionprep.models.options import Rate


class TensorRandomSynthesizer(Synthesizer):
    """SR: one map for all images, drawn at random, trained or left as it is."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        grid: tuple[int, int],
        trainable: bool = True,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(width=width, heads=heads, grid=grid, dropout=dropout)
        self.random: Tensor
        random = drawn(self.cells, self.cells)
        if trainable:
            self.random = random
        else:
            self.register_buffer("random", random.detach())

    def weights(self, x: Float[Tensor, "b k m"]) -> Float[Tensor, "1 k k"]:
        """Return Softmax(R), whatever the image."""
        del x
        return self.random.softmax(-1)[None]  # Eq. 15
