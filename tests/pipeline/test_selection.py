"""Selection against a slow loop written from the rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.ops import nms

from regionprep.errors import InputError
from regionprep.pipeline.selection import (
    Selection,
    class_wise_nms,
    overlaps,
    select,
    strongest,
)


def iou(first, second):
    wide = max(0.0, min(first[2], second[2]) - max(first[0], second[0]))
    high = max(0.0, min(first[3], second[3]) - max(first[1], second[1]))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    union = sum(areas) - wide * high
    return wide * high / union if union > 0 else 0.0


def slow_select(boxes, scores, selection):
    """Return (index, score, class) of each region, by loops over the rule's own words."""
    boxes, scores = boxes.astype(np.float64).tolist(), scores.tolist()
    best = [(0.0, 0)] * len(boxes)
    for label in range(len(scores[0])):
        kept = []
        for index in sorted(range(len(boxes)), key=lambda i: (-scores[i][label], i)):
            if all(iou(boxes[index], boxes[k]) <= selection.nms_threshold for k in kept):
                kept.append(index)
                if scores[index][label] > best[index][0]:
                    best[index] = (scores[index][label], label)
    ranked = sorted(range(len(boxes)), key=lambda i: (-best[i][0], i))
    passing = sum(score >= selection.score_threshold for score, _ in best)
    count = min(max(passing, selection.min_boxes), selection.max_boxes)
    return [(index, *best[index]) for index in ranked[:count]]


def drawn(seed, count, classes, *, coarse):
    """Return boxes and scores; `coarse` ones meet at equal scores and edges."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 12, (count, 2)) if coarse else rng.uniform(0, 60, (count, 2))
    sizes = rng.integers(0, 8, (count, 2)) if coarse else rng.uniform(1, 40, (count, 2))
    boxes = np.concatenate([corners, corners + sizes], axis=1).astype(np.float32)
    scores = rng.dirichlet(np.ones(classes + 1) * 0.3, count)[:, 1:]
    return boxes, (scores.round(1) if coarse else scores).astype(np.float32)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 24),
    classes=st.integers(1, 6),
    coarse=st.booleans(),
    low=st.integers(0, 6),
    more=st.integers(1, 10),
    score=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    overlap=st.sampled_from([0.25, 0.3, 0.5, 1.0]),
)
def test_selection_equals_a_slow_loop(seed, count, classes, coarse, low, more, score, overlap):
    boxes, scores = drawn(seed, count, classes, coarse=coarse)
    selection = Selection(low, low + more, score, overlap)
    found = select(boxes, scores, selection)
    told = [
        (int(i), float(s), int(c))
        for i, s, c in zip(found.indices, found.scores, found.classes, strict=True)
    ]
    assert told == slow_select(boxes, scores, selection)


def test_suppression_of_one_class_equals_torchvision():
    boxes, scores = drawn(1, 200, 1, coarse=False)
    kept = class_wise_nms(boxes, scores, 0.3)[:, 0]
    theirs = nms(torch.from_numpy(boxes), torch.from_numpy(scores[:, 0]), 0.3)
    assert set(np.flatnonzero(kept)) == set(theirs.tolist())


def test_a_box_of_two_classes_is_kept_for_the_one_in_which_it_survives():
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9]], np.float32)
    scores = np.array([[0.9, 0.0], [0.8, 0.3]], np.float32)
    found = select(boxes, scores, Selection(0, 10, 0.2, 0.3))
    assert found.classes.tolist() == [0, 1]
    assert found.scores.tolist() == pytest.approx([0.9, 0.3])


def test_too_few_that_pass_are_filled_up_with_the_best_of_the_rest():
    boxes = np.array([[i * 20, 0, i * 20 + 10, 10] for i in range(5)], np.float32)
    scores = np.array([[0.05], [0.9], [0.1], [0.01], [0.15]], np.float32)
    found = select(boxes, scores, Selection(3, 5, 0.2, 0.3))
    assert found.indices.tolist() == [1, 4, 2]


def test_too_many_that_pass_are_cut_to_the_best():
    boxes = np.array([[i * 20, 0, i * 20 + 10, 10] for i in range(5)], np.float32)
    scores = np.array([[0.5], [0.9], [0.7], [0.6], [0.8]], np.float32)
    found = select(boxes, scores, Selection(1, 2, 0.2, 0.3))
    assert found.indices.tolist() == [1, 4]


def test_equal_scores_keep_the_detectors_order():
    boxes = np.array([[i * 20, 0, i * 20 + 10, 10] for i in range(4)], np.float32)
    found = select(boxes, np.full((4, 2), 0.5, np.float32), Selection(0, 3, 0.2, 0.3))
    assert found.indices.tolist() == [0, 1, 2]
    assert found.classes.tolist() == [0, 0, 0]


def test_no_candidates_give_no_regions():
    found = select(np.zeros((0, 4), np.float32), np.zeros((0, 7), np.float32), Selection())
    assert found.indices.shape == found.scores.shape == found.classes.shape == (0,)


def test_fewer_candidates_than_the_least_are_all_taken():
    boxes = np.array([[0, 0, 5, 5], [10, 10, 20, 20]], np.float32)
    found = select(boxes, np.full((2, 1), 0.01, np.float32), Selection(10, 100))
    assert len(found.indices) == 2


def test_an_overlap_of_exactly_the_threshold_stays():
    boxes = np.array([[0, 0, 10, 10], [5, 0, 15, 10]], np.float32)
    assert overlaps(boxes)[0, 1] == pytest.approx(1 / 3)
    scores = np.array([[0.9], [0.8]], np.float32)
    assert class_wise_nms(boxes, scores, 1 / 3).all()
    assert class_wise_nms(boxes, scores, 0.33).sum() == 1


def test_boxes_taken_as_they_are_are_only_cut_to_the_best():
    scores = np.array([[0, 0.5], [0.9, 0], [0, 0.5]], np.float32)
    found = strongest(scores, 2)
    assert found.indices.tolist() == [1, 0]
    assert found.classes.tolist() == [0, 1]


def test_more_than_at_most_is_refused():
    with pytest.raises(InputError, match="at least 20 and at most 10"):
        Selection(20, 10)
