"""BPE: ids are the tokenizer's own, every word comes back, and what is no GPT-2's is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_vocab import workspace_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from regionprep import cli, job, scenes
from regionprep.errors import InputError, MismatchError, MissingError, StorageError
from regionprep.pipeline.bpe import BYTES, SPACE, Bpe, read_bpe
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.tables import CaptionRecord
from regionprep.pipeline.vocab import (
    BpeVocabulary,
    Vocabulary,
    WordVocabulary,
    count_pieces,
    load_vocabulary,
    make_vocabulary,
)
from regionprep.workspace import Workspace

TEXTS = [text for index in range(40) for text in scenes.captions(scenes.scene(0, index))]
END = "<|endoftext|>"


def trained(*, lower: bool = False, marked: bool = True) -> Tokenizer:
    """Return a byte-level BPE of the scenes' captions, GPT-2's mark at its end as in GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if marked:
        tokenizer.add_special_tokens([END])
    return tokenizer


TOKENIZER = trained()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the tokenizer in one file."""
    made = tmp_path / "tokenizer"
    made.mkdir()
    TOKENIZER.save(str(made / "tokenizer.json"))
    return made


def bpe_of(tokenizer: Tokenizer) -> Bpe:
    ids = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return Bpe(tuple(sorted(ids, key=ids.__getitem__)), tuple(" ".join(pair) for pair in merges))


BPE = bpe_of(TOKENIZER)
VOCABULARY = BpeVocabulary(BPE, (0,) * len(BPE), "made up")


def test_bytes_are_written_as_gpt2_writes_them():
    assert sorted(BYTES) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTES.values()) == list(range(256))
    [(written, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" é")
    assert bytes(BYTES[character] for character in written) == " é".encode()
    assert BYTES[SPACE] == ord(" ")


def test_ids_are_the_tokenizers_own_and_the_marks_follow():
    text = "a red disc on a blue square"
    ids = VOCABULARY.encode(text.split())
    assert ids == TOKENIZER.encode(text).ids
    assert [BPE.pieces[number] for number in ids] == TOKENIZER.encode(text).tokens
    last = TOKENIZER.token_to_id(END)
    marks = (VOCABULARY.pad, VOCABULARY.bos, VOCABULARY.eos, VOCABULARY.unk)
    assert marks == (last + 1, last + 2, last + 3, last + 4)
    assert VOCABULARY.size == len(VOCABULARY) == last + 5 == TOKENIZER.get_vocab_size() + 4


def test_the_first_word_has_no_space_before_it_and_others_have():
    first, *rest = VOCABULARY.encode(["disc", "disc"])
    assert not BPE.begins_word(first)
    assert BPE.begins_word(next(number for number in rest if BPE.begins_word(number)))
    assert VOCABULARY.encode(["disc"]) == TOKENIZER.encode("disc").ids
    assert VOCABULARY.encode([]) == []


WORDS = st.text(min_size=1, max_size=8).filter(lambda word: word.split() == [word])


# A text may hold the letters of a mark, which make no mark here.
UNMARKED = trained(marked=False)


@given(st.lists(st.one_of(WORDS, st.sampled_from([*" ".join(TEXTS).split(), END, "<unk>"]))))
def test_words_are_encoded_as_one_text_and_come_back(words: list[str]):
    ids = VOCABULARY.encode(words)
    assert ids == UNMARKED.encode(" ".join(words)).ids
    padded = [VOCABULARY.bos, *ids, VOCABULARY.eos, VOCABULARY.pad, *ids]
    assert VOCABULARY.decode(padded) == words
    assert not set(ids) & {*VOCABULARY.forbidden, VOCABULARY.pad, VOCABULARY.bos, VOCABULARY.eos}


@given(st.lists(st.integers(0, len(BPE) - 2), max_size=12))
def test_any_ids_are_decoded_as_the_library_decodes_them(ids: list[int]):
    TOKENIZER.decoder = decoders.ByteLevel()
    assert VOCABULARY.decode(ids) == TOKENIZER.decode(ids).split()


def test_only_unk_and_pieces_without_text_are_forbidden():
    end = TOKENIZER.token_to_id(END)
    assert VOCABULARY.forbidden == (VOCABULARY.unk, end)
    assert VOCABULARY.decode([BPE.pieces.index("a"), end, VOCABULARY.unk]) == ["a", "<unk>"]


def test_ids_of_another_vocabulary_are_refused():
    for number in (VOCABULARY.size, -1):
        with pytest.raises(MismatchError, match=f"id {number} is not in a vocabulary of"):
            VOCABULARY.decode([number])


@given(st.sampled_from(TEXTS), st.integers(1, 30))
def test_a_cut_caption_keeps_the_whole_words_that_fit(text: str, longest: int):
    vocabulary = BpeVocabulary(BPE, VOCABULARY.counts, "made up", max_length=longest)
    words = text.split()
    kept = vocabulary.cut(vocabulary.encode(words))
    assert len(kept) <= longest
    whole = [n for n in range(len(words) + 1) if len(vocabulary.encode(words[:n])) <= longest]
    if whole[-1]:
        assert vocabulary.decode(kept) == words[: whole[-1]]
    else:
        assert kept == vocabulary.encode(words)[:longest], "no word fits, and some of it must stay"


def test_train_alone_is_counted_and_what_is_cut_is_told(tmp_path: Path, folder: Path):
    workspace = workspace_of(tmp_path, train=["a disc", "a disc " * 30], val=["a zebra"])
    outcome = make_vocabulary(workspace, bpe=str(folder))
    made = outcome.vocabulary
    assert made.max_length == 20
    assert made.counts[BPE.pieces.index("a")] == 2
    assert sum(made.counts) == sum(
        len(TOKENIZER.encode(text).ids) for text in ("a disc", ("a disc " * 30).strip())
    )
    first, train, val = str(outcome).splitlines()
    seen = sum(count > 0 for count in made.counts)
    assert first == f"{len(BPE)} BPE tokens of {folder}, {seen} of them seen in train"
    assert "1 of 2 captions have more than 20 BPE tokens (50.00%)" in train
    assert "0 of " in val


def test_the_length_is_the_users_else_the_manifests_where_that_is_more(
    tmp_path: Path, folder: Path
):
    workspace = workspace_of(tmp_path, train=["a disc"])
    assert make_vocabulary(workspace, bpe=str(folder), max_length=7).vocabulary.max_length == 7
    dataset = workspace.dataset
    longer = dataset.model_copy(
        update={"defaults": dataset.defaults.model_copy(update={"max_length": 40})}
    )
    workspace = Workspace(workspace.root, longer)
    assert make_vocabulary(workspace, bpe=str(folder)).vocabulary.max_length == 40


def test_it_comes_back_from_its_file_without_the_tokenizer(tmp_path: Path, folder: Path):
    workspace = workspace_of(tmp_path, train=TEXTS[:4])
    made = make_vocabulary(workspace, bpe=str(folder)).vocabulary
    (folder / "tokenizer.json").unlink()
    loaded = load_vocabulary(workspace)
    assert loaded == made
    assert loaded.fingerprint == made.fingerprint
    words = TEXTS[0].split()
    assert loaded.decode(loaded.encode(words)) == words
    before = workspace.vocabulary.read_bytes()
    assert not loaded.save(workspace.vocabulary)
    assert workspace.vocabulary.read_bytes() == before


def test_vocab_and_merges_are_read_as_the_one_file_is(tmp_path: Path, folder: Path):
    parts = json.loads((folder / "tokenizer.json").read_text())
    pair = tmp_path / "pair"
    pair.mkdir()
    ids = parts["model"]["vocab"] | {END: len(parts["model"]["vocab"])}
    (pair / "vocab.json").write_text(json.dumps(ids))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in parts["model"]["merges"])]
    (pair / "merges.txt").write_text("\n".join(lines) + "\n")
    assert read_bpe(str(pair)) == read_bpe(str(folder)) == BPE


def test_a_name_is_looked_up_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def snapshot(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, sorted(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert read_bpe("gpt2") == BPE
    assert asked == [("gpt2", ["merges.txt", "tokenizer.json", "vocab.json"])]


def test_fingerprints_are_of_pieces_and_merges_and_of_the_kind():
    words = WordVocabulary(BPE.pieces)
    other = Bpe(BPE.pieces, BPE.merges[:-1])
    counted = count_pieces(
        [CaptionRecord("0", "0", "a", ["a"])], BPE, tokenizer="elsewhere", max_length=5
    )
    assert counted.fingerprint == VOCABULARY.fingerprint
    assert VOCABULARY.fingerprint != words.fingerprint
    assert VOCABULARY.fingerprint != BpeVocabulary(other, (), "").fingerprint


def test_each_kind_takes_the_others_place_and_prep_run_leaves_it(tmp_path: Path, folder: Path):
    tables = workspace_of(tmp_path, train=["a disc"] * 6)
    workspace = Workspace(tables.root, initialise(tmp_path / "scenes", dataset="scenes").dataset)
    make_vocabulary(workspace)
    assert isinstance(Vocabulary.load(workspace.vocabulary), WordVocabulary)
    assert make_vocabulary(workspace, bpe=str(folder)).changed
    assert isinstance(Vocabulary.load(workspace.vocabulary), BpeVocabulary)
    [step] = [step for step in job.steps(workspace) if step.product == workspace.vocabulary]
    assert step.done, "prep run does what is not done, and no more"
    assert "  done   prep vocab" in job.describe(workspace).splitlines()


def test_min_count_does_not_go_with_it(tmp_path: Path, folder: Path):
    workspace = workspace_of(tmp_path, train=["a disc"])
    with pytest.raises(InputError, match="--min-count does not go with --bpe"):
        make_vocabulary(workspace, bpe=str(folder), min_count=2)
    assert not workspace.vocabulary.exists()


def test_a_train_split_without_words_is_refused(tmp_path: Path, folder: Path):
    workspace = workspace_of(tmp_path, val=["a disc"])
    with pytest.raises(InputError, match=r"captions of train have no word\n.*prep splits"):
        make_vocabulary(workspace, bpe=str(folder))
    assert not workspace.vocabulary.exists()


def test_a_name_that_cannot_be_fetched_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def snapshot(*_: object, **__: object) -> str:
        raise OSError("no route to the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    workspace = workspace_of(tmp_path, train=["a disc"])
    with pytest.raises(MissingError, match=r"no folder 'gtp2' .*no route to the hub\n.*folder"):
        make_vocabulary(workspace, bpe="gtp2")
    assert not workspace.vocabulary.exists()


def test_a_folder_without_a_tokenizer_names_the_files(tmp_path: Path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(InputError, match=r"neither tokenizer\.json, nor vocab\.json and merges"):
        read_bpe(str(tmp_path))
    with pytest.raises(InputError, match=r"vocab\.json: is a file\n.*folder"):
        read_bpe(str(tmp_path / "vocab.json"))


def test_a_torn_tokenizer_is_refused(folder: Path):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match=r"tokenizer: its tokenizer cannot be read"):
        read_bpe(str(folder))


def cut_at_spaces() -> Tokenizer:
    tokenizer = trained()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def with_a_gap() -> Tokenizer:
    parts = json.loads(TOKENIZER.to_str())
    parts["model"]["vocab"]["gap"] = 900
    return Tokenizer.from_str(json.dumps(parts))


def with_ends_of_words() -> Tokenizer:
    parts = json.loads(TOKENIZER.to_str())
    parts["model"]["end_of_word_suffix"] = "</w>"
    parts["model"]["merges"] = []
    return Tokenizer.from_str(json.dumps(parts))


def without_all_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=99, show_progress=False))
    return tokenizer


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), "its model is WordLevel"),
        (cut_at_spaces, "words are cut by Whitespace"),
        (lambda: trained(lower=True), "text is changed by Lowercase"),
        (with_ends_of_words, "it has end_of_word_suffix '</w>'"),
        (with_a_gap, "ids are not 0 to"),
        (without_all_bytes, "of the 256 bytes are no pieces"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(
    tmp_path: Path, make: Callable[[], Tokenizer], said: str
):
    make().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"no byte-level BPE as GPT-2 has it") as refusal:
        read_bpe(str(tmp_path))
    assert said in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"kind": "sentencepiece"},
        {"kind": ["bpe"]},
        {"kind": "words"},
        {"marks": ["<pad>", "<s>", "</s>", "<unk>"]},
        {"pieces": [*BPE.pieces[:-1], BPE.pieces[0]]},
        {"pieces": [*BPE.pieces[:-1], 3]},
        {"pieces": list(BPE.pieces[1:])},
        {"pieces": None},
        {"merges": [*BPE.merges, "a zebra"]},
        {"merges": [*BPE.merges, "ab"]},
        {"merges": []},
        {"merges": [["a", "b"]]},
        {"counts": [1, 2, 3]},
        {"max_length": "long"},
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, folder: Path, change: dict[str, Any]):
    workspace = workspace_of(tmp_path, train=["a disc"])
    make_vocabulary(workspace, bpe=str(folder))
    record = json.loads(workspace.vocabulary.read_text())
    workspace.vocabulary.write_text(json.dumps(record | change))
    with pytest.raises(StorageError, match=r"vocab\.json: is no vocabulary.*\n.*prep vocab --bpe"):
        load_vocabulary(workspace)


def test_a_torn_vocabulary_is_refused(tmp_path: Path, folder: Path):
    workspace = workspace_of(tmp_path, train=["a disc"])
    make_vocabulary(workspace, bpe=str(folder))
    text = workspace.vocabulary.read_text()
    workspace.vocabulary.write_text(text[: len(text) // 2])
    with pytest.raises(StorageError, match="prep vocab"):
        load_vocabulary(workspace)


def test_without_the_library_it_decodes_and_names_the_extra_to_encode(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    workspace = workspace_of(tmp_path, train=["a disc"])
    ids = make_vocabulary(workspace, bpe=str(folder)).vocabulary.encode(["a", "disc"])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    loaded = load_vocabulary(workspace)
    assert loaded.decode(ids) == ["a", "disc"]
    with pytest.raises(MissingError, match=r"pip install 'regionprep\[gpt2\]'"):
        loaded.encode(["a"])
    with pytest.raises(MissingError, match=r"pip install 'regionprep\[gpt2\]'"):
        make_vocabulary(workspace, bpe="gpt2")


def prep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the command here, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["prep", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_command_makes_it_and_tells_faults_without_a_traceback(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    workspace = workspace_of(tmp_path, train=["a disc"], val=["a ring"])
    make = ("--workspace", str(workspace.root), "vocab", "--bpe", str(folder))
    assert prep(monkeypatch, *make, "--min-count", "2") == 2
    assert "error: --min-count does not go with --bpe" in capsys.readouterr().err
    assert not workspace.vocabulary.exists()
    assert prep(monkeypatch, *make, "--max-length", "12") == 0
    assert f"{len(BPE)} BPE tokens of {folder}" in capsys.readouterr().out
    assert load_vocabulary(workspace).max_length == 12
    assert prep(monkeypatch, *make[:3], "--bpe", str(tmp_path)) == 2
    assert "has neither tokenizer.json" in capsys.readouterr().err
    assert load_vocabulary(workspace).max_length == 12
