"""Random choices that are the same on every platform and with every version of numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from regionprep.errors import InputError

T = TypeVar("T")


class Dice:
    """Integers from PCG64's raw stream.

    numpy promises to keep that stream and `SeedSequence`, but not what `Generator`'s methods make
    of it; hence the few methods of our own.
    """

    def __init__(self, seed: int, index: int) -> None:
        if seed < 0 or index < 0:
            raise InputError(
                f"seed {seed} and index {index} of a scene must not be negative",
                mend="Give a seed of 0 or more.",
            )
        self._bits = np.random.PCG64(np.random.SeedSequence([seed, index]))

    def below(self, stop: int) -> int:
        """Return one of 0 .. stop - 1."""
        return int(self._bits.random_raw()) * stop >> 64

    def within(self, low: int, high: int) -> int:
        """Return one of low .. high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, options: Sequence[T]) -> T:
        """Return one of `options`."""
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Return `count` different ones of `options`, in random order."""
        pool = list(options)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]
