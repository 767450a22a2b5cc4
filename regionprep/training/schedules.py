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


def step_decay(step: int, *, rate: float, factor: float, every: int) -> float:
    """Return `rate`, times `factor` once for each `every` steps that are past."""
    return rate * math.pow(factor, (step - 1) // every)


def linear_warmup(step: int, *, warmup: int) -> float:
    """Return the share of the rate that is in force: step / warmup, at most 1."""
    return min(1.0, step / warmup) if warmup else 1.0


def schedule(recipe: TrainingRecipe, *, steps_per_epoch: int) -> Schedule:
    """Return the schedule that a recipe names; `decay_every` counts epochs, `warmup` steps."""

    def warm(step: int) -> float:
        return linear_warmup(step, warmup=recipe.warmup)

    every = recipe.decay_every * steps_per_epoch
    rate, factor = recipe.learning_rate, recipe.decay
    schedules: dict[str, Schedule] = {
        "constant": lambda step: warm(step) * constant(step, rate=rate),
        "step": lambda step: warm(step) * step_decay(step, rate=rate, factor=factor, every=every),
        "noam": lambda step: noam(step, rate=rate, warmup=recipe.warmup),
    }
    return schedules[recipe.schedule]
