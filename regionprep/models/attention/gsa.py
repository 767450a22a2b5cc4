"""Geometry-aware self-attention, from "Normalized and Geometry-Aware Self-Attention Network for
Image Captioning" (arXiv 2003.08897), section 4.2.

    f_ij^g = (log(|x_i - x_j| / w_i), log(|y_i - y_j| / h_i), log(w_i / w_j), log(h_i / h_j))  (8)
    G_ij   = ReLU(FC(f_ij^g))                                                             (9)
    E      = Q K^T + φ(Q', K', G)                                                        (10)
    φ¹_ij  = ReLU(w_g^T G_ij)                                                            (11)
    φ²_ij  = Q'_i^T G_ij                                                                 (12)
    φ³_ij  = K'_j^T G_ij                                                                 (13)

    symbol          argument
    φ               bias: "content_independent" (φ¹), "query_dependent" (φ²), "key_dependent" (φ³),
                    or a list of these, which are summed
    FC, w_g         GeometryAttention.relations, .weight
    Q', K'          GeometryAttention.geometric_query, .geometric_key
    d_g             width / heads

With `normalize`, queries or keys are normalised too (see nsa.py): with "query" it is the mechanism
of NG-SAN, whose Q' stays as it is.

Unstated there: which φ is the default (the text says "query-dependent (φ¹)"; the name and the best
row of table 4 are φ²'s), d_g (a head's width), whether heads share G (those of a layer do, each
with its own w_g, Q' and K'), and the scale of φ (eq. 10 as a whole is divided by sqrt(d_g), as
footnote 1 says of its first term).

Departures:
- Ratios are kept within 1e-3 and 1e3. Eq. 8 has log 0 at aligned centres, thus on the diagonal, and
  is infinite at boxes without area, which are kept finite here rather than refused.
- `signed`: |x_i - x_j| does not tell left from right. With it, the first two features are
  sign(Δ) log(1 + |Δ|) of Δ = (x_j - x_i) / w_i and of its like in y, which need no floor.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from regionprep.errors import InputError, unknown
from regionprep.models.attention.geometry import boxes_of, centres_and_sizes
from regionprep.models.attention.mechanism import Layout
from regionprep.models.attention.nsa import NormalizedAttention
from regionprep.models.options import Rate

LEAST, MOST = 1e-3, 1e3
BIASES = ("content_independent", "query_dependent", "key_dependent")


def relative_geometry(
    boxes: Float[Tensor, "b r 4"], *, signed: bool = False, margin: float = 0.0
) -> Float[Tensor, "b r r 4"]:
    """Return f_ij^g; `margin` is added to widths and heights."""
    centres, sizes = centres_and_sizes(boxes)
    sizes = sizes + margin
    first, second = sizes.unsqueeze(2), sizes.unsqueeze(1)
    offset = ((centres.unsqueeze(1) - centres.unsqueeze(2)) / first).clamp(-MOST, MOST)
    distance = offset.abs().clamp_min(LEAST).log()  # Eq. 8
    if signed:
        distance = offset.sign() * offset.abs().log1p()
    scale = (first / second).clamp(LEAST, MOST).log()  # Eq. 8
    return torch.cat([distance, scale], -1)


def geometric_bias(
    geometry: Float[Tensor, "b q k d"],
    *,
    weight: Float[Tensor, "h d"] | None = None,
    query: Float[Tensor, "b q h d"] | None = None,
    key: Float[Tensor, "b k h d"] | None = None,
) -> Float[Tensor, "b h q k"]:
    """Return φ / sqrt(d_g): the sum of φ¹, φ² and φ³, each where what it is made of is given."""
    # G is the largest map by far: all products leave it, and its gradient, as it lies in memory.
    biases = []
    if weight is not None:
        biases.append(functional.relu(functional.linear(geometry, weight)))  # Eq. 11
    if query is not None:
        biases.append(geometry @ query.mT)  # Eq. 12
    if key is not None:
        biases.append(torch.einsum("bkhd, bqkd -> bqkh", key, geometry))  # Eq. 13
    total = sum(biases[1:], biases[0]) / math.sqrt(geometry.shape[-1])
    # Fused kernels want the keys next to each other.
    return total.permute(0, 3, 1, 2).contiguous()


class GeometryAttention(NormalizedAttention):
    """Dot-product self-attention over regions, with a bias for how two boxes lie."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        dropout: Rate = 0.0,
        bias: str | list[str] = "query_dependent",
        signed: bool = False,
        normalize: Literal["query", "key", "both", "none"] = "none",
        norm: Literal["instance", "layer", "batch"] = "instance",
        affine: bool = False,
    ) -> None:
        super().__init__(
            width=width,
            heads=heads,
            dropout=dropout,
            normalize=normalize,
            norm=norm,
            affine=affine,
        )
        biases = _named(bias)
        self.signed = signed
        channels = width // heads
        self.relations = nn.Linear(4, channels)
        self.weight = self.geometric_query = self.geometric_key = None
        if "content_independent" in biases:
            self.weight = nn.Linear(channels, heads, bias=False)
        if "query_dependent" in biases:
            self.geometric_query = nn.Linear(width, width)
        if "key_dependent" in biases:
            self.geometric_key = nn.Linear(width, width)

    def score_bias(
        self,
        query: Float[Tensor, "b r m"],
        key: Float[Tensor, "b r m"],
        *,
        layout: Layout | None,
        real: Bool[Tensor, "b r"] | None,
    ) -> Float[Tensor, "b h r r"]:
        """Return φ of the regions' boxes, scaled as the scores are."""
        boxes = boxes_of(layout, real, owner="attention 'gsa'")
        features = relative_geometry(boxes, signed=self.signed).to(self.relations.weight.dtype)
        return geometric_bias(
            functional.relu(self.relations(features), inplace=True),  # Eq. 9
            weight=None if self.weight is None else self.weight.weight,
            query=self._projected(self.geometric_query, query),
            key=self._projected(self.geometric_key, key),
        )

    def _projected(
        self, projection: nn.Linear | None, regions: Float[Tensor, "b r m"]
    ) -> Float[Tensor, "b r h d"] | None:
        """Return Q' or K', where there is one."""
        return None if projection is None else projection(regions).unflatten(-1, (self.heads, -1))


def _named(bias: str | list[str]) -> list[str]:
    """Return the names in the option, or raise InputError."""
    names = [bias] if isinstance(bias, str) else bias
    for name in names:
        if name not in BIASES:
            raise InputError(unknown("bias of attention 'gsa'", name, BIASES))
    if not names or len(set(names)) < len(names):
        raise InputError(
            f"the bias of attention 'gsa' is a sum of {names}",
            mend=f"Name each of {', '.join(BIASES)} at most once, and at least one of them.",
        )
    return names
