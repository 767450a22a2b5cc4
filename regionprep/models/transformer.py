"""The encoder-decoder transformer captioner, with any attention mechanism and any connection.

"Attention Is All You Need" (arXiv 1706.03762) on regions, as captioning uses it: an encoder over
projected region features, which have no order and so no positions, and a decoder over words with
sinusoidal positions. Input and output embeddings are not tied; the output has a bias.

Attention and connections are given by name, or as {name: ..., option: ...}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models import attention as attentions
from regionprep.models import connections
from regionprep.models.attention import Layout, Mechanism, MemoryCache, WordCache
from regionprep.models.attention.absolute_geometry import absolute_geometry
from regionprep.models.attention.geometry import boxes_of
from regionprep.models.blocks import Activation, FeedForward, Residual, sinusoids
from regionprep.models.captioner import Captioner, Regions
from regionprep.models.connections import Memory
from regionprep.models.options import Count, Rate

Choice = str | Mapping[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What all layers of both stacks share; `layers` counts the encoder's."""

    width: int
    heads: int
    feed_forward: int
    dropout: float
    norm_first: bool
    grid: tuple[int, int] | None = None
    layers: int = 1
    activation: Activation = "relu"

    def mechanism(self, choice: Choice, *, decoder: bool) -> Mechanism:
        """Return a new attention mechanism of these sizes."""
        name, options = named(choice, "attention")
        return attentions.build(
            name,
            width=self.width,
            heads=self.heads,
            dropout=self.dropout,
            decoder=decoder,
            grid=self.grid,
            options=options,
        )

    def connection(self, choice: Choice, attention: Choice) -> connections.Connection:
        """Return a new connection of these sizes."""
        name, options = named(choice, "connection")
        return connections.build(
            name,
            attention=lambda: self.mechanism(attention, decoder=True),
            width=self.width,
            dropout=self.dropout,
            norm_first=self.norm_first,
            layers=self.layers,
            options=options,
        )

    def residual(self) -> Residual:
        """Return a new residual connection of these sizes."""
        return Residual(width=self.width, dropout=self.dropout, norm_first=self.norm_first)

    def inner(self) -> FeedForward:
        """Return a new feed-forward network of these sizes."""
        return FeedForward(
            width=self.width,
            inner=self.feed_forward,
            dropout=self.dropout,
            activation=self.activation,
        )

    def final(self) -> nn.Module:
        """Return what ends a stack: a norm, unless its last layer ended with one."""
        return nn.LayerNorm(self.width) if self.norm_first else nn.Identity()


def named(choice: Choice, kind: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the options in `choice`, or raise InputError."""
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    if not isinstance(options.get("name"), str):
        raise InputError(f"{kind} without a name: {options}", mend="Write {name: ..., ...}.")
    return options.pop("name"), options


class EncoderLayer(nn.Module):
    """Self-attention over regions, then the feed-forward network."""

    def __init__(self, sizes: Sizes, attention: Choice) -> None:
        super().__init__()
        self.attention = sizes.mechanism(attention, decoder=False)
        self.attention_residual = sizes.residual()
        self.feed_forward = sizes.inner()
        self.feed_forward_residual = sizes.residual()

    def forward(
        self, hidden: Float[Tensor, "b r m"], mask: Bool[Tensor, "b r"], layout: Layout
    ) -> Float[Tensor, "b r m"]:
        """Return the regions after a look at each other."""

        def look(regions: Tensor) -> Tensor:
            return self.attention(
                regions, regions, regions, mask=mask, query_mask=mask, layout=layout
            )

        hidden = self.attention_residual(hidden, look)
        return self.feed_forward_residual(hidden, self.feed_forward)


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
        *,
        feature_width: int,
        vocabulary_size: int,
        max_length: int,
        pad: int,
        bos: int,
        eos: int,
        grid: tuple[int, int] | None = None,
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
        geometry: Literal["none", "absolute"] = "none",
    ) -> None:
        """Build the two stacks.

        `attention` is the encoder's, and also the decoder's own and the one over the encoder where
        these are not given. `geometry` is what the projected regions are told of their boxes at the
        bottom of the encoder (see regionprep/models/attention/absolute_geometry.py). Raises
        InputError for sizes, names or options that do not fit.
        """
        super().__init__(
            feature_width=feature_width,
            vocabulary_size=vocabulary_size,
            max_length=max_length,
            pad=pad,
            bos=bos,
            eos=eos,
            grid=grid,
        )
        own = attention if decoder_attention is None else decoder_attention
        cross = attention if cross_attention is None else cross_attention
        self.geometry = geometry
        sizes = Sizes(
            width,
            heads,
            feed_forward,
            dropout,
            norm == "first",
            grid,
            layers=encoder_layers,
            activation=feed_forward_activation,
        )
        self.regions = nn.Sequential(
            nn.Linear(feature_width, width), nn.ReLU(), nn.Dropout(dropout)
        )
        self.encoder = nn.ModuleList(EncoderLayer(sizes, attention) for _ in range(encoder_layers))
        self.encoder_end = sizes.final()
        self.words = nn.Embedding(vocabulary_size, width)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(max_length + 1, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.ModuleList(
            DecoderLayer(sizes, own, cross, connection) for _ in range(decoder_layers)
        )
        self.decoder_end = sizes.final()
        self.output = nn.Linear(width, vocabulary_size)
        self._initialise()

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)

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
        layout = Layout(regions.boxes, regions.sizes, regions.grid)
        hidden = self.regions(regions.features.to(self.output.weight.dtype))
        if self.geometry == "absolute":
            boxes = boxes_of(layout, regions.mask, owner="geometry 'absolute'")
            where = absolute_geometry(boxes, layout.sizes, width=hidden.shape[-1])
            hidden = hidden + where.to(hidden.dtype)
        layers = []
        for layer in self.encoder:
            hidden = layer(hidden, regions.mask, layout)
            layers.append(hidden)
        return Memory((*layers[:-1], self.encoder_end(hidden)), regions.mask)

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
