"""Normalised self-attention, from "Normalized and Geometry-Aware Self-Attention Network for Image
Captioning" (arXiv 2003.08897), section 4.1.

    Q̂      = Norm(Q)                                                                      (5)
    x̂_btc  = (x_btc - μ_bc) / sqrt(σ²_bc + ε),
    μ_bc   = 1/T Σ_t x_btc,   σ²_bc = 1/T Σ_t (x_btc - μ_bc)²                             (6)
    Z      = Softmax(Q̂ K^T) V,   Q̂ = IN(Q)                                                (7)

    symbol          argument
    Norm            norm: "instance" (eq. 6), "layer" or "batch"
    Q̂, K̂            normalize: "query" (the default there), "key", "both" or "none"
    γ, β            affine
    T, B            regions that are real, images

Departures:
- Statistics go over real regions only: padding would move them, and with them the other regions.
- A projection whose mean is then subtracted has no bias: it would be subtracted with it.
- "layer" goes over the channels of one head of one region, for Q is a head's own in eq. 2.
- "batch" counts all real regions of the batch alike and keeps running statistics for evaluation, as
  torch does; in training, and then alone, an image depends on its batch-mates.
- An image of one region has a normalised query of 0 (its mean is itself); one of none has heads of
  0, as in `dot`. ε is 1e-5, and 0.1 the share of a batch in the running statistics.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.models.attention.dot import DotAttention
from regionprep.models.options import Rate

EPSILON = 1e-5
MOMENTUM = 0.1
OVER = {"instance": (2,), "layer": (3,), "batch": (0, 2)}
"""The dimensions of (images, heads, regions, channels) that a norm's statistics go over."""


def moments(
    x: Float[Tensor, "b h r d"], real: Float[Tensor, "b 1 r 1"], over: tuple[int, ...]
) -> tuple[Float[Tensor, "#b h #r #d"], Float[Tensor, "#b h #r #d"], Float[Tensor, "#b 1 #r 1"]]:
    """Return mean, variance and number of what is real, `real` being 1 there and 0 elsewhere."""
    count = real.sum(over, keepdim=True) * (x.shape[3] if 3 in over else 1)
    some = count.clamp_min(1)
    mean = (x * real).sum(over, keepdim=True) / some  # Eq. 6
    variance = ((x - mean).square() * real).sum(over, keepdim=True) / some  # Eq. 6
    return mean, variance, count


def standardise(
    x: Float[Tensor, "b h r d"],
    mean: Float[Tensor, "#b h #r #d"],
    variance: Float[Tensor, "#b h #r #d"],
) -> Float[Tensor, "b h r d"]:
    """Return x̂ of eq. 6."""
    return (x - mean) * (variance + EPSILON).rsqrt()  # Eq. 6


class Norm(nn.Module):
    """Normalises the channels of heads over regions, channels, or all regions of a batch."""

    def __init__(self, *, heads: int, channels: int, kind: str, affine: bool) -> None:
        super().__init__()
        self.kind = kind
        shape = (1, heads, 1, channels)
        # Flat, as those of other norms are: what has two dimensions is a matrix to draw.
        self.scale = nn.Parameter(torch.ones(heads * channels)) if affine else None
        self.shift = nn.Parameter(torch.zeros(heads * channels)) if affine else None
        self.running_mean: Tensor
        self.running_variance: Tensor
        if kind == "batch":
            self.register_buffer("running_mean", torch.zeros(shape))
            self.register_buffer("running_variance", torch.ones(shape))

    def forward(
        self, heads: Float[Tensor, "b h r d"], real: Bool[Tensor, "b r"] | None
    ) -> Float[Tensor, "b h r d"]:
        """Return the heads normalised by what is real in them."""
        # Sums over many regions are no work for half precision.
        x = heads.to(torch.promote_types(heads.dtype, torch.float32))
        if self.kind == "batch" and not self.training:
            normal = standardise(x, self.running_mean, self.running_variance)
        else:
            normal = self._by_its_own(x, real)
        if self.scale is not None and self.shift is not None:
            _, count, _, channels = x.shape
            scale, shift = (
                part.unflatten(0, (count, 1, channels)) for part in (self.scale, self.shift)
            )
            normal = normal * scale + shift
        return normal.to(heads.dtype)

    def _by_its_own(
        self, x: Float[Tensor, "b h r d"], real: Bool[Tensor, "b r"] | None
    ) -> Float[Tensor, "b h r d"]:
        images, _, regions, _ = x.shape
        there = x.new_ones(images, regions) if real is None else real.to(x.dtype)
        mean, variance, count = moments(x, there[:, None, :, None], OVER[self.kind])
        if self.kind == "batch":
            self._remember(mean.detach(), variance.detach(), count)
        return standardise(x, mean, variance)

    def _remember(
        self,
        mean: Float[Tensor, "1 h 1 d"],
        variance: Float[Tensor, "1 h 1 d"],
        count: Float[Tensor, "1 1 1 1"],
    ) -> None:
        """Let the running statistics follow, unbiased; a batch without regions says nothing."""
        share = MOMENTUM * (count > 0)
        unbiased = variance * count / (count - 1).clamp_min(1)
        self.running_mean.lerp_(mean, share.to(mean.dtype))
        self.running_variance.lerp_(unbiased, share.to(mean.dtype))


class NormalizedAttention(DotAttention):
    """Dot-product self-attention over regions whose queries or keys are normalised."""

    decodes = False

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        dropout: Rate = 0.0,
        normalize: Literal["query", "key", "both", "none"] = "query",
        norm: Literal["instance", "layer", "batch"] = "instance",
        affine: bool = False,
    ) -> None:
        super().__init__(width=width, heads=heads, dropout=dropout)
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if normalize in ("query", "both"):
            self.query_norm = self._norm(self.query, norm, affine=affine)
        if normalize in ("key", "both"):
            self.key_norm = self._norm(self.key, norm, affine=affine)

    def prepare(
        self,
        queries: Float[Tensor, "b h q d"],
        keys: Float[Tensor, "b h k d"],
        real: Bool[Tensor, "b r"] | None,
    ) -> tuple[Float[Tensor, "b h q d"], Float[Tensor, "b h k d"]]:
        """Return Q̂ or K̂, or both."""
        if self.query_norm is not None:
            queries = self.query_norm(queries, real)  # Eq. 5
        if self.key_norm is not None:
            keys = self.key_norm(keys, real)
        return queries, keys

    def _norm(self, projection: nn.Linear, kind: str, *, affine: bool) -> Norm:
        """Return the norm of what a projection makes, and take the bias that it would undo."""
        if kind != "layer":
            projection.register_parameter("bias", None)
        channels = self.width // self.heads
        return Norm(heads=self.heads, channels=channels, kind=kind, affine=affine)
