"""The vocabulary: what the ids of captions mean, and how often the train split has each.

Words: ids are `<pad>` 0, `<bos>` 1, `<eos>` 2, `<unk>` 3, then the words that are seen often enough
by count, most frequent first, words of one count in alphabetical order. Only train is counted: a
word of val or test alone is unknown.

The field's vocabulary of COCO has 9,487 entries: 9,486 words seen more than 5 times in train and
restval, which is `min_count` 6, and UNK. Here that is 9,486 words and `<unk>`, besides the three
marks `<pad>`, `<bos>` and `<eos>`, so that `Vocabulary.size` is 9,490. (Karpathy's script cuts
captions of more than 16 words after counting, as is done here.)

BPE: ids are those of the tokenizer, unchanged, then the four marks, so that pretrained embeddings
fit the first rows of a model's. All pieces are kept, however often train has them. GPT-2's are 0 to
50256, and the marks 50257 to 50260. A caption keeps 20 pieces unless told otherwise, over which
VisualGPT's released code averages; where that is within a word, the word goes.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from regionprep.errors import InputError, MismatchError, MissingError, PrepError, StorageError
from regionprep.pipeline.bpe import Bpe, read_bpe
from regionprep.pipeline.claim import claimed, terminable
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
BPE_LENGTH = 20
"""BPE tokens of a caption that are kept: 16 words are more than 16 of them."""
REMAKE = "Make it with `prep vocab`, or `prep vocab --bpe NAME` for a BPE tokenizer."


class Vocabulary(ABC):
    """Words or pieces of words and their ids, with the counts and settings that they came from.

    `counts` are how often train has each but the marks; `dataset` is the fingerprint of the tables
    that were counted; `max_length` is how many ids of a caption are kept, not counting marks.
    """

    kind: ClassVar[str]
    unit: ClassVar[str]
    counts: tuple[int, ...]
    max_length: int
    dataset: str

    def __len__(self) -> int:
        return self.size

    @property
    def pad(self) -> int:
        """Return the id that fills up a batch."""
        return self._first_mark

    @property
    def bos(self) -> int:
        """Return the id before a caption."""
        return self._first_mark + 1

    @property
    def eos(self) -> int:
        """Return the id after a caption."""
        return self._first_mark + 2

    @property
    def unk(self) -> int:
        """Return the id of what is not in the vocabulary."""
        return self._first_mark + 3

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Return the ids that no caption is to hold, besides `pad` and `bos`, which none may."""
        return (self.unk,)

    @property
    @abstractmethod
    def size(self) -> int:
        """Return how many ids there are, the four marks included."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Return the SHA-256 of what the ids mean; counts and settings are no part of it."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Return what is in it, in a line."""

    @property
    @abstractmethod
    def _first_mark(self) -> int: ...

    @abstractmethod
    def encode(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of a caption's tokens, without marks."""

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words of `ids` up to the first `<eos>`, without `<pad>` and `<bos>`.

        Raises MismatchError for an id that this vocabulary does not have.
        """
        said = []
        for number in ids:
            if number == self.eos:
                break
            if not 0 <= number < self.size:
                raise MismatchError(f"id {number} is not in a vocabulary of {self.size}")
            if number not in (self.pad, self.bos):
                said.append(number)
        return self._words(said)

    def cut(self, ids: list[int]) -> list[int]:
        """Return the ids of a caption that are kept: `max_length` at most."""
        return ids[: self.max_length]

    @abstractmethod
    def _words(self, ids: Sequence[int]) -> list[str]: ...

    def save(self, path: Path) -> bool:
        """Write the vocabulary unless `path` holds it already; return whether it was written."""
        record = {"format": FORMAT, "kind": self.kind, "marks": MARKS} | self._record()
        text = json.dumps(record, ensure_ascii=False, separators=(",", ": "), indent=0) + "\n"
        if path.is_file() and path.read_bytes() == text.encode():
            return False
        write_text(path, text)
        return True

    @abstractmethod
    def _record(self) -> dict[str, Any]: ...

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Return the vocabulary in `path`, of either kind.

        Raises MissingError when there is none, StorageError when it is damaged.
        """
        if not path.is_file():
            raise MissingError("there is no vocabulary yet", where=path, mend=REMAKE)
        try:
            record = read_json(path)
            if (record["format"], record["marks"]) != (FORMAT, list(MARKS)):
                raise ValueError("it is of another version")
            if record["kind"] not in KINDS:
                raise ValueError(f"it is of another kind, {record['kind']!r}")
            return KINDS[record["kind"]]._from_record(record)
        except (PrepError, KeyError, TypeError, ValueError) as error:
            raise StorageError(f"is no vocabulary: {error}", where=path, mend=REMAKE) from error

    @classmethod
    @abstractmethod
    def _from_record(cls, record: dict[str, Any]) -> Vocabulary: ...


@dataclass(frozen=True)
class WordVocabulary(Vocabulary):
    """Words; `counts` goes with `words`, and what is not among them is `<unk>`."""

    words: tuple[str, ...]
    counts: tuple[int, ...] = ()
    min_count: int = 1
    max_length: int = 16
    dataset: str = ""

    kind = "words"
    unit = "words"
    _first_mark = 0

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

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    @property
    def size(self) -> int:
        """Return how many ids there are, the four marks included."""
        return len(MARKS) + len(self.words)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the words in their order."""
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()

    @property
    def summary(self) -> str:
        """Return how many words there are, and which."""
        return f"{len(self.words):,} words seen at least {self.min_count} times in train"

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, start=len(MARKS))}

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """Return an id a token, `<unk>` for those that are not in the vocabulary."""
        return [self._ids.get(token, self.unk) for token in tokens]

    def _words(self, ids: Sequence[int]) -> list[str]:
        return [
            MARKS[number] if number == self.unk else self.words[number - len(MARKS)]
            for number in ids
        ]

    def _record(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "min_count": self.min_count,
            "max_length": self.max_length,
            "counts": self.counts,
            "words": self.words,
        }

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> WordVocabulary:
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
class BpeVocabulary(Vocabulary):
    """The pieces of a BPE tokenizer, which write every word; `counts` goes with its pieces.

    `tokenizer` is the name or folder that it came from, and needed no more.
    """

    bpe: Bpe
    counts: tuple[int, ...]
    tokenizer: str
    max_length: int = BPE_LENGTH
    dataset: str = ""

    kind = "bpe"
    unit = "BPE tokens"

    @property
    def size(self) -> int:
        """Return how many ids there are, the four marks included."""
        return len(self.bpe) + len(MARKS)

    @property
    def _first_mark(self) -> int:
        return len(self.bpe)

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Return `<unk>` and the pieces that no text is made of, such as `<|endoftext|>`."""
        return (self.unk, *sorted(self.bpe.unmade))

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the pieces and merges in their order."""
        meaning = [self.kind, self.bpe.pieces, self.bpe.merges]
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()

    @property
    def summary(self) -> str:
        """Return how many pieces there are, and how many of them are in use."""
        seen = sum(count > 0 for count in self.counts)
        return f"{len(self.bpe):,} BPE tokens of {self.tokenizer}, {seen:,} of them seen in train"

    def encode(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of the pieces of the tokens, joined by spaces; there is none before."""
        return self.bpe.encode(tokens)

    def cut(self, ids: list[int]) -> list[int]:
        """Return the ids of a caption that are kept: the whole words in the first `max_length`."""
        if len(ids) <= self.max_length:
            return ids
        ends = (end for end in range(self.max_length, 0, -1) if self.bpe.begins_word(ids[end]))
        return ids[: next(ends, self.max_length)]

    def _words(self, ids: Sequence[int]) -> list[str]:
        unknown = f" {MARKS[3]} ".encode()
        said = (unknown if number == self.unk else self.bpe.spell(number) for number in ids)
        # A model may choose bytes that make no character.
        return b"".join(said).decode(errors="replace").split()

    def _record(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "tokenizer": self.tokenizer,
            "max_length": self.max_length,
            "counts": self.counts,
            "pieces": self.bpe.pieces,
            "merges": self.bpe.merges,
        }

    @classmethod
    def _from_record(cls, record: dict[str, Any]) -> BpeVocabulary:
        if not all(isinstance(text, str) for text in (*record["pieces"], *record["merges"])):
            raise ValueError("a piece or a merge of it is no text")
        bpe = Bpe(tuple(record["pieces"]), tuple(record["merges"]))
        if len(bpe) != len(record["counts"]):
            raise ValueError("pieces and their counts do not fit")
        return cls(
            bpe,
            tuple(int(count) for count in record["counts"]),
            tokenizer=str(record["tokenizer"]),
            max_length=int(record["max_length"]),
            dataset=str(record["dataset"]),
        )


KINDS: dict[str, type[Vocabulary]] = {"words": WordVocabulary, "bpe": BpeVocabulary}


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
            f"{made.summary}{state}",
            *(_coverage_line(split, covered, made) for split, covered in self.coverage.items()),
        ]
        return "\n".join(lines)


