"""Sentences as numbers: words and n-grams become 64-bit keys, and all counting is numpy's.

A word's key is a hash of its text, an n-gram's a polynomial of its words' keys modulo 2^64. Keys
need no vocabulary, so that counts made at different times meet (document frequencies of the
training captions, say, and the candidates of a later step). Two of k different n-grams share a key
with probability k^2 / 2^65: under one in a million for the five million n-grams of all of COCO.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError

ORDERS = (1, 2, 3, 4)
"""The n of the n-grams that BLEU and CIDEr count."""

Keys: TypeAlias = NDArray[np.uint64]
Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

_NEXT_WORD = np.uint64(0x9E3779B97F4A7C15)
_NEXT_IMAGE = np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True, eq=False)
class Counts:
    """The different n-grams of sentences, one row each: its sentence, key and count there.

    Rows are sorted by sentence, then key.
    """

    sentence: Integers
    key: Keys
    count: Integers

    def grouped(self, group: Integers) -> Keys:
        """Return keys that differ between groups: `group` numbers each sentence's (its image)."""
        return self.key + group[self.sentence].astype(np.uint64) * _NEXT_IMAGE


@dataclass(frozen=True, eq=False)
class Sentences:
    """Tokenised sentences, the keys of all their words in a row, and each one's length."""

    tokens: Sequence[Sequence[str]]
    words: Keys
    lengths: Integers

    @classmethod
    def of(cls, sentences: Sequence[Sequence[str]]) -> Sentences:
        """Return the sentences as keys."""
        keys = {word: _key(word) for word in set().union(*sentences)}
        flat = (keys[word] for sentence in sentences for word in sentence)
        return cls(
            sentences,
            np.fromiter(flat, np.uint64),
            np.fromiter(map(len, sentences), np.int64, len(sentences)),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def sizes(self, order: int) -> Integers:
        """Return how many n-grams of an order each sentence has, repeated ones included."""
        return np.maximum(self.lengths - (order - 1), 0)

    @functools.cached_property
    def counts(self) -> dict[int, Counts]:
        """The n-grams of every order, counted."""
        return {order: self._count(order) for order in ORDERS}

    def _count(self, order: int) -> Counts:
        sizes = self.sizes(order)
        starts = np.cumsum(self.lengths) - self.lengths
        sentence = np.repeat(np.arange(len(self)), sizes)
        within = np.arange(len(sentence)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        first = starts[sentence] + within
        key = np.zeros(len(first), np.uint64)
        for step in range(order):
            key = key * _NEXT_WORD + self.words[first + step]
        by_sentence = np.lexsort((key, sentence))
        key, sentence = key[by_sentence], sentence[by_sentence]
        new = np.ones(len(key), bool)
        new[1:] = (key[1:] != key[:-1]) | (sentence[1:] != sentence[:-1])
        place = np.flatnonzero(new)
        return Counts(sentence[place], key[place], np.diff(place, append=len(key)))


@dataclass(frozen=True, eq=False)
class References:
    """Every image's reference captions, in one list: the part of scoring that can be kept.

    `image[i]` is the place in `ids` of the image that sentence i belongs to; it never decreases,
    and every image has a sentence.
    """

    ids: tuple[str, ...]
    sentences: Sentences
    image: Integers

    @classmethod
    def of(cls, references: Mapping[str, Sequence[Sequence[str]]]) -> References:
        """Return tokenised references by image id; images are kept in the order of their ids.

        Raises InputError when there are none, or an image has none.
        """
        if not references:
            raise InputError("no references to score against")
        if bare := sorted(image_id for image_id, given in references.items() if not given):
            raise InputError(f"{len(bare)} images have no references: {some(bare)}")
        ids = tuple(sorted(references))
        sizes = [len(references[image_id]) for image_id in ids]
        flat = [tokens for image_id in ids for tokens in references[image_id]]
        return cls(ids, Sentences.of(flat), np.repeat(np.arange(len(ids)), sizes))

    @functools.cached_property
    def starts(self) -> Integers:
        """The place of every image's first sentence."""
        return np.searchsorted(self.image, np.arange(len(self.ids)))

    @functools.cached_property
    def highest(self) -> dict[int, tuple[Keys, Integers]]:
        """An image's n-grams with their highest count in one of its references, by order.

        Keys are grouped by image and sorted.
        """
        return {order: self._highest(counts) for order, counts in self.sentences.counts.items()}

    def _highest(self, counts: Counts) -> tuple[Keys, Integers]:
        grouped = counts.grouped(self.image)
        order = np.argsort(grouped, kind="stable")
        keys, first = np.unique(grouped[order], return_index=True)
        if not len(keys):
            return keys, counts.count
        return keys, np.maximum.reduceat(counts.count[order], first)

    @functools.cached_property
    def document_frequency(self) -> DocumentFrequency:
        """In how many of these images the references hold each n-gram."""
        keys, frequencies = {}, {}
        for order, counts in self.sentences.counts.items():
            _, once_an_image = np.unique(counts.grouped(self.image), return_index=True)
            keys[order], frequencies[order] = np.unique(
                counts.key[once_an_image], return_counts=True
            )
        return DocumentFrequency(len(self.ids), keys, frequencies)


@dataclass(frozen=True, eq=False)
class DocumentFrequency:
    """In how many of `images` images the references hold each n-gram."""

    images: int
    keys: dict[int, Keys]
    frequencies: dict[int, Integers]

    def weights(self, order: int, keys: Keys) -> Floats:
        """Return each n-gram's inverse document frequency, `log(images / max(1, frequency))`."""
        frequency = lookup(keys, self.keys[order], self.frequencies[order])
        weights: Floats = np.log(self.images) - np.log(np.maximum(1.0, frequency))
        return weights


def lookup(keys: Keys, known: Keys, values: Integers | Floats) -> Floats:
    """Return the value of each key, 0 where it is not among the `known` (sorted, no repeats)."""
    found = np.zeros(len(keys))
    if len(known):
        place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        np.copyto(found, values[place], where=known[place] == keys)
    return found


def sums(groups: Integers, values: Integers | Floats, number: int) -> Floats:
    """Return the sum of the values of each of `number` groups."""
    return np.asarray(np.bincount(groups, values, number), np.float64)


def some(names: Sequence[str], limit: int = 5) -> str:
    """Return the first few names for a message."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more


def _key(word: str) -> int:
    # Lone surrogates can come out of broken JSON; they are words like others here.
    data = word.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
