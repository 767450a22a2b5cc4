"""What the layers of a transformer are made of besides attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["relu", "gelu", "none"]
ACTIVATIONS: dict[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "none": nn.Identity,
}


class Residual(nn.Module):
    """Adds what a branch makes of the hidden states to them, and normalises before or after."""

    def __init__(self, *, width: int, dropout: float, norm_first: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.norm_first = norm_first

    def forward(
        self, hidden: Float[Tensor, "n t m"], branch: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "n t m"]:
        """Return x + branch(norm(x)), or norm(x + branch(x))."""
        if self.norm_first:
            return hidden + self.dropout(branch(self.norm(hidden)))
        return self.norm(hidden + self.dropout(branch(hidden)))


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between them, applied to each position."""

    def __init__(
        self, *, width: int, inner: int, dropout: float, activation: Activation = "relu"
    ) -> None:
        super().__init__(
            nn.Linear(width, inner),
            ACTIVATIONS[activation](),
            nn.Dropout(dropout),
            nn.Linear(inner, width),
        )


def sinusoids(length: int, width: int) -> Float[Tensor, "t m"]:
    """Return the position encodings of "Attention Is All You Need", section 3.5."""
    position = torch.arange(length).unsqueeze(1)
    even = torch.arange(0, width, 2)
    angle = position * torch.exp(even * (-math.log(10000.0) / width))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