def _coverage_line(split: str, covered: Coverage, vocabulary: Vocabulary) -> str:
    return (
        f"  {split}: {covered.unknown:,} of {covered.tokens:,} tokens are unknown "
        f"({covered.unknown / max(1, covered.tokens):.2%}), {covered.cut:,} of "
        f"{covered.captions:,} captions have more than {vocabulary.max_length} {vocabulary.unit} "
        f"({covered.cut / max(1, covered.captions):.2%})"
    )


def make_vocabulary(
    workspace: Workspace,
    *,
    min_count: int | None = None,
    max_length: int | None = None,
    bpe: str | None = None,
) -> VocabularyOutcome:
    """Write `vocab.json` from the captions of train, and return it with what it leaves out.

    `bpe` names a tokenizer, on the Hugging Face hub or in a folder, whose pieces are counted
    instead of words. Without values the manifest's defaults are taken, but at least `BPE_LENGTH`
    BPE tokens. Raises MissingError before `prep splits`, BusyError while another process writes the
    tables or the vocabulary, InputError when train has no captions or no word that is frequent
    enough; see `read_bpe` for what tokenizers are refused.
    """
    if bpe is not None and min_count is not None:
        raise InputError(
            "--min-count does not go with --bpe: a tokenizer's ids are kept whole",
            mend="Leave one of the two out.",
        )
    defaults = workspace.dataset.defaults
    with claimed(workspace.root), terminable():
        by_split = _captions_by_split(workspace)
        dataset = dataset_fingerprint(workspace)
        vocabulary: Vocabulary
        if bpe is None:
            vocabulary = count_words(
                by_split.get("train", []),
                min_count=defaults.min_count if min_count is None else min_count,
                max_length=defaults.max_length if max_length is None else max_length,
                dataset=dataset,
            )
        else:
            vocabulary = count_pieces(
                by_split.get("train", []),
                read_bpe(bpe),
                tokenizer=bpe,
                max_length=(
                    max(BPE_LENGTH, defaults.max_length) if max_length is None else max_length
                ),
                dataset=dataset,
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
            mend=REMAKE,
        )
    return vocabulary


def count_words(
    captions: Sequence[CaptionRecord], *, min_count: int, max_length: int, dataset: str = ""
) -> WordVocabulary:
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
    return WordVocabulary(
        kept,
        (counts[word] for word in kept),
        min_count=min_count,
        max_length=max_length,
        dataset=dataset,
    )


def count_pieces(
    captions: Sequence[CaptionRecord],
    bpe: Bpe,
    *,
    tokenizer: str,
    max_length: int,
    dataset: str = "",
) -> BpeVocabulary:
    """Return all pieces of a tokenizer, with how often these captions hold each."""
    counts = Counter(number for caption in captions for number in bpe.encode(caption.tokens))
    if not counts:
        raise InputError(
            "the captions of train have no word", mend="Check the train split (`prep splits`)."
        )
    return BpeVocabulary(
        bpe,
        tuple(counts[number] for number in range(len(bpe))),
        tokenizer=tokenizer,
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
    encoded = [vocabulary.encode(caption.tokens) for caption in captions]
    return Coverage(
        tokens=sum(map(len, encoded)),
        unknown=sum(ids.count(vocabulary.unk) for ids in encoded),
        captions=len(captions),
        cut=sum(len(ids) > vocabulary.max_length for ids in encoded),
    )
