"""Byte-level BPE as GPT-2 has it: a text's bytes, joined pair by pair into the pieces of a list.

Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.2. A text is cut
into words, each with the space before it, and the bytes of each are joined by the first of the
`merges` that applies, until none does. Every text can be written, for single bytes are pieces too.

Pieces and merges are all there is to it, so that a tokenizer that has been read once is needed no
more. What other files of a tokenizer say besides (special tokens, padding, a space before the first
word) is left out. `tokenizers` encodes; decoding needs no library.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from regionprep.errors import InputError, MissingError

FILES = ("tokenizer.json", "vocab.json", "merges.txt")
GIVE = "Give the name of a GPT-2 tokenizer on the Hugging Face hub, such as gpt2, or its folder."

# A byte is written as the character of its number where that can be seen, else as one of those
# from U+0100 on, in order.
_SEEN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_UNSEEN = sorted(set(range(0x100)) - set(_SEEN))
BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(0x100 + place): byte for place, byte in enumerate(_UNSEEN)
}
SPACE = chr(0x100 + _UNSEEN.index(0x20))


@dataclass(frozen=True)
class Bpe:
    """The pieces, each at the place that is its id, and the merges as `left right`, first first.

    Raises ValueError for pieces and merges that are not those of a byte-level BPE.
    """

    pieces: tuple[str, ...]
    merges: tuple[str, ...]

    def __post_init__(self) -> None:
        pieces = set(self.pieces)
        if len(pieces) != len(self.pieces):
            raise ValueError("it holds a piece twice")
        if missing := BYTES.keys() - pieces:
            raise ValueError(f"{len(missing)} of the 256 bytes are no pieces of it")
        if not any(merge.startswith(SPACE) for merge in self.merges):
            raise ValueError("no piece of it begins with a space")
        for merge in self.merges:
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= pieces:
                raise ValueError(f"the merge '{merge}' is not of two pieces to a third")

    def __len__(self) -> int:
        return len(self.pieces)

    @cached_property
    def unmade(self) -> frozenset[int]:
        """Return the ids of pieces that no text is made of, such as GPT-2's `<|endoftext|>`."""
        made = BYTES.keys() | {merge.replace(" ", "") for merge in self.merges}
        return frozenset(
            number
            for number, piece in enumerate(self.pieces)
            if piece not in made or not BYTES.keys() >= set(piece)
        )

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of the pieces of words joined by spaces.

        Raises MissingError where `tokenizers` is not installed.
        """
        ids: list[int] = []
        # A text is cut before each space, so that a word's pieces are the same in any text.
        for place, word in enumerate(words):
            text = f" {word}" if place else word
            if text not in self._encoded:
                self._encoded[text] = self._tokenizer.encode(text).ids
            ids += self._encoded[text]
        return ids

    def spell(self, number: int) -> bytes:
        """Return the bytes of a piece, none for one that no text is made of."""
        if number in self.unmade:
            return b""
        return bytes(BYTES[character] for character in self.pieces[number])

    def begins_word(self, number: int) -> bool:
        """Tell whether a piece begins with a space."""
        return self.pieces[number].startswith(SPACE)

    @cached_property
    def _encoded(self) -> dict[str, list[int]]:
        """The words met so far: a lookup takes a tenth of the time of the merges."""
        return {}

    @cached_property
    def _tokenizer(self) -> Any:  # noqa: ANN401 - of a library that may be missing
        library = _library()
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        merges = [(left, right) for left, _, right in (one.partition(" ") for one in self.merges)]
        tokenizer = library.Tokenizer(library.models.BPE(vocab=ids, merges=merges))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer


def read_bpe(name: str) -> Bpe:
    """Return the BPE of a tokenizer: of a folder here, else by its name on the Hugging Face hub.

    A folder has `tokenizer.json`, or `vocab.json` and `merges.txt`. Raises MissingError where the
    hub does not give it or `tokenizers` is not installed, InputError for a folder without these
    files and for a tokenizer of another kind.
    """
    _library()  # before anything is fetched
    path = Path(name).expanduser()
    if path.is_file():
        raise InputError("is a file", where=path, mend="Give the folder that it lies in.")
    folder = path if path.is_dir() else _fetch(name)
    return _convert(_open(folder), folder)


def _fetch(name: str) -> Path:
    """Return the folder of the hub's cache that has the tokenizer, fetched where it is not."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES)))
    except Exception as error:  # whichever the hub's HTTP library of the day raises
        reason = str(error).partition("\n")[0]
        raise MissingError(
            f"no folder '{name}' is here, and no tokenizer of that name is on this machine or can "
            f"be fetched: {reason}",
            mend=f"{GIVE} Without a network, fetch https://huggingface.co/NAME/resolve/main/"
            f"{FILES[0]} elsewhere, and give the folder that you put it in.",
        ) from error


def _open(folder: Path) -> Any:  # noqa: ANN401 - of a library that may be missing
    library = _library()
    whole, pieces, merges = (folder / file for file in FILES)
    try:
        if whole.is_file():
            return library.Tokenizer.from_file(str(whole))
        if pieces.is_file() and merges.is_file():
            model = library.models.BPE.from_file(str(pieces), str(merges))
            tokenizer = library.Tokenizer(model)
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel()
            return tokenizer
    except Exception as error:  # the library raises no narrower one
        raise InputError(
            f"its tokenizer cannot be read: {error}", where=folder, mend="Fetch its files anew."
        ) from error
    raise InputError(
        f"has neither {FILES[0]}, nor {FILES[1]} and {FILES[2]}", where=folder, mend=GIVE
    )


def _convert(tokenizer: Any, folder: Path) -> Bpe:  # noqa: ANN401 - of a library
    parts = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    try:
        _require_gpt2s_kind(parts)
        if sorted(ids.values()) != list(range(len(ids))):
            raise ValueError(f"its {len(ids)} ids are not 0 to {len(ids) - 1}")
        merges = (" ".join(pair) for pair in parts["model"]["merges"])
        return Bpe(tuple(sorted(ids, key=ids.__getitem__)), tuple(merges))
    except ValueError as error:
        raise InputError(
            f"its tokenizer is no byte-level BPE as GPT-2 has it: {error}", where=folder, mend=GIVE
        ) from error


def _require_gpt2s_kind(parts: dict[str, Any]) -> None:
    """Raise ValueError where a tokenizer does more or other things than GPT-2's."""
    model, words = parts["model"], parts["pre_tokenizer"] or {"type": "nothing"}
    if model["type"] != "BPE":
        raise ValueError(f"its model is {model['type']}")
    if words["type"] != "ByteLevel" or not words["use_regex"]:
        raise ValueError(f"words are cut by {words['type']}")
    if parts["normalizer"] is not None:
        raise ValueError(f"text is changed by {parts['normalizer']['type']}")
    for option in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(option):
            raise ValueError(f"it has {option} {model[option]!r}")


def _library() -> Any:  # noqa: ANN401 - a module that may be missing
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise MissingError(
            "the package tokenizers, which a BPE vocabulary encodes with, is not installed",
            mend="Install it: pip install 'regionprep[gpt2]'",
        ) from error
