"""Which of a detector's boxes become an image's regions: as bottom-up attention selects them.

Bottom-Up and Top-Down Attention for Image Captioning and Visual Question Answering
(arXiv 1707.07998), section 3.1, and the released code: class-wise non-maximum suppression at 0.3;
a box's confidence is its best score among the classes in which it survives; boxes of at least 0.2
are taken, but no fewer than 10 and no more than 100, the most confident first.

Two departures. A region's class is the one that its confidence belongs to; the released code
reports the best class before suppression, which may be one in which the box did not survive. And
regions come most confident first, equals in the detector's order, where the released code keeps the
detector's order unless it has to cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError


@dataclass(frozen=True)
class Selection:
    """How many boxes an image has, and which."""

    min_boxes: int = 10
    max_boxes: int = 100
    score_threshold: float = 0.2
    nms_threshold: float = 0.3

    def __post_init__(self) -> None:
        if self.min_boxes > self.max_boxes:
            raise InputError(
                f"at least {self.min_boxes} and at most {self.max_boxes} boxes an image",
                mend="Let --min-boxes be no more than --max-boxes.",
            )


@dataclass(frozen=True, eq=False)
class Selected:
    """Regions as indices (k,) into the boxes, with scores (k,) float32 and classes (k,) int32."""

    indices: NDArray[np.intp]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]


def select(
    boxes: NDArray[np.float32], scores: NDArray[np.float32], selection: Selection
) -> Selected:
    """Return the regions among `boxes` (n, 4) with class-wise `scores` (n, c).

    All are finite; a box's area may be zero. There are fewer than `min_boxes` only where n is.
    """
    if not len(boxes):
        return strongest(scores, 0)
    kept = class_wise_nms(boxes, scores, selection.nms_threshold)
    confidence = np.where(kept, scores, 0)
    passing = int((confidence.max(1) >= selection.score_threshold).sum())
    return strongest(confidence, min(max(passing, selection.min_boxes), selection.max_boxes))


def strongest(scores: NDArray[np.float32], count: int) -> Selected:
    """Return the `count` boxes of the best `scores` (n, c), best first, equals in their order."""
    if not len(scores) or not count:
        return Selected(np.zeros(0, np.intp), np.zeros(0, np.float32), np.zeros(0, np.int32))
    best = scores.max(1)
    indices = np.argsort(-best, kind="stable")[:count]
    return Selected(
        indices,
        best[indices].astype(np.float32),
        scores[indices].argmax(1).astype(np.int32),
    )


def class_wise_nms(
    boxes: NDArray[np.float32], scores: NDArray[np.float32], threshold: float
) -> NDArray[np.bool_]:
    """Return which of `boxes` (n, 4) survive in which class of `scores` (n, c), as (n, c).

    In every class, from the best score down, a box goes if it overlaps one that stays by more than
    `threshold`. All classes advance together, a rank at a time: n steps, whatever c is.
    """
    count, classes = scores.shape
    overlapping = overlaps(boxes) > threshold
    np.fill_diagonal(overlapping, False)
    order = np.argsort(-scores, axis=0, kind="stable")
    alive = np.ones((classes, count), bool)
    every = np.arange(classes)
    for current in order:
        stays = alive[every, current]
        alive &= ~(overlapping[current] & stays[:, None])
    return alive.T


def overlaps(boxes: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the intersection over union of each pair of `boxes` (n, 4), as (n, n)."""
    corners = boxes.astype(np.float64)
    low = np.maximum(corners[:, None, :2], corners[None, :, :2])
    high = np.minimum(corners[:, None, 2:], corners[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=-1)
    area = np.prod(corners[:, 2:] - corners[:, :2], axis=-1)
    union = area[:, None] + area[None, :] - shared
    iou: NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return iou
