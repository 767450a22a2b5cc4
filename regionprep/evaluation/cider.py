"""CIDEr: consensus-based image description evaluation (Vedantam et al., 2015; 1411.5726).

    g_k(s)         = h_k(s) / sum_l h_l(s) * log(|I| / sum_p min(1, sum_q h_k(s_pq)))      Eq. 1
    CIDEr_n(c, S)  = 1/m sum_j  g^n(c) . g^n(s_j) / (|g^n(c)| |g^n(s_j)|)                  Eq. 2
    CIDEr(c, S)    = sum_n w_n CIDEr_n(c, S),  w_n = 1/N,  N = 4                           Eq. 3
    CIDEr-D_n(c,S) = 10/m sum_j exp(-(l(c) - l(s_j))^2 / (2 sigma^2))
                     * min(g^n(c), g^n(s_j)) . g^n(s_j) / (|g^n(c)| |g^n(s_j)|)            Eq. 4

| symbol | here |
| --- | --- |
| h_k(s) | count of n-gram k in sentence s |
| s_pq, I | reference q of image p, all images: of the references given, or a `DocumentFrequency` |
| c, S, m | a candidate, its image's references, their number |
| sigma | 6 |

Departures, which the authors' code made and the field follows: CIDEr is scaled by 10 as CIDEr-D
is; words are not stemmed; h_k is not divided by the sentence's sum, which the cosine cancels and
the minimum of CIDEr-D does not; l counts bigrams, one fewer than words. pycocoevalcap's `Cider`
is CIDEr-D, and what papers on COCO call CIDEr is it.
"""

from __future__ import annotations

import numpy as np

from regionprep.evaluation.ngrams import (
    ORDERS,
    DocumentFrequency,
    Floats,
    References,
    Sentences,
    lookup,
    sums,
)

SCALE = 10.0
SIGMA = 6.0


def cider(
    candidates: Sentences, references: References, frequency: DocumentFrequency | None = None
) -> tuple[Floats, Floats]:
    """Return CIDEr and CIDEr-D of each image.

    Document frequencies are the references' own unless given.
    """
    frequency = frequency or references.document_frequency
    cosines = [_cosines(candidates, references, frequency, n) for n in ORDERS]
    plain, clipped = SCALE * np.mean(cosines, axis=0)
    longer = candidates.sizes(2)[references.image] - references.sentences.sizes(2)
    clipped *= np.exp(-(longer**2) / (2 * SIGMA**2))
    return _mean_over(references, plain), _mean_over(references, clipped)  # Eq. 3, 4


def _cosines(
    candidates: Sentences, references: References, frequency: DocumentFrequency, n: int
) -> tuple[Floats, Floats]:
    """Return the cosine of each reference with its image's candidate, as it is and clipped."""
    mine, theirs = candidates.counts[n], references.sentences.counts[n]
    g_mine = mine.count * frequency.weights(n, mine.key)  # Eq. 1
    g_theirs = theirs.count * frequency.weights(n, theirs.key)

    keys = mine.grouped(np.arange(len(candidates)))
    order = np.argsort(keys)
    met = lookup(theirs.grouped(references.image), keys[order], g_mine[order])

    number = len(references.sentences)
    norms = np.sqrt(
        sums(mine.sentence, g_mine**2, len(candidates))[references.image]
        * sums(theirs.sentence, g_theirs**2, number)
    )
    norms[norms == 0] = np.inf  # a sentence without n-grams, or of ubiquitous ones: cosine 0
    plain = sums(theirs.sentence, met * g_theirs, number) / norms  # Eq. 2
    clipped = sums(theirs.sentence, np.minimum(met, g_theirs) * g_theirs, number) / norms  # Eq. 4
    return plain, clipped


def _mean_over(references: References, values: Floats) -> Floats:
    """Return the mean of the references' values for each image."""
    return sums(references.image, values, len(references.ids)) / np.bincount(references.image)
