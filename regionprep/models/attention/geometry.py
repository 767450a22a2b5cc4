"""What mechanisms read from a layout: boxes, and their centres and sizes."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regionprep.errors import InputError
from regionprep.models.attention.mechanism import Layout


def boxes_of(
    layout: Layout | None, real: Bool[Tensor, "b r"] | None, *, owner: str
) -> Float[Tensor, "b r 4"]:
    """Return the boxes, 0 at padding, where a layout may hold anything; `owner` needs them.

    Raises InputError without a layout.
    """
    if layout is None:
        raise InputError(
            f"{owner} needs the boxes of the regions, and no layout came with them",
            mend="`prep detect` makes boxes and `prep extract` puts them beside the features; give "
            "them as layout=Layout(boxes, sizes).",
        )
    if real is None:
        return layout.boxes
    return layout.boxes.masked_fill(~real.unsqueeze(-1), 0)


def centres_and_sizes(
    boxes: Float[Tensor, "b r 4"],
) -> tuple[Float[Tensor, "b r 2"], Float[Tensor, "b r 2"]]:
    """Return (x, y) and (width, height) of boxes; a side of no length is the least above 0.

    To refuse such a box here would stall the device at each batch and stop an export.
    """
    near, far = boxes.unflatten(-1, (2, 2)).unbind(-2)
    return (near + far) / 2, (far - near).clamp_min(torch.finfo(boxes.dtype).tiny)
