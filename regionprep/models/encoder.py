"""The encoder of regions that transformers share, and the sizes that their layers have in common.

Attention and connections are given by name, or as {name: ..., option: ...}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.errors import InputError
from regionprep.models import attention as attentions
from regionprep.models import connections
from regionprep.models.attention import Layout, Mechanism
from regionprep.models.attention.absolute_geometry import absolute_geometry
from regionprep.models.attention.geometry import boxes_of
from regionprep.models.blocks import Activation, FeedForward, Residual
from regionprep.models.captioner import Regions
from regionprep.models.connections import Memory

Choice = str | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
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


Geometry = Literal["none", "absolute"]


class Encoder(nn.Module):
    """Projects regions, which have no order and so no positions, and lets them see each other.

    `geometry` is what the projected regions are told of their boxes (see
    regionprep/models/attention/absolute_geometry.py).
    """

    def __init__(
        self, sizes: Sizes, *, feature_width: int, attention: Choice, geometry: Geometry = "none"
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.project = nn.Sequential(
            nn.Linear(feature_width, sizes.width), nn.ReLU(), nn.Dropout(sizes.dropout)
        )
        self.layers = nn.ModuleList(EncoderLayer(sizes, attention) for _ in range(sizes.layers))
        self.end = sizes.final()

    def forward(self, regions: Regions) -> Memory:
        """Return what each layer makes of the regions."""
        layout = Layout(regions.boxes, regions.sizes, regions.grid)
        # Padding may hold anything, and 0 times what is not a number is none either.
        features = regions.features.masked_fill(~regions.mask.unsqueeze(-1), 0)
        hidden = self.project(features.to(next(self.parameters()).dtype))
        if self.geometry == "absolute":
            boxes = boxes_of(layout, regions.mask, owner="geometry 'absolute'")
            where = absolute_geometry(boxes, layout.sizes, width=hidden.shape[-1])
            hidden = hidden + where.to(hidden.dtype)
        layers = []
        for layer in self.layers:
            hidden = layer(hidden, regions.mask, layout)
            layers.append(hidden)
        return Memory((*layers[:-1], self.end(hidden)), regions.mask)
