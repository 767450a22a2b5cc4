"""Learning-rate schedules: pure functions from the update's number, 1 for the first, to a rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regionprep.manifests import TrainingRecipe

Schedule = Callable[[int], float]


def constant(step: int, *, rate: float) -> float:
    """Return `rate` at every step."""
    return rate


def noam(step: int, *, rate: float, warmup: int) -> float:
    """Return a linear rise to `rate` at step `warmup`, then a fall with 1 / sqrt(step).

    Vaswani et al. (arXiv 1706.03762, eq. 3) write the peak as (d_model * warmup) ** -0.5; here it
    is given, so that the schedule does not depend on the model's width.
    """
    warmup = max(warmup, 1)
    return rate * min(step / warmup, math.sqrt(warmup / step))


def step_decay(
    step: int, *, rate: float, factor: float, every: int, first: int | None = None
) -> float:
    """Return `rate`, times `factor` from step `first` on and again after each `every` steps.

    Without `first`, the full rate also lasts `every` steps.
    """
    first = every + 1 if first is None else first
    return rate * math.pow(factor, max(0, (step - first) // every + 1))


def linear_warmup(step: int, *, warmup: int) -> float:
    """Return the share of the rate that is in force: step / warmup, at most 1."""
    return min(1.0, step / warmup) if warmup else 1.0


def schedule(recipe: TrainingRecipe, *, steps_per_epoch: int) -> Schedule:
    """Return the schedule that a recipe names.

    `decay_every`, `decay_from` and `warmup_epochs` count epochs, `warmup` steps; both warm-ups hold
    where both are given, and neither the one in epochs nor the decay is part of `noam`.
    """

    def epoch(step: int) -> int:
        return (step - 1) // steps_per_epoch + 1

    def warm(step: int) -> float:
        by_epoch = linear_warmup(epoch(step), warmup=recipe.warmup_epochs)
        return by_epoch * linear_warmup(step, warmup=recipe.warmup)

    def decayed(step: int) -> float:
        every, first = recipe.decay_every, recipe.decay_from
        return step_decay(epoch(step), rate=rate, factor=recipe.decay, every=every, first=first)

    rate = recipe.learning_rate
    schedules: dict[str, Schedule] = {
        "constant": lambda step: warm(step) * constant(step, rate=rate),
        "step": lambda step: warm(step) * decayed(step),
        "noam": lambda step: noam(step, rate=rate, warmup=recipe.warmup),
    }
    return schedules[recipe.schedule]
