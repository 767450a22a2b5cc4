"""Geometric attention of the Object Relation Transformer, from "Image Captioning: Transforming
Objects into Words" (arXiv 1906.05963), after "Relation Networks for Object Detection" (1711.11575).

    λ(m, n)  = (log(|x_m - x_n| / w_m), log(|y_m - y_n| / h_m), log(w_m / w_n), log(h_m / h_n))
    ω_G^mn   = ReLU(Emb(λ) W_G)
    ω^mn     = ω_G^mn exp(ω_A^mn) / Σ_l ω_G^ml exp(ω_A^ml),   ω_A the scaled dot products

    symbol          argument
    Emb             embedding: sines and cosines of each of the four, 64 numbers in all
    W_G             RelationAttention.geometry, one column a head, with a bias

log ω_G is added to the scores: then their softmax is ω.

Taken from the released code: 1 pixel is added to widths and heights, ratios of distances are
floored at 1e-3 and ω_G at 1e-6, the wave lengths reach up to 1000, and λ is multiplied by 100.

Departures:
- Ratios also have a ceiling, 1e3, and those of sizes a floor (see gsa.py): nothing that fits into
  an ordinary photograph comes near.
- λ has w_m / w_n as released; the paper has its inverse. Sines are odd and W_G is learned.
- With its pixel added to widths and heights λ changes a little when an image is scaled, and the
  sines make that more; it does not change when boxes are moved together.
- An early release adds the values to the heads before the output projection; that is not done here.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regionprep.models.attention.dot import DotAttention
from regionprep.models.attention.geometry import boxes_of
from regionprep.models.attention.gsa import relative_geometry
from regionprep.models.attention.mechanism import Layout
from regionprep.models.options import Rate

EMBEDDING = 64
WAVE_LENGTH = 1000.0
SCALE = 100.0
LEAST_WEIGHT = 1e-6


def embedding(relations: Float[Tensor, "b q k 4"]) -> Float[Tensor, "b q k 64"]:
    """Return Emb(λ): the sines of all four at all wave lengths, then the cosines."""
    waves = EMBEDDING // 8
    power = torch.arange(waves, dtype=relations.dtype, device=relations.device) / waves
    angles = (SCALE * relations.unsqueeze(-1) * WAVE_LENGTH**-power).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], -1)


def log_weights(
    embedded: Float[Tensor, "b q k e"], weight: Float[Tensor, "h e"], bias: Float[Tensor, " h"]
) -> Float[Tensor, "b h q k"]:
    """Return log ω_G; the floor does what the ReLU would, and keeps the logarithm finite."""
    weights = nn.functional.linear(embedded, weight, bias).clamp_min(LEAST_WEIGHT)  # ω_G
    # Fused kernels want the keys next to each other.
    return weights.log().permute(0, 3, 1, 2).contiguous()


class RelationAttention(DotAttention):
    """Dot-product self-attention over regions, times a weight for how two boxes lie."""

    decodes = False

    def __init__(self, *, width: int, heads: int, dropout: Rate = 0.0) -> None:
        super().__init__(width=width, heads=heads, dropout=dropout)
        self.geometry = nn.Linear(EMBEDDING, heads)

    def score_bias(
        self,
        query: Float[Tensor, "b r m"],
        key: Float[Tensor, "b r m"],
        *,
        layout: Layout | None,
        real: Bool[Tensor, "b r"] | None,
    ) -> Float[Tensor, "b h r r"]:
        """Return log ω_G of the regions' boxes."""
        del query, key
        boxes = boxes_of(layout, real, owner="attention 'relation'")
        embedded = embedding(relative_geometry(boxes, margin=1.0))
        weight = self.geometry.weight
        return log_weights(embedded.to(weight.dtype), weight, self.geometry.bias)
