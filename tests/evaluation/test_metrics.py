"""Scores: the field's own scorers on the same tokens, and what must hold for any captions."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionprep.errors import InputError
from regionprep.evaluation import ALL, References, document_frequency, score, table
from regionprep.pipeline.text import tokenize

Captions = dict[str, list[str]]
Corpus = dict[str, list[list[str]]]

WORDS = st.sampled_from(["a", "dog", "cat", "runs", "sits", "on", "the", "mat", "red", "two"])
SENTENCES = st.lists(WORDS, max_size=12)
LONG_SENTENCES = st.lists(WORDS, min_size=4, max_size=12)


@st.composite
def corpora(draw: st.DrawFn, sentences: st.SearchStrategy[list[str]]) -> tuple[Captions, Corpus]:
    """Return candidates and references of one to six images."""
    ids = [f"image-{number}" for number in range(draw(st.integers(1, 6)))]
    references = {name: draw(st.lists(sentences, min_size=1, max_size=4)) for name in ids}
    return {name: draw(sentences) for name in ids}, references


class TestAgainstPycocoevalcap:
    """Every value equals pycocoevalcap's to 1e-6, of the corpus and of each image."""

    @given(corpora(SENTENCES))
    def test_any_tokens(self, corpus: tuple[Captions, Corpus]) -> None:
        check_against_pycocoevalcap(*corpus)

    def test_captions_of_photographs(self, shared_data: Path) -> None:
        file = shared_data / "coco_sample" / "captions.json"
        if not file.is_file():
            pytest.skip(f"no captions at {file}")
        references: Corpus = {}
        for row in json.loads(file.read_text())["annotations"]:
            references.setdefault(str(row["image_id"]), []).append(tokenize(row["caption"]))
        check_against_pycocoevalcap(imitate(references), references)

    def test_a_large_corpus(self) -> None:
        rng = random.Random(0)
        words = [f"w{int(rng.paretovariate(0.7))}" for _ in range(5000)]
        references = {
            str(image): [rng.choices(words, k=rng.randint(5, 20)) for _ in range(5)]
            for image in range(400)
        }
        check_against_pycocoevalcap(imitate(references), references)


def check_against_pycocoevalcap(candidates: Captions, references: Corpus) -> None:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    truths = {name: [" ".join(tokens) for tokens in given] for name, given in references.items()}
    results = {name: [" ".join(candidates[name])] for name in truths}
    expected = {}
    corpus, images = Bleu(4).compute_score(truths, results, verbose=0)
    expected |= {f"bleu_{n + 1}": (corpus[n], images[n]) for n in range(4)}
    expected["rouge_l"] = Rouge().compute_score(truths, results)
    if any(len(tokens) for given in references.values() for tokens in given):
        expected["cider_d"] = Cider().compute_score(truths, results)  # else it divides by zero

    scores = score(candidates, references)
    for metric, (of_corpus, of_images) in expected.items():
        assert scores.corpus[metric] == pytest.approx(of_corpus, abs=1e-6), metric
        ours = [scores.per_image[name][metric] for name in truths]
        assert ours == pytest.approx(list(of_images), abs=1e-6), metric


def imitate(references: Corpus) -> Captions:
    """Return a reference of each image with some words changed, dropped or borrowed."""
    rng = random.Random(1)
    everything = [tokens for own in references.values() for tokens in own]
    candidates = {}
    for name, own in references.items():
        tokens = list(rng.choice(own if rng.random() < 0.7 else everything))
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(tokens))
            tokens[at : at + rng.randint(0, 2)] = [rng.choice(rng.choice(own))]
        candidates[name] = tokens
    return candidates


def cider_by_hand(candidate: Sequence[str], image: str, references: Corpus) -> float:
    """Return CIDEr by equations 1 to 3 of its paper, times 10, as slowly as they read."""

    def grams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
        return Counter(tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))

    def vector(tokens: Sequence[str], n: int) -> dict[tuple[str, ...], float]:
        counted = grams(tokens, n)
        weights = {}
        for gram, count in counted.items():
            images = sum(
                any(gram in grams(other, n) for other in given) for given in references.values()
            )
            frequency = math.log(len(references) / max(1, images))
            weights[gram] = count / counted.total() * frequency  # Eq. 1
        return weights

    def cosine(one: dict[tuple[str, ...], float], two: dict[tuple[str, ...], float]) -> float:
        norms = math.hypot(*one.values()) * math.hypot(*two.values())
        dot = sum(weight * two.get(gram, 0.0) for gram, weight in one.items())
        return dot / norms if norms else 0.0

    total = 0.0
    for n in (1, 2, 3, 4):
        mine = vector(candidate, n)
        of_n = [cosine(mine, vector(tokens, n)) for tokens in references[image]]  # Eq. 2
        total += sum(of_n) / len(of_n) / 4  # Eq. 3
    return 10 * total


@given(corpora(SENTENCES))
def test_cider_is_the_equation_of_its_paper(corpus: tuple[Captions, Corpus]) -> None:
    candidates, references = corpus
    scores = score(candidates, references, ["cider"])
    for name, tokens in candidates.items():
        expected = cider_by_hand(tokens, name, references)
        assert scores.per_image[name]["cider"] == pytest.approx(expected, abs=1e-9)


@given(corpora(LONG_SENTENCES))
def test_a_caption_that_is_a_reference_has_full_bleu_and_rouge(
    corpus: tuple[Captions, Corpus],
) -> None:
    _, references = corpus
    scores = score({name: given[-1] for name, given in references.items()}, references)
    for metric in ("bleu_1", "bleu_2", "bleu_3", "bleu_4", "rouge_l"):
        assert scores.corpus[metric] == pytest.approx(1, abs=1e-6)


