"""Absolute geometry, the control of table 4 in "Normalized and Geometry-Aware Self-Attention
Network for Image Captioning" (arXiv 2003.08897), section 5.3.

    p = (x / W, y / H, w / W, h / H)      centre and size of a box over the size of its image
    PE(p, 2i) = sin(p / 10000^(2i/d)),    PE(p, 2i + 1) = cos(p / 10000^(2i/d))

    symbol          argument
    x, y, w, h      boxes
    W, H            sizes
    PE              absolute_geometry: d = width / 4 numbers for each of the four

It is added to the regions: to what queries, keys and values are projected from by this mechanism, a
drop-in, and once at the bottom of the encoder, as printed, by `geometry: absolute` of the
transformer.

Unstated there: how the four share the width (equally), and a scale of p (none: the encodings of
arXiv 1706.03762 get p as they get a position). Numbers lie by wave length, shortest first, so that
a width that 8 does not divide goes without some of the longest.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regionprep.models.attention.dot import DotAttention, real_regions
from regionprep.models.attention.geometry import boxes_of, centres_and_sizes
from regionprep.models.attention.mechanism import Cache, Layout


def absolute_geometry(
    boxes: Float[Tensor, "b r 4"], sizes: Float[Tensor, "b 2"], *, width: int
) -> Float[Tensor, "b r m"]:
    """Return PE of where boxes lie in images of these widths and heights, `width` numbers each."""
    centres, extents = centres_and_sizes(boxes)
    places = torch.cat([centres, extents], -1) / sizes.clamp_min(1).repeat(1, 2).unsqueeze(1)  # p
    waves = math.ceil(width / 8)
    index = torch.arange(waves, dtype=places.dtype, device=places.device)
    rates = torch.exp(index * (-math.log(10000.0) / waves))
    angles = places.unsqueeze(-2) * rates.unsqueeze(-1)
    return torch.stack([angles.sin(), angles.cos()], -2).flatten(-3)[..., :width]


class AbsoluteGeometryAttention(DotAttention):
    """Dot-product self-attention over regions that know where they lie in their image."""

    decodes = False

    def forward(
        self,
        query: Float[Tensor, "b r m"],
        key: Float[Tensor, "b r m"],
        value: Float[Tensor, "b r m"],
        *,
        mask: Bool[Tensor, "b r"] | Bool[Tensor, "b r r"] | None = None,
        query_mask: Bool[Tensor, "b r"] | None = None,
        causal: bool = False,
        layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b r m"]:
        """Return what each region takes from the values; see Mechanism."""
        real = real_regions(mask, query_mask)
        boxes = boxes_of(layout, real, owner="attention 'absolute_geometry'")
        assert layout is not None  # Without one there are no boxes.
        where = absolute_geometry(boxes, layout.sizes, width=self.width).to(query.dtype)
        return super().forward(
            query + where,
            key + where,
            value + where,
            mask=mask,
            query_mask=query_mask,
            causal=causal,
            cache=cache,
        )
