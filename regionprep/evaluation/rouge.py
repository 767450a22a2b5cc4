"""ROUGE: a package for automatic evaluation of summaries (Lin, 2004): ROUGE-L.

    R = LCS(X, Y) / m          Eq. 2: of a reference X of m words
    P = LCS(X, Y) / n          Eq. 3: of a candidate Y of n words
    F = (1 + b^2) R P / (R + b^2 P)                                             Eq. 4

Departures, which COCO's evaluation made and the field follows: with several references R and P
are each the highest over them, and b is 1.2.

The longest common subsequence comes by bit-parallel addition (Hyyro, 2004, "Bit-parallel
LCS-length computation revisited"): a row of the table is the bits of one integer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from regionprep.evaluation.ngrams import Floats, References, Sentences

BETA = 1.2


def rouge_l(candidates: Sentences, references: References) -> Floats:
    """Return ROUGE-L of each image."""
    bounds = [*references.starts.tolist(), len(references.sentences)]
    tokens = references.sentences.tokens
    return np.array(
        [
            _rouge_l(candidate, tokens[bounds[image] : bounds[image + 1]])
            for image, candidate in enumerate(candidates.tokens)
        ]
    )


def _rouge_l(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    # pycocoevalcap reads an empty caption as one empty word, and so two of them as equal.
    candidate = candidate or [""]
    places = word_places(candidate)
    recall = precision = 0.0
    for reference in references:
        reference = reference or [""]
        common = longest_common_subsequence(places, len(candidate), reference)
        recall = max(recall, common / len(reference))  # Eq. 2
        precision = max(precision, common / len(candidate))  # Eq. 3
    if not recall:
        return 0.0
    return (1 + BETA**2) * recall * precision / (recall + BETA**2 * precision)  # Eq. 4


def word_places(sentence: Sequence[str]) -> dict[str, int]:
    """Return for every word of a sentence the integer whose set bits are its places."""
    places: dict[str, int] = {}
    for place, word in enumerate(sentence):
        places[word] = places.get(word, 0) | 1 << place
    return places


def longest_common_subsequence(places: Mapping[str, int], length: int, other: Sequence[str]) -> int:
    """Return how many words a sentence of `length`, given by its places, shares with another."""
    row = everything = (1 << length) - 1
    for word in other:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & everything
    return length - row.bit_count()
