"""The loss against loops written from its definition."""

from __future__ import annotations

import math

import pytest
import torch

from regionprep.training.losses import cross_entropy

PAD = 0


def by_hand(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> float:
    """Return the mean over real tokens of -sum_w q(w) log p(w), in float64."""
    losses = []
    words = logits.shape[-1]
    for scores, target in zip(logits.flatten(0, 2).tolist(), targets.flatten(), strict=True):
        if target == PAD:
            continue
        total = math.log(sum(map(math.exp, scores)))
        loss = -(1 - smoothing) * (scores[target] - total)
        loss -= smoothing / words * sum(score - total for score in scores)
        losses.append(loss)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_the_definition(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 7, generator=generator)
    targets = torch.randint(0, 7, (2, 3, 4), generator=generator)
    assert (targets == PAD).any()
    loss = cross_entropy(logits, targets, pad=PAD, label_smoothing=smoothing)
    assert loss.item() == pytest.approx(by_hand(logits, targets, smoothing), rel=1e-5)


def test_ignores_padding_whatever_is_predicted_there() -> None:
    targets = torch.tensor([[[3, 2, PAD], [PAD, PAD, PAD]]])
    logits = torch.randn(1, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    other = logits.clone()
    other[targets == PAD] += 100 * torch.randn(4, 5)
    assert cross_entropy(other, targets, pad=PAD) == cross_entropy(logits, targets, pad=PAD)


def test_is_in_float32_for_logits_of_a_low_precision() -> None:
    logits = torch.zeros(1, 1, 1, 9, dtype=torch.bfloat16)
    loss = cross_entropy(logits, torch.tensor([[[4]]]), pad=PAD)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(9), rel=1e-6)