@given(corpora(SENTENCES), st.randoms(use_true_random=False))
def test_the_order_of_images_changes_nothing(
    corpus: tuple[Captions, Corpus], rng: random.Random
) -> None:
    candidates, references = corpus
    ids = list(references)
    rng.shuffle(ids)
    again = score({name: candidates[name] for name in ids}, {n: references[n] for n in ids})
    assert again == score(candidates, references)


@given(corpora(SENTENCES), st.randoms(use_true_random=False))
def test_the_order_of_references_changes_nothing(
    corpus: tuple[Captions, Corpus], rng: random.Random
) -> None:
    candidates, references = corpus
    shuffled = {name: rng.sample(given, len(given)) for name, given in references.items()}
    again = score(candidates, shuffled)
    assert again.corpus == pytest.approx(score(candidates, references).corpus, abs=1e-12)


@given(corpora(SENTENCES))
def test_scores_stay_in_their_range(corpus: tuple[Captions, Corpus]) -> None:
    scores = score(*corpus)
    for values in (scores.corpus, *scores.per_image.values()):
        for metric, value in values.items():
            assert 0 <= value <= (10 if "cider" in metric else 1) + 1e-9


@given(corpora(SENTENCES))
def test_all_but_bleu_average_over_images(corpus: tuple[Captions, Corpus]) -> None:
    scores = score(*corpus)
    for metric in ("rouge_l", "cider", "cider_d"):
        values = [row[metric] for row in scores.per_image.values()]
        assert scores.corpus[metric] == pytest.approx(math.fsum(values) / len(values), abs=1e-9)


def test_words_in_no_other_image_weigh_more_in_cider() -> None:
    references = {
        "one": [["a", "dog", "runs"]],
        "two": [["a", "cat", "runs"]],
        "three": [["a", "dog", "sits"]],
    }
    common = score({"one": ["a"], "two": ["a"], "three": ["a"]}, references, ["cider"])
    rare = score({"one": ["dog"], "two": ["cat"], "three": ["dog"]}, references, ["cider"])
    assert common.corpus["cider"] == 0
    assert rare.per_image["two"]["cider"] > rare.per_image["one"]["cider"] > 0


def test_repeating_a_rare_word_pays_in_cider_but_not_in_cider_d() -> None:
    references = {"one": [["a", "dog", "on", "grass"]], "two": [["a", "cat"]], "three": [["a"]]}
    others = {"two": ["a", "cat"], "three": ["a"]}
    plain = score({"one": ["dog", "on", "grass", "dog"], **others}, references)
    clean = score({"one": ["a", "dog", "on", "grass"], **others}, references)
    assert plain.per_image["one"]["cider_d"] < clean.per_image["one"]["cider_d"]


def test_references_made_once_serve_many_calls() -> None:
    references = {"one": [["a", "dog"], ["the", "dog"]], "two": [["a", "red", "cat"]]}
    kept = References.of(references)
    for candidates in ({"one": ["a"], "two": ["cat"]}, {"one": ["dog"], "two": ["a", "red"]}):
        assert score(candidates, kept) == score(candidates, references)


def test_document_frequencies_of_other_captions_can_be_used() -> None:
    references = {"one": [["a", "dog"]]}
    candidates = {"one": ["a", "dog"]}
    assert score(candidates, references).corpus["cider_d"] == 0  # log(1 / 1): every word is common
    train = document_frequency({"x": [["a", "cat"]], "y": [["a", "dog"]], "z": [["the"]]})
    within = score(candidates, references, ["cider_d"], frequency=train)
    # Of 1 to 4-grams, only the first two orders have any n-gram in two words.
    assert within.corpus["cider_d"] == pytest.approx(5)


def test_only_the_metrics_asked_for_come_back_in_their_order() -> None:
    scores = score({"one": ["a"]}, {"one": [["a"]]}, ["rouge_l", "bleu_2"])
    assert list(scores.corpus) == ["rouge_l", "bleu_2"]
    assert list(scores.per_image["one"]) == ["rouge_l", "bleu_2"]


@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ({"one": ["a"], "two": ["a"]}, {"one": [["a"]]}, "1 captioned images have no refer.*'two'"),
        ({"one": ["a"]}, {"one": [["a"]], "two": [["a"]]}, "1 images with references.*'two'"),
        ({}, {"one": [["a"]]}, "no captions to score"),
        ({"one": ["a"]}, {}, "no references"),
        ({"one": ["a"]}, {"one": []}, "1 images have no references: 'one'"),
        ({"one": "a dog"}, {"one": [["a"]]}, "to be lists of tokens.*'one'"),
        ({str(n): ["a"] for n in range(20)}, {"0": [["a"]]}, "'1', '10', .* and 14 more"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    candidates: Captions, references: Corpus, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        score(candidates, references)


def test_a_misspelt_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown metric 'cidre'\. Did you mean 'cider'"):
        score({"one": ["a"]}, {"one": [["a"]]}, ["cidre"])


def test_the_table_prints_what_papers_print() -> None:
    scores = score({"one": ["a", "dog", "runs", "fast"]}, {"one": [["a", "dog", "runs", "fast"]]})
    head, row = table(scores).splitlines()
    assert head.split() == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr", "CIDEr-D"]
    assert row.split() == ["100.0"] * 5 + ["0.0"] * 2
    assert len(head) == len(row)
    named = table({"zodiac": scores, "base": scores}).splitlines()
    assert [line.split()[0] for line in named] == ["BLEU-1", "zodiac", "base"]
    assert set(ALL) == set(scores.corpus)
