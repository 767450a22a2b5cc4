"""Losses over caption logits; pure functions.

Shapes: `b` batch, `c` captions of an image, `t` tokens, `v` vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def cross_entropy(
    logits: Float[Tensor, "b c t v"],
    targets: Int[Tensor, "b c t"],
    *,
    pad: int,
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Return the mean negative log-likelihood, in nats a token, over targets that are not `pad`.

    With label smoothing e a target's distribution is (1 - e) on the word plus e / v on every word
    (Szegedy et al., arXiv 1512.00567, section 7). The mean is over tokens, not captions, so that a
    batch with missing captions weighs every word alike.
    """
    return F.cross_entropy(
        logits.flatten(0, 2).float(),
        targets.flatten().long(),
        ignore_index=pad,
        label_smoothing=label_smoothing,
    )
