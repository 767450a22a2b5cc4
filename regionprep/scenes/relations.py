"""Where objects are relative to each other: the relations that captions speak of.

All take boxes by their `left`, `top` and `side` in pixels, y downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_STEPS = {"left of": (1, 0), "right of": (-1, 0), "above": (0, 1), "below": (0, -1)}


@dataclass(frozen=True)
class Square:
    """A square of pixels."""

    left: int
    top: int
    side: int

    @property
    def centre(self) -> tuple[float, float]:
        """Return x and y of the middle."""
        return self.left + self.side / 2, self.top + self.side / 2


def direction(first: Square, others: Sequence[Square]) -> str | None:
    """Return "left of", "right of", "above" or "below" as `first` is to all of `others`.

    None where that would be unclear: the middle of `first` must be passed by most of its half
    side, and the way to the middle of `others` must be clearly longer along the one axis.
    """
    (x, y), (far_x, far_y) = first.centre, _middle(others)
    dx, dy = far_x - x, far_y - y
    if 3 * min(abs(dx), abs(dy)) > 2 * max(abs(dx), abs(dy)):
        return None
    if abs(dx) > abs(dy):
        name = "left of" if dx > 0 else "right of"
    else:
        name = "above" if dy > 0 else "below"
    ahead = all(_along(name, first, other) >= 0.4 * first.side for other in others)
    return name if ahead else None


def inside(inner: Square, outer: Square) -> bool:
    """Return whether `inner` lies wholly in the square of `outer`."""
    return (
        outer.left <= inner.left
        and outer.top <= inner.top
        and inner.left + inner.side <= outer.left + outer.side
        and inner.top + inner.side <= outer.top + outer.side
    )


def between(middle: Square, first: Square, others: Sequence[Square], *, slack: int = 0) -> bool:
    """Return whether `middle` is on the way from `first` to all of `others`.

    Its centre must lie past most of the half side of `first`, before the same of the nearest of
    `others`, and beside the way by a few pixels at most. `slack` (pixels) widens all this, to
    find what is nearly between.
    """
    name = direction(first, others)
    if name is None:
        return False
    near = min(_along(name, first, other) - 0.4 * other.side for other in others)
    along = _along(name, first, middle)
    if not 0.4 * first.side - slack <= along <= near + slack:
        return False
    across = 1 if _STEPS[name][0] else 0
    low, high = sorted((first.centre[across], _middle(others)[across]))
    return low - 8 - slack <= middle.centre[across] <= high + 8 + slack


def _along(name: str, first: Square, other: Square) -> float:
    """Return how many pixels `first` is left of (right of, ...) `other`, by their centres."""
    (x, y), (other_x, other_y) = first.centre, other.centre
    step_x, step_y = _STEPS[name]
    return step_x * (other_x - x) + step_y * (other_y - y)


def _middle(squares: Sequence[Square]) -> tuple[float, float]:
    centres = [square.centre for square in squares]
    return (
        sum(x for x, _ in centres) / len(centres),
        sum(y for _, y in centres) / len(centres),
    )
