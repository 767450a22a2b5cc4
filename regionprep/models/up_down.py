"""Up-Down: an LSTM that says where to look, another that writes (arXiv 1707.07998).

Section 3.2:

    h_t   = LSTM(x_t, h_(t-1))                                                                (1)
    x_t^1 = [h_(t-1)^2, v̄, W_e Π_t]                                                           (2)
    a_i,t = w_a^T tanh(W_va v_i + W_ha h_t^1)                                                 (3)
    α_t   = softmax(a_t)                                                                      (4)
    v̂_t   = Σ_i α_i,t v_i                                                                     (5)
    x_t^2 = [v̂_t, h_t^1]                                                                      (6)
    p(y_t | y_1 .. y_(t-1)) = softmax(W_p h_t^2 + b_p)                                        (7)

    symbol             argument
    v_i, v̄             regions.features, their mean
    W_e                words; word_width
    LSTM^1, LSTM^2     look_*, write_*, with width units
    W_va, W_ha, w_a    attention, with attention_width units
    W_p, b_p           output

Departures:
- Attention has a bias inside its tanh; the equation has none.
- States start at 0, which the paper leaves open.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regionprep.models.captioner import Regions, Shape
from regionprep.models.options import Count, Rate
from regionprep.models.recurrent import (
    AdditiveAttention,
    Annotations,
    RecurrentCaptioner,
    RecurrentState,
    lstm,
    pool,
)


class UpDown(RecurrentCaptioner[Annotations]):
    """Two LSTMs with attention over regions between them."""

    def __init__(
        self,
        shape: Shape,
        *,
        word_width: Count = 1000,
        width: Count = 1000,
        attention_width: Count = 512,
        dropout: Rate = 0.0,
    ) -> None:
        """Build the two LSTMs; any regions and any feature map will do."""
        super().__init__(
            shape,
            word_width=word_width,
            dropout=dropout,
        )
        self.width = width
        self.look_words = nn.Linear(word_width, 4 * width)
        self.look_image = nn.Linear(shape.feature_width, 4 * width, bias=False)
        self.look_state = nn.Linear(2 * width, 4 * width, bias=False)
        self.attention = AdditiveAttention(
            feature_width=shape.feature_width, hidden_width=width, width=attention_width
        )
        self.write = nn.Linear(shape.feature_width + 2 * width, 4 * width)
        self.output = nn.Linear(width, shape.vocabulary_size)
        self.initialise()

    def encode(self, regions: Regions) -> Annotations:
        """Return the regions, projected for attention, and their mean."""
        return Annotations.of(regions, self.attention)

    def start(self, memory: Annotations, beams: int) -> RecurrentState[Annotations]:
        """Return states of 0, `beams` rows an image."""
        zeros = memory.mean.new_zeros(beams * len(memory.mean), self.width)
        return RecurrentState(memory, (zeros, zeros, zeros, zeros))

    def unroll(
        self, words: Float[Tensor, "n t m"], state: RecurrentState[Annotations]
    ) -> tuple[Float[Tensor, "n t i"], RecurrentState[Annotations]]:
        """Return h^2 after each word, and the state after the last."""
        memory, (look, look_cell, write, write_cell) = state.memory, state.rows
        of_image = self.look_image(memory.mean).repeat_interleave(len(words) // len(memory.mean), 0)
        given = self.look_words(words) + of_image.unsqueeze(1)
        read = []
        for gates in given.unbind(1):
            gates = gates + self.look_state(torch.cat([write, look], -1))
            look, look_cell = lstm(gates, look_cell)  # Eq. 1, 2
            weights, _ = self.attention(memory.keys, look, memory.mask)  # Eq. 3, 4
            context = pool(weights, memory.features)  # Eq. 5
            write, write_cell = lstm(
                self.write(torch.cat([context, look, write], -1)), write_cell
            )  # Eq. 1, 6
            read.append(write)
        return torch.stack(read, 1), state.after(look, look_cell, write, write_cell)

    def predict(
        self, words: Float[Tensor, "n t m"], read: Float[Tensor, "n t i"]
    ) -> Float[Tensor, "n t v"]:
        """Return the logits of the word that follows each."""
        del words
        return self.output(self.dropout(read))  # Eq. 7
