"""The vocabulary: the words of the train split that are seen often enough.

Ids are `<pad>` 0, `<bos>` 1, `<eos>` 2, `<unk>` 3, then the words by count, most frequent first,
words of one count in alphabetical order. Only train is counted: a word of val or test alone is
unknown.

The field's vocabulary of COCO has 9,487 entries: 9,486 words seen more than 5 times in train and
restval, which is `min_count` 6, and UNK. Here that is 9,486 words and `<unk>`, besides the three
marks `<pad>`, `<bos>` and `<eos>`, so that `Vocabulary.size` is 9,490. (Karpathy's script cuts
captions of more than 16 words after counting, as is done here.)
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from regionprep.errors import InputError, MismatchError, MissingError, PrepError, StorageError
from regionprep.pipeline.documents import read_json
from regionprep.pipeline.tables import (
    CaptionRecord,
    dataset_fingerprint,
    read_captions,
    read_images,
)
from regionprep.workspace import Workspace, write_text

FORMAT = 1
MARKS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(len(MARKS))
REMAKE = "Make it with `prep vocab`."


@dataclass(frozen=True)
class Vocabulary:
    """Words and their ids, with the counts and settings that they came from.

    `counts` goes with `words`; `dataset` is the fingerprint of the tables that were counted;
    `max_length` is how many words of a caption are kept.
    """

    words: tuple[str, ...]
    counts: tuple[int, ...] = ()
    min_count: int = 1
    max_length: int = 16
    dataset: str = ""

    pad = PAD
    bos = BOS
    eos = EOS
    unk = UNK

    def __init__(
        self,
        words: Iterable[str],
        counts: Iterable[int] = (),
        *,
        min_count: int = 1,
        max_length: int = 16,
        dataset: str = "",
    ) -> None:
        for name, value in (
            ("words", tuple(words)),
            ("counts", tuple(counts)),
            ("min_count", min_count),
            ("max_length", max_length),
            ("dataset", dataset),
        ):
            object.__setattr__(self, name, value)
        if len(set(self.words) | set(MARKS)) != len(self.words) + len(MARKS):
            raise InputError("a vocabulary holds a word twice, or a mark such as <pad> as a word")

    def __len__(self) -> int:
        return self.size

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    @property
    def size(self) -> int:
        """Return how many ids there are, the four marks included."""
        return len(MARKS) + len(self.words)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of what the ids mean; counts and settings are no part of it."""
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=len(MARKS))}

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """Return an id a token, `<unk>` for those that are not in the vocabulary."""
        return [self._ids.get(token, UNK) for token in tokens]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words of `ids` up to the first `<eos>`, without `<pad>` and `<bos>`.

        Raises MismatchError for an id that this vocabulary does not have.
        """
        words = []
        for number in ids:
            if number == EOS:
                break
            if not 0 <= number < self.size:
                raise MismatchError(f"id {number} is not in a vocabulary of {self.size}")
            if number not in (PAD, BOS):
                words.append(MARKS[UNK] if number == UNK else self.words[number - len(MARKS)])
        return words

    def save(self, path: Path) -> bool:
        """Write the vocabulary unless `path` holds it already; return whether it was written."""
        record = {
            "format": FORMAT,
            "kind": "words",
            "dataset": self.dataset,
            "min_count": self.min_count,
            "max_length": self.max_length,
            "marks": MARKS,
            "counts": self.counts,
            "words": self.words,
        }
        text = json.dumps(record, ensure_ascii=False, separators=(",", ": "), indent=0) + "\n"
        if path.is_file() and path.read_bytes() == text.encode():
            return False
        write_text(path, text)
        return True

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Return the vocabulary in `path`.

        Raises MissingError when there is none, StorageError when it is damaged.
        """
        if not path.is_file():
            raise MissingError("there is no vocabulary yet", where=path, mend=REMAKE)
        try:
            return cls._from_record(read_json(path))
        except (PrepError, KeyError, TypeError, ValueError) as error:
            raise StorageError(f"is no vocabulary: {error}", where=path, mend=REMAKE) from error

    @classmethod
    def _from_record(cls, record: Any) -> Vocabulary:  # noqa: ANN401 - any JSON
        if (record["format"], record["kind"], record["marks"]) != (FORMAT, "words", list(MARKS)):
            raise ValueError("it is of another version or kind")
        words, counts = record["words"], record["counts"]
        if not all(isinstance(word, str) for word in words) or len(words) != len(counts):
            raise ValueError("words and their counts do not fit")
        return cls(
            words,
            (int(count) for count in counts),
            min_count=int(record["min_count"]),
            max_length=int(record["max_length"]),
            dataset=str(record["dataset"]),
        )


