"""Show and Tell: an LSTM that sees the image once, before the first word (arXiv 1411.4555).

Section 3.1:

    x_(-1)  = CNN(I)                                                                         (10)
    x_t     = W_e S_t            t = 0 .. N-1                                                (11)
    p_(t+1) = LSTM(x_t)          t = 0 .. N-1                                                (12)

    symbol             argument
    CNN(I)             ShowAndTell.image of the mean of regions.features
    W_e                words; word_width
    LSTM               .from_words, .from_state with width units, and .output

Departures:
- The image is the mean of its regions, or of the cells of a feature map. A linear layer brings it
  to the width of a word, as the last one of the paper's convolutional network does.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regionprep.models.captioner import Regions, Shape
from regionprep.models.options import Count, Rate
from regionprep.models.recurrent import RecurrentCaptioner, RecurrentState, lstm, mean_region

Seen = tuple[Tensor, Tensor]
"""Hidden states and cells (b, i) after the image."""


class ShowAndTell(RecurrentCaptioner[Seen]):
    """An LSTM without attention."""

    def __init__(
        self,
        shape: Shape,
        *,
        word_width: Count = 512,
        width: Count = 512,
        dropout: Rate = 0.5,
    ) -> None:
        """Build the LSTM; any regions and any feature map will do."""
        super().__init__(
            shape,
            word_width=word_width,
            dropout=dropout,
        )
        self.image = nn.Linear(shape.feature_width, word_width)
        self.width = width
        self.from_words = nn.Linear(word_width, 4 * width)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.output = nn.Linear(width, shape.vocabulary_size)
        self.initialise()

    def encode(self, regions: Regions) -> Seen:
        """Return the state after the image."""
        features = regions.features.to(self.image.weight.dtype)
        image = self.dropout(self.image(mean_region(features, regions.mask)))  # Eq. 10
        zeros = image.new_zeros(len(image), self.width)
        return lstm(self.from_words(image), zeros)

    def start(self, memory: Seen, beams: int) -> RecurrentState[Seen]:
        """Return the state after the image, `beams` rows an image."""
        return RecurrentState(memory, tuple(row.repeat_interleave(beams, 0) for row in memory))

    def unroll(
        self, words: Float[Tensor, "n t m"], state: RecurrentState[Seen]
    ) -> tuple[Float[Tensor, "n t i"], RecurrentState[Seen]]:
        """Return the hidden state after each word, and the state after the last."""
        hidden, cell = state.rows
        read = []
        for gates in self.from_words(words).unbind(1):
            hidden, cell = lstm(gates + self.from_state(hidden), cell)  # Eq. 11, 12
            read.append(hidden)
        return torch.stack(read, 1), state.after(hidden, cell)

    def predict(
        self, words: Float[Tensor, "n t m"], read: Float[Tensor, "n t i"]
    ) -> Float[Tensor, "n t v"]:
        """Return the logits of the word that follows each."""
        del words
        return self.output(self.dropout(read))  # Eq. 12
