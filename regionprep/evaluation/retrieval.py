"""Whether features mean something: do images with like features have like captions?

Every image's features are averaged over its regions; its nearest neighbours by cosine are looked
up, and the words of its captions are compared with theirs by Jaccard's index (words in both over
words in either). Chance is the same with the captions dealt out anew among the images, many times,
and the p-value is the share of these deals that do as well (the observed one counted in, so that it
is never 0). Features of images mixed up come out at chance, those of an untrained backbone a little
above it, for it sees colours; so the ratio to chance says more than the p-value does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.tables import read_captions
from regionprep.workspace import Workspace

STOP_WORDS: frozenset[str] = frozenset().union(
    # Articles and other determiners.
    {"a", "an", "the", "this", "that", "these", "those", "some", "any", "each", "every", "all"},
    {"another", "other", "several", "many", "few", "both", "there"},
    # Prepositions and particles.
    {"about", "above", "across", "after", "against", "along", "among", "around", "as", "at"},
    {"before", "behind", "below", "beside", "between", "by", "down", "during", "for", "from"},
    {"in", "inside", "into", "near", "next", "of", "off", "on", "onto", "out", "over", "through"},
    {"to", "top", "toward", "towards", "under", "up", "upon", "with", "within", "without"},
    # Conjunctions and pronouns.
    {"and", "or", "but", "while", "it", "its", "they", "them", "their", "he", "his", "him"},
    {"she", "her", "who", "which", "what", "you", "your", "we", "our", "i", "itself", "one"},
    # Auxiliaries and what contractions leave.
    {"is", "are", "was", "were", "be", "been", "being", "has", "have", "had", "do", "does"},
    {"can", "not", "n't", "'s", "'re", "'ve", "'ll", "'d", "'m"},
)
"""Words of captions that say nothing about which image they are of."""


@dataclass(frozen=True)
class Retrieval:
    """How much of their captions' words neighbours share, and would share by chance.

    `overlap` and `chance` are mean Jaccard indices of content words, 0 to 1; `p_value` is the share
    of `permutations` random deals of captions that reach `overlap`.
    """

    overlap: float
    chance: float
    p_value: float
    images: int
    neighbours: int
    permutations: int

    def __str__(self) -> str:
        return (
            f"{self.neighbours} nearest neighbours of {self.images} images share "
            f"{100 * self.overlap:.1f} % of their captions' content words, "
            f"{self.overlap / self.chance if self.chance else float('inf'):.2f} times what chance "
            f"gives ({100 * self.chance:.1f} %, p = {self.p_value:.2g})"
        )


def content_words(captions: Iterable[Iterable[str]]) -> set[str]:
    """Return the words of an image's tokenised captions, less the `STOP_WORDS`."""
    return {word for tokens in captions for word in tokens} - STOP_WORDS


def retrieval(
    features: NDArray[Any],
    words: Sequence[AbstractSet[str]],
    *,
    k: int = 5,
    seed: int = 0,
    permutations: int = 1000,
) -> Retrieval:
    """Compare the words of every image with those of its `k` nearest neighbours by cosine.

    `features` is (n, D), one vector an image, and `words` each image's content words. Memory grows
    with n^2: 2,000 images take 50 MB. The result depends on the inputs and the seed only.

    Raises InputError when there are too few images for k neighbours, or features are not finite.
    """
    number = len(features)
    if number != len(words):
        raise InputError(f"features of {number} images, but words of {len(words)}")
    if number < k + 2:
        raise InputError(f"{number} images are too few to look for {k} neighbours of each")
    neighbours = _nearest(np.asarray(features, np.float32), k)
    shared = _jaccard(words)
    generator = np.random.default_rng(seed)
    deals = (generator.permutation(number) for _ in range(permutations))
    by_chance = np.array([_mean_shared(shared, neighbours, deal) for deal in deals])
    overlap = _mean_shared(shared, neighbours, np.arange(number))
    # Sums in another order differ in their last bits; a tie is to count as a tie.
    as_good = int((by_chance >= overlap - 1e-9).sum())
    return Retrieval(
        overlap=overlap,
        chance=float(by_chance.mean()),
        p_value=(1 + as_good) / (1 + permutations),
        images=number,
        neighbours=k,
        permutations=permutations,
    )


def check_features(
    workspace: Workspace,
    detector: str,
    backbone: str,
    *,
    k: int = 5,
    seed: int = 0,
    permutations: int = 1000,
    most_images: int = 2000,
) -> Retrieval:
    """Return the `retrieval` of a workspace's features, by the mean feature of an image's regions.

    Images without regions or captions are left out; of more than `most_images`, so many are drawn
    by the seed.

    Raises MissingError when features or captions are not there.
    """
    store = FeatureStore(workspace.features(detector, backbone))
    captions: dict[str, list[Sequence[str]]] = {}
    for caption in read_captions(workspace):
        if caption.image_id in store:
            captions.setdefault(caption.image_id, []).append(caption.tokens)
    ids = sorted(captions)
    if len(ids) > most_images:
        drawn = np.random.default_rng(seed).choice(len(ids), most_images, replace=False)
        ids = [ids[place] for place in sorted(drawn)]
    means, words = [], []
    for image_id in ids:
        row = store[image_id]
        if row.features is not None and len(row.features):
            means.append(row.features.mean(axis=0, dtype=np.float32))
            words.append(content_words(captions[image_id]))
    if not means:
        raise InputError("no image with captions has features", where=store.folder)
    return retrieval(np.stack(means), words, k=k, seed=seed, permutations=permutations)


def _nearest(features: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Return the places of each vector's `k` nearest others by cosine, (n, k) in no order."""
    if not np.isfinite(features).all():
        raise InputError("features that are not finite have no neighbours")
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(lengths > 0, lengths, 1)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -np.inf)
    return np.argpartition(cosine, -k, axis=1)[:, -k:]


def _jaccard(words: Sequence[AbstractSet[str]]) -> NDArray[np.float32]:
    """Return the share of words that each two images have in common, (n, n)."""
    places = {word: place for place, word in enumerate(sorted(set().union(*words)))}
    holds = np.zeros((len(words), len(places)), np.float32)
    for image, own in enumerate(words):
        holds[image, [places[word] for word in own]] = 1
    both = holds @ holds.T
    sizes = holds.sum(axis=1)
    either = sizes[:, None] + sizes[None, :] - both
    shared: NDArray[np.float32] = both / np.maximum(either, 1)
    return shared


def _mean_shared(
    shared: NDArray[np.float32], neighbours: NDArray[np.intp], deal: NDArray[np.intp]
) -> float:
    """Return the mean share over neighbours when image i has the captions of image `deal[i]`."""
    return float(shared[deal[:, None], deal[neighbours]].mean(dtype=np.float64))