@dataclass(frozen=True)
class Coverage:
    """What a vocabulary leaves out of one split: tokens unknown, captions that are cut."""

    tokens: int
    unknown: int
    captions: int
    cut: int


@dataclass(frozen=True)
class VocabularyOutcome:
    """What `make_vocabulary` wrote, and what it leaves out of every split."""

    vocabulary: Vocabulary
    coverage: dict[str, Coverage]
    changed: bool

    def __str__(self) -> str:
        made = self.vocabulary
        state = "" if self.changed else "; nothing has changed"
        lines = [
            f"{len(made.words):,} words seen at least {made.min_count} times in train{state}",
            *(_coverage_line(split, covered, made) for split, covered in self.coverage.items()),
        ]
        return "\n".join(lines)


def _coverage_line(split: str, covered: Coverage, vocabulary: Vocabulary) -> str:
    return (
        f"  {split}: {covered.unknown:,} of {covered.tokens:,} tokens are unknown "
        f"({covered.unknown / max(1, covered.tokens):.2%}), {covered.cut:,} of "
        f"{covered.captions:,} captions have more than {vocabulary.max_length} words "
        f"({covered.cut / max(1, covered.captions):.2%})"
    )


def make_vocabulary(
    workspace: Workspace, *, min_count: int | None = None, max_length: int | None = None
) -> VocabularyOutcome:
    """Write `vocab.json` from the captions of train, and return it with what it leaves out.

    Without values the manifest's defaults are taken. Raises MissingError before `prep splits`,
    InputError when train has no captions or no word that is frequent enough.
    """
    defaults = workspace.dataset.defaults
    by_split = _captions_by_split(workspace)
    vocabulary = count_words(
        by_split.get("train", []),
        min_count=defaults.min_count if min_count is None else min_count,
        max_length=defaults.max_length if max_length is None else max_length,
        dataset=dataset_fingerprint(workspace),
    )
    changed = vocabulary.save(workspace.vocabulary)
    coverage = {split: _cover(vocabulary, captions) for split, captions in by_split.items()}
    return VocabularyOutcome(vocabulary, coverage, changed)


def load_vocabulary(workspace: Workspace) -> Vocabulary:
    """Return the workspace's vocabulary.

    Raises MissingError when there is none, StorageError when it is damaged, and MismatchError
    when it was made from another dataset's tables.
    """
    vocabulary = Vocabulary.load(workspace.vocabulary)
    if vocabulary.dataset != dataset_fingerprint(workspace):
        raise MismatchError(
            "is the vocabulary of another dataset, or of other splits of this one",
            where=workspace.vocabulary,
            mend="Make it anew with `prep vocab`.",
        )
    return vocabulary


def count_words(
    captions: Sequence[CaptionRecord], *, min_count: int, max_length: int, dataset: str = ""
) -> Vocabulary:
    """Return the words that these captions hold at least `min_count` times."""
    counts = Counter(token for caption in captions for token in caption.tokens)
    for mark in MARKS:
        del counts[mark]
    kept = [word for word, count in counts.items() if count >= min_count]
    if not kept:
        seen = f"the most frequent one {max(counts.values())} times" if counts else "there are none"
        raise InputError(
            f"no word is seen {min_count} times in the captions of train; {seen}",
            mend="Lower --min-count, or check the train split (`prep splits`).",
        )
    kept.sort(key=lambda word: (-counts[word], word))
    return Vocabulary(
        kept,
        (counts[word] for word in kept),
        min_count=min_count,
        max_length=max_length,
        dataset=dataset,
    )


def _captions_by_split(workspace: Workspace) -> dict[str, list[CaptionRecord]]:
    split_of = {image.image_id: image.split for image in read_images(workspace)}
    by_split: dict[str, list[CaptionRecord]] = {
        split: [] for split in ("train", "val", "test") if split in split_of.values()
    }
    for caption in read_captions(workspace):
        by_split[split_of[caption.image_id]].append(caption)
    return by_split


def _cover(vocabulary: Vocabulary, captions: Sequence[CaptionRecord]) -> Coverage:
    return Coverage(
        tokens=sum(len(caption.tokens) for caption in captions),
        unknown=sum(vocabulary.encode(caption.tokens).count(UNK) for caption in captions),
        captions=len(captions),
        cut=sum(len(caption.tokens) > vocabulary.max_length for caption in captions),
    )
