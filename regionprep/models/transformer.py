"""The encoder-decoder transformer captioner, with any attention mechanism and any connection.

"Attention Is All You Need" (arXiv 1706.03762) on regions, as captioning uses it: an encoder over
projected region features, which have no order and so no positions, and a decoder over words with
sinusoidal positions. Input and output embeddings are not tied; the output has a bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models.attention import MemoryCache, WordCache
from regionprep.models.blocks import Activation, sinusoids
from regionprep.models.captioner import Captioner, Regions, Shape
from regionprep.models.connections import Memory
from regionprep.models.encoder import Choice, Encoder, Geometry, Sizes
from regionprep.models.options import Count, Rate


@dataclass
class LayerCache:
    """What one layer of the decoder keeps between the steps of a search."""

    words: WordCache
    memory: list[MemoryCache]


class DecoderLayer(nn.Module):
    """Causal self-attention over words, a look at the encoder, the feed-forward network."""

    def __init__(
        self, sizes: Sizes, attention: Choice, cross_attention: Choice, connection: Choice
    ) -> None:
        super().__init__()
        self.attention = sizes.mechanism(attention, decoder=True)
        self.attention_residual = sizes.residual()
        self.connection = sizes.connection(connection, cross_attention)
        self.feed_forward = sizes.inner()
        self.feed_forward_residual = sizes.residual()

    def forward(
        self,
        hidden: Float[Tensor, "n t m"],
        memory: Memory,
        *,
        words: Bool[Tensor, "n t"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "n t m"]:
        """Return the words after a look at those before and at the image."""

        def look(query: Tensor) -> Tensor:
            return self.attention(
                query,
                query,
                query,
                mask=words,
                query_mask=words,
                causal=True,
                cache=cache.words if cache else None,
            )

        hidden = self.attention_residual(hidden, look)
        hidden = self.connection(
            hidden, memory, words=words, caches=cache.memory if cache else None
        )
        return self.feed_forward_residual(hidden, self.feed_forward)


@dataclass
class TransformerState:
    """Where a search is: the images, and what each layer of the decoder keeps."""

    memory: Memory
    caches: list[LayerCache]
    position: int = 0

    def reorder(self, index: Int[Tensor, " n"]) -> TransformerState:
        """Return the state whose row i was row `index[i]`; this one becomes it."""
        for cache in self.caches:
            cache.words.reorder(index)
            for memory in cache.memory:
                memory.reorder(index)
        return self


class Transformer(Captioner[Memory, TransformerState]):
    """An encoder over regions and a decoder over words."""

    def __init__(
        self,
        shape: Shape,
        *,
        encoder_layers: Count = 6,
        decoder_layers: Count = 6,
        width: Count = 512,
        heads: Count = 8,
        feed_forward: Count = 2048,
        feed_forward_activation: Activation = "relu",
        dropout: Rate = 0.1,
        norm: Literal["first", "last"] = "first",
        attention: str | dict[str, Any] = "dot",
        decoder_attention: str | dict[str, Any] | None = None,
        cross_attention: str | dict[str, Any] | None = None,
        connection: str | dict[str, Any] = "add_norm",
        geometry: Geometry = "none",
    ) -> None:
        """Build the two stacks.

        `attention` is the encoder's, and also the decoder's own and the one over the encoder where
        these are not given. `geometry` is what the projected regions are told of their boxes at the
        bottom of the encoder (see regionprep/models/attention/absolute_geometry.py). Raises
        InputError for sizes, names or options that do not fit.
        """
        super().__init__(shape)
        own = attention if decoder_attention is None else decoder_attention
        cross = attention if cross_attention is None else cross_attention
        sizes = Sizes(
            width=width,
            heads=heads,
            feed_forward=feed_forward,
            dropout=dropout,
            norm_first=norm == "first",
            grid=shape.grid,
            layers=encoder_layers,
            activation=feed_forward_activation,
        )
        self.encoder = Encoder(
            sizes, feature_width=shape.feature_width, attention=attention, geometry=geometry
        )
        self.words = nn.Embedding(shape.vocabulary_size, width)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(shape.max_length + 1, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.ModuleList(
            DecoderLayer(sizes, own, cross, connection) for _ in range(decoder_layers)
        )
        self.decoder_end = sizes.final()
        self.output = nn.Linear(width, shape.vocabulary_size)
        self.initialise()

    def forward(self, regions: Regions, tokens: Int[Tensor, "b c t"]) -> Float[Tensor, "b c t v"]:
        """Return the logits of the token that follows each token; c captions share an image."""
        memory = self.encode(regions)
        rows = tokens.flatten(0, 1)
        hidden = self._embed(rows)
        words = rows != self.pad
        for layer in self.decoder:
            hidden = layer(hidden, memory, words=words)
        return self.output(self.decoder_end(hidden)).unflatten(0, tokens.shape[:2])

    def encode(self, regions: Regions) -> Memory:
        """Return what the layers of the encoder make of the regions."""
        return self.encoder(regions)

    def start(self, memory: Memory, beams: int) -> TransformerState:
        """Return the state before the first word; its rows come with the first tokens."""
        del beams
        layers = cast(list[DecoderLayer], self.decoder)
        caches = [
            LayerCache(WordCache(self.max_length + 1), layer.connection.caches(memory))
            for layer in layers
        ]
        return TransformerState(memory, caches)

    def step(
        self, tokens: Int[Tensor, " n"], state: TransformerState
    ) -> tuple[Float[Tensor, "n v"], TransformerState]:
        """Return the logits that follow `tokens`, and the state after them."""
        hidden = self._embed(tokens.unsqueeze(1), start=state.position)
        for layer, cache in zip(self.decoder, state.caches, strict=True):
            hidden = layer(hidden, state.memory, cache=cache)
        state.position += 1
        return self.output(self.decoder_end(hidden)).squeeze(1), state

    def _embed(self, tokens: Int[Tensor, "n t"], start: int = 0) -> Float[Tensor, "n t m"]:
        end = start + tokens.shape[1]
        if end > len(self.positions):
            raise InputError(
                f"a caption of {end - 1} words, and this model has room for {self.max_length}",
                mend="Shorten the captions, or build the model with a larger max_length.",
            )
        embedded = self.words(tokens) * math.sqrt(self.words.embedding_dim)
        return self.dropout(embedded + self.positions[start:end])
