"""What the LSTM captioners share: the cell, additive attention, the state, whole captions, steps.

What does not depend on the step before is done for a whole caption at once: the embedding of its
words and their part of the gates, the projection of the regions, the output layer. The captions of
an image share what was made of its regions.

Dropout falls where Zaremba et al. (arXiv 1409.2329) put it, on the connections that are not
recurrent: on the embedded words and on what the output layer reads. None of the papers says.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models.captioner import Captioner, Regions, Shape

M = TypeVar("M")


def lstm(
    gates: Float[Tensor, "n g"], cell: Float[Tensor, "n i"]
) -> tuple[Float[Tensor, "n i"], Float[Tensor, "n i"]]:
    """Return h_t and c_t of Zaremba et al.'s cell from i, f, o and the new memory before σ, tanh.

    i_t, f_t, o_t = σ(gates)   c_t = f_t c_(t-1) + i_t tanh(gate)   h_t = o_t tanh(c_t)
    """
    write, forget, out, new = gates.chunk(4, -1)
    cell = forget.sigmoid() * cell + write.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def mean_region(
    features: Float[Tensor, "b r f"], mask: Bool[Tensor, "b r"]
) -> Float[Tensor, "b f"]:
    """Return the mean of each image's regions; 0 for an image without any."""
    total = features.masked_fill(~mask.unsqueeze(-1), 0).sum(1)
    return total / mask.sum(1, keepdim=True).clamp_min(1)


def pool(weights: Float[Tensor, "n r"], features: Float[Tensor, "b r f"]) -> Float[Tensor, "n f"]:
    """Return the weighted sum of the regions for each row; rows of an image follow each other."""
    return (weights.unflatten(0, (len(features), -1)) @ features).flatten(0, 1)


class AdditiveAttention(nn.Module):
    """Attention by a perceptron with one hidden layer: w^T tanh(W_a a_i + W_h h + b).

    A bias after w would be the same for all regions, and the softmax would not see it.
    """

    def __init__(self, *, feature_width: int, hidden_width: int, width: int) -> None:
        super().__init__()
        self.key = nn.Linear(feature_width, width)
        self.query = nn.Linear(hidden_width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(
        self,
        keys: Float[Tensor, "b r i"],
        hidden: Float[Tensor, "n m"],
        mask: Bool[Tensor, "b r"],
    ) -> tuple[Float[Tensor, "n r"], Float[Tensor, "n r"]]:
        """Return each row's weights over its image's regions, and their logarithms.

        `keys` is `self.key` of the regions, made once. Where a region is masked both are 0.
        """
        query = self.query(hidden).unflatten(0, (len(mask), -1))
        scores = self.score((keys.unsqueeze(1) + query.unsqueeze(2)).tanh()).squeeze(-1)
        hole = ~mask.unsqueeze(1)
        scores = scores.masked_fill(hole, torch.finfo(scores.dtype).min)
        log_weights = scores.log_softmax(-1).masked_fill(hole, 0)
        weights = log_weights.exp().masked_fill(hole, 0)
        return weights.flatten(0, 1), log_weights.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Annotations:
    """Encoded images: their regions, these projected for attention, which are real, their mean."""

    features: Float[Tensor, "b r f"]
    keys: Float[Tensor, "b r i"]
    mask: Bool[Tensor, "b r"]
    mean: Float[Tensor, "b f"]

    @classmethod
    def of(cls, regions: Regions, attention: AdditiveAttention) -> Annotations:
        """Return what attention needs of the regions."""
        # Padding may hold anything, and 0 times what is not a number is none either.
        features = regions.features.to(attention.key.weight.dtype)
        features = features.masked_fill(~regions.mask.unsqueeze(-1), 0)
        mean = mean_region(features, regions.mask)
        return cls(features, attention.key(features), regions.mask, mean)


@dataclass(frozen=True, eq=False)
class RecurrentState(Generic[M]):
    """Where captions are: their images, and the hidden states and cells, one row a caption."""

    memory: M
    rows: tuple[Tensor, ...]

    def reorder(self, index: Int[Tensor, " n"]) -> RecurrentState[M]:
        """Return the state whose row i was row `index[i]`."""
        return replace(self, rows=tuple(row[index] for row in self.rows))

    def after(self, *rows: Tensor) -> RecurrentState[M]:
        """Return the state of the same images with other hidden states and cells."""
        return replace(self, rows=rows)


class RecurrentCaptioner(Captioner[M, RecurrentState[M]]):
    """A captioner that reads a caption word by word, and whole captions in the same way."""

    def __init__(self, shape: Shape, *, word_width: int, dropout: float) -> None:
        super().__init__(shape)
        self.words = nn.Embedding(shape.vocabulary_size, word_width)
        self.dropout = nn.Dropout(dropout)

    @abstractmethod
    def unroll(
        self, words: Float[Tensor, "n t m"], state: RecurrentState[M]
    ) -> tuple[Float[Tensor, "n t i"], RecurrentState[M]]:
        """Return what the output layer reads after each word, and the state after the last."""

    @abstractmethod
    def predict(
        self, words: Float[Tensor, "n t m"], read: Float[Tensor, "n t i"]
    ) -> Float[Tensor, "n t v"]:
        """Return the logits of the word that follows each."""

    def forward(self, regions: Regions, tokens: Int[Tensor, "b c t"]) -> Float[Tensor, "b c t v"]:
        """Return the logits of the token that follows each token; c captions share an image."""
        words = self.embed(tokens.flatten(0, 1))
        read, _ = self.unroll(words, self.start(self.encode(regions), tokens.shape[1]))
        return self.predict(words, read).unflatten(0, tokens.shape[:2])

    def step(
        self, tokens: Int[Tensor, " n"], state: RecurrentState[M]
    ) -> tuple[Float[Tensor, "n v"], RecurrentState[M]]:
        """Return the logits that follow `tokens`, and the state after them."""
        words = self.embed(tokens.unsqueeze(1))
        read, state = self.unroll(words, state)
        return self.predict(words, read).squeeze(1), state

    def embed(self, tokens: Int[Tensor, "n t"]) -> Float[Tensor, "n t m"]:
        """Return the embedded words; InputError where there are too many."""
        length = tokens.shape[1] - 1
        if length > self.max_length:
            raise InputError(
                f"a caption of {length} words, and this model has room for {self.max_length}",
                mend="Shorten the captions, or build the model with a larger max_length.",
            )
        embedded: Tensor = self.dropout(self.words(tokens))
        return embedded
