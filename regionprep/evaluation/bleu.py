"""BLEU: a method for automatic evaluation of machine translation (Papineni et al., 2002).

    p_n  = sum_C sum_g Count_clip(g) / sum_C sum_g Count(g)          modified n-gram precision
    BP   = 1 if c > r else exp(1 - r / c)                            brevity penalty
    BLEU = BP * (p_1 p_2 ... p_N)^(1/N)                              Eq. of section 2.3, w_n = 1/N

| symbol | here |
| --- | --- |
| Count_clip | an n-gram's count in the candidate, at most its highest in one reference |
| c, r | words of the candidates; of the references closest to them in length, the shorter of two |

Departure: counts carry the 1e-15 and 1e-9 that pycocoevalcap adds to them, so that a caption
without a match scores what the field's tool prints, a little above zero.
"""

from __future__ import annotations

import numpy as np

from regionprep.evaluation.ngrams import (
    ORDERS,
    Floats,
    Integers,
    References,
    Sentences,
    lookup,
    sums,
)

TINY, SMALL = 1e-15, 1e-9


def bleu(candidates: Sentences, references: References) -> tuple[Floats, Floats]:
    """Return BLEU-1 to 4 of the corpus `(4,)` and of each image `(images, 4)`."""
    matched = np.stack([_matched(candidates, references, order) for order in ORDERS], axis=1)
    total = np.stack([candidates.sizes(order) for order in ORDERS], axis=1)
    closest = closest_lengths(candidates.lengths, references)
    corpus = _bleu(matched.sum(0), total.sum(0), candidates.lengths.sum(), closest.sum())
    return corpus, _bleu(matched, total, candidates.lengths[:, None], closest[:, None])


def closest_lengths(lengths: Integers, references: References) -> Integers:
    """Return for each image the reference length closest to `lengths`, the shorter of two."""
    reference_lengths = references.sentences.lengths
    distance = np.abs(reference_lengths - lengths[references.image])
    # One number that orders by distance first, then by length.
    scale = reference_lengths.max() + 1
    closest = np.minimum.reduceat(distance * scale + reference_lengths, references.starts)
    lengths_of_closest: Integers = closest % scale
    return lengths_of_closest


def _matched(candidates: Sentences, references: References, order: int) -> Floats:
    """Return Count_clip summed over each candidate's n-grams."""
    counts = candidates.counts[order]
    limit = lookup(counts.grouped(np.arange(len(candidates))), *references.highest[order])
    return sums(counts.sentence, np.minimum(counts.count, limit), len(candidates))


def _bleu(matched: Floats, total: Integers, c: Integers, r: Integers) -> Floats:
    """Return BLEU-1 to 4 along the last axis from counts of matched and of all n-grams."""
    precision = (matched + TINY) / (total + SMALL)
    ratio = (c + TINY) / (r + SMALL)
    brevity = np.exp(np.minimum(0.0, 1 - 1 / ratio))
    score: Floats = brevity * np.cumprod(precision, axis=-1) ** (1 / np.array(ORDERS))
    return score
