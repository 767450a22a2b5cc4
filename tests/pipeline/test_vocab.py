"""The vocabulary: counted in train alone, the same every time, refused where it does not fit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionprep.errors import InputError, MismatchError, MissingError, StorageError
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.tables import CaptionRecord, ImageRecord, write_tables
from regionprep.pipeline.vocab import (
    MARKS,
    Vocabulary,
    WordVocabulary,
    count_words,
    load_vocabulary,
    make_vocabulary,
)
from regionprep.workspace import Workspace


def captions_of(*texts: str) -> list[CaptionRecord]:
    return [CaptionRecord(str(n), str(n), text, text.split()) for n, text in enumerate(texts)]


def workspace_of(root: Path, **splits: list[str]) -> Workspace:
    """A workspace whose tables hold an image a caption, in these splits."""
    (root / "images").mkdir(parents=True)
    (root / "images/x.jpg").touch()
    workspace = initialise(root / "work", images=root / "images")
    images, captions = [], []
    for split, texts in splits.items():
        for text in texts:
            image_id = f"{len(images):03d}"
            images.append(ImageRecord(image_id, f"{image_id}.jpg", 8, 6, split))
            captions.append(CaptionRecord(image_id, f"{image_id}#0", text, text.split()))
    write_tables(workspace, images, captions)
    return workspace


def test_ids_are_marks_then_words_by_count_then_alphabet():
    vocabulary = count_words(captions_of("b a c", "c b", "c d"), min_count=1, max_length=16)
    assert (vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.unk) == (0, 1, 2, 3)
    assert vocabulary.words == ("c", "b", "a", "d")
    assert vocabulary.counts == (3, 2, 1, 1)
    assert vocabulary.encode(["c", "d", "never"]) == [4, 7, 3]
    assert vocabulary.size == len(vocabulary) == 8
    assert "c" in vocabulary
    assert "never" not in vocabulary


def test_more_than_five_times_is_a_minimum_of_six():
    captions = captions_of(*["six five"] * 5, "six")
    assert count_words(captions, min_count=6, max_length=16).words == ("six",)
    assert count_words(captions, min_count=5, max_length=16).words == ("six", "five")


def test_only_train_is_counted(tmp_path: Path):
    workspace = workspace_of(tmp_path, train=["a a b"], val=["c c c a"], test=["d d b"])
    outcome = make_vocabulary(workspace, min_count=1)
    assert outcome.vocabulary.words == ("a", "b")
    assert {split: (c.unknown, c.tokens) for split, c in outcome.coverage.items()} == {
        "train": (0, 3),
        "val": (3, 4),
        "test": (2, 3),
    }
    assert "val: 3 of 4 tokens are unknown (75.00%)" in str(outcome)


def test_captions_that_are_cut_are_counted(tmp_path: Path):
    workspace = workspace_of(tmp_path, train=["a b c", "a b", "a"], val=["a"])
    outcome = make_vocabulary(workspace, min_count=1, max_length=2)
    assert (outcome.coverage["train"].cut, outcome.coverage["train"].captions) == (1, 3)
    assert "1 of 3 captions have more than 2 words (33.33%)" in str(outcome)
    assert Vocabulary.load(workspace.vocabulary).max_length == 2
    assert outcome.vocabulary.words == ("a", "b", "c"), "captions are counted before they are cut"


def test_the_manifests_defaults_hold_where_nothing_is_said(tmp_path: Path):
    workspace = workspace_of(tmp_path, train=["six five"] * 5 + ["six"])
    vocabulary = make_vocabulary(workspace).vocabulary
    assert (vocabulary.words, vocabulary.min_count, vocabulary.max_length) == (("six",), 6, 16)


def test_a_vocabulary_comes_back_from_its_file(tmp_path: Path):
    workspace = workspace_of(tmp_path, train=['ein "hübsches" 猫 \\ \u2028', "ein"])
    made = make_vocabulary(workspace, min_count=1).vocabulary
    loaded = load_vocabulary(workspace)
    assert loaded == made
    assert loaded.fingerprint == made.fingerprint
    record = json.loads(workspace.vocabulary.read_text(encoding="utf-8"))
    assert record["words"][0] == "ein"
    assert record["counts"][0] == 2


def test_a_second_run_changes_nothing_and_says_so(tmp_path: Path):
    workspace = workspace_of(tmp_path, train=["a b"])
    assert make_vocabulary(workspace, min_count=1).changed
    before = (workspace.vocabulary.read_bytes(), workspace.vocabulary.stat().st_mtime_ns)
    outcome = make_vocabulary(workspace, min_count=1)
    assert not outcome.changed
    assert "nothing has changed" in str(outcome)
    assert (workspace.vocabulary.read_bytes(), workspace.vocabulary.stat().st_mtime_ns) == before


WORDS = st.lists(
    st.text(min_size=1, max_size=5).filter(lambda word: word not in MARKS), unique=True
)


@given(WORDS, st.data())
def test_known_words_survive_encoding_and_decoding(words: list[str], data):
    vocabulary = WordVocabulary(words)
    tokens = data.draw(st.lists(st.sampled_from(words))) if words else []
    ids = vocabulary.encode(tokens)
    padded = [vocabulary.bos, *ids, vocabulary.eos, vocabulary.pad, *ids]
    assert vocabulary.decode(padded) == tokens
    assert all(len(MARKS) <= number < vocabulary.size for number in ids)


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), min_size=1), st.integers(1, 4))
def test_counting_agrees_with_a_plain_count(texts: list[list[str]], min_count: int):
    captions = [CaptionRecord("x", "x", "", tokens) for tokens in texts]
    counts = Counter(token for tokens in texts for token in tokens)
    frequent = {word: count for word, count in counts.items() if count >= min_count}
    if not frequent:
        with pytest.raises(InputError):
            count_words(captions, min_count=min_count, max_length=16)
        return
    vocabulary = count_words(captions, min_count=min_count, max_length=16)
    assert dict(zip(vocabulary.words, vocabulary.counts, strict=True)) == frequent
    order = list(zip([-count for count in vocabulary.counts], vocabulary.words, strict=True))
    assert order == sorted(order)


def test_unknown_words_are_decoded_as_such():
    vocabulary = WordVocabulary(["a"])
    assert vocabulary.decode([1, 4, 3, 2, 4]) == ["a", "<unk>"]


def test_ids_of_another_vocabulary_are_refused():
    for number in (5, -1):
        with pytest.raises(MismatchError, match=f"id {number} is not in a vocabulary of 5"):
            WordVocabulary(["a"]).decode([number])


def test_a_mark_in_a_caption_is_no_word():
    vocabulary = count_words(captions_of("<pad> a <unk> <eos>"), min_count=1, max_length=16)
    assert vocabulary.words == ("a",)
    assert vocabulary.encode(["<pad>", "<eos>"]) == [3, 3]


@pytest.mark.parametrize("words", [["a", "a"], ["a", "<eos>"]])
def test_a_vocabulary_of_ambiguous_words_is_refused(words: list[str]):
    with pytest.raises(InputError, match="twice, or a mark"):
        WordVocabulary(words)


def test_the_fingerprint_is_of_what_ids_mean_alone():
    one = WordVocabulary(["a", "b"], [2, 1], min_count=1, dataset="x")
    other = WordVocabulary(["a", "b"], [9, 8], min_count=5, dataset="y")
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != WordVocabulary(["b", "a"]).fingerprint


def test_a_minimum_that_no_word_reaches_is_refused_and_nothing_written(tmp_path: Path):
    workspace = workspace_of(tmp_path, train=["a a b"], val=["c"])
    with pytest.raises(InputError, match=r"no word is seen 3 times .* one 2 times\n.*--min-count"):
        make_vocabulary(workspace, min_count=3)
    assert not workspace.vocabulary.exists()
    empty = workspace_of(tmp_path / "empty", val=["c c c"])
    with pytest.raises(InputError, match="there are none"):
        make_vocabulary(empty, min_count=1)


def test_before_splits_the_missing_command_is_named(tmp_path: Path):
    (tmp_path / "x.jpg").touch()
    workspace = initialise(tmp_path / "work", images=tmp_path)
    with pytest.raises(MissingError, match="prep splits"):
        make_vocabulary(workspace)
    with pytest.raises(MissingError, match="prep vocab"):
        load_vocabulary(workspace)


def test_a_folder_without_captions_has_no_vocabulary(tmp_path: Path):
    (tmp_path / "x.jpg").touch()
    workspace = initialise(tmp_path / "work", images=tmp_path)
    make_splits(workspace)
    with pytest.raises(MissingError, match="images only, and no captions"):
        make_vocabulary(workspace)


def test_the_vocabulary_of_another_dataset_is_refused(tmp_path: Path):
    one = workspace_of(tmp_path / "one", train=["a b"])
    other = workspace_of(tmp_path / "other", train=["c d"])
    make_vocabulary(one, min_count=1)
    other.vocabulary.write_bytes(one.vocabulary.read_bytes())
    with pytest.raises(MismatchError, match=r"of another dataset.*\n.*prep vocab"):
        load_vocabulary(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"<unk>"', '"<oov>"'),
        lambda text: text.replace('"counts": [\n', '"counts": [\n7,\n'),
        lambda text: text.replace('"words": [\n"a"', '"words": [\n3'),
        lambda text: text.replace('"words": [\n"a"', '"words": [\n"b"'),
        lambda text: text.replace('"min_count"', '"format"'),
        lambda text: text.replace('"min_count": 1', '"min_count": "one"'),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, change):
    workspace = workspace_of(tmp_path, train=["a a b"])
    make_vocabulary(workspace, min_count=1)
    text = workspace.vocabulary.read_text(encoding="utf-8")
    assert change(text) != text
    workspace.vocabulary.write_text(change(text), encoding="utf-8")
    with pytest.raises(StorageError, match="prep vocab"):
        load_vocabulary(workspace)


def test_the_real_sample_has_the_words_that_a_plain_count_finds(shared_data: Path, tmp_path: Path):
    folder = shared_data / "coco_sample"
    file = folder / "karpathy.json"
    workspace = initialise(tmp_path / "work", images=folder / "images", captions=[file])
    make_splits(workspace)
    counts = Counter(
        token
        for image in json.loads(file.read_text())["images"]
        if image["split"] in ("train", "restval")
        for sentence in image["sentences"]
        for token in sentence["tokens"]
    )
    expected = {word for word, count in counts.items() if count > 5}
    vocabulary = make_vocabulary(workspace).vocabulary
    assert set(vocabulary.words) == expected
