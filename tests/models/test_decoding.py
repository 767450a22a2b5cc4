from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import SPECIAL, regions, tiny

from regionprep.errors import InputError, TrainingError
from regionprep.models import Captioner, Regions, Shape, beam_search, greedy

EOS, BOS, PAD = SPECIAL["eos"], SPECIAL["bos"], SPECIAL["pad"]


class Table(Captioner):
    """A captioner whose scores are read from a table: image and last two words -> next word."""

    def __init__(self, words=3, images=1, seed=0, sharpness=1.0):
        super().__init__(Shape(feature_width=1, vocabulary_size=words + 3, max_length=3, **SPECIAL))
        random = torch.Generator().manual_seed(seed)
        size = words + 3
        self.scores = sharpness * torch.randn(images, size, size, size, generator=random)

    def forward(self, regions, tokens):
        raise AssertionError("decoding has no use for it")

    def encode(self, regions):
        return self.scores[regions.features[:, 0, 0].long()]

    def start(self, memory, beams):
        return TableState(
            memory.repeat_interleave(beams, 0), torch.zeros(len(memory) * beams).long()
        )

    def step(self, tokens, state):
        rows = torch.arange(len(tokens))
        return state.scores[rows, state.last, tokens], TableState(state.scores, tokens)

    def log_p(self, image, words):
        """Return the log-probability of a caption with its end."""
        total, before, last = 0.0, 0, BOS
        for word in [*words, EOS]:
            total += float(self.scores[image, before, last].log_softmax(-1)[word])
            before, last = last, word
        return total

    def all(self, image):
        """Return every caption of up to `max_length` words with its score, best first."""
        vocabulary = [word for word in range(self.scores.shape[-1]) if word not in (PAD, BOS, EOS)]
        texts = itertools.chain.from_iterable(
            itertools.product(vocabulary, repeat=length) for length in range(self.max_length + 1)
        )
        return sorted(((self.log_p(image, text), list(text)) for text in texts), reverse=True)


class TableState:
    def __init__(self, scores, last):
        self.scores, self.last = scores, last

    def reorder(self, index):
        return TableState(self.scores[index], self.last[index])


def images(numbers):
    features = torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1, 1)
    mask = torch.ones(len(numbers), 1, dtype=torch.bool)
    return Regions(features, mask, torch.zeros(len(numbers), 1, 4), torch.ones(len(numbers), 2))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), sharpness=st.floats(0.1, 5))
def test_a_wide_beam_finds_what_exhaustive_search_finds(seed, sharpness):
    model = Table(words=3, seed=seed, sharpness=sharpness)
    expected = model.all(0)
    found = beam_search(model, images([0]), beam_size=40)[0]
    assert len(found) == len(expected) == 40
    assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-4)
    assert {tuple(h.tokens) for h in found} == {tuple(words) for _, words in expected}


def test_a_beam_wider_than_all_captions_returns_each_once():
    found = beam_search(Table(words=2), images([0]), beam_size=50)[0]
    texts = [tuple(h.tokens) for h in found]
    assert len(texts) == len(set(texts)) == 1 + 2 + 4 + 8


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), beam_size=st.integers(1, 5))
def test_scores_are_log_probabilities_best_first_and_words_are_words(seed, beam_size):
    model = Table(words=4, seed=seed)
    for hypothesis in (found := beam_search(model, images([0]), beam_size=beam_size)[0]):
        assert hypothesis.score == pytest.approx(model.log_p(0, hypothesis.tokens), abs=1e-4)
        assert len(hypothesis.tokens) <= model.max_length
        assert not {PAD, BOS, EOS} & set(hypothesis.tokens)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)


def test_greedy_takes_the_likeliest_word_at_every_step():
    model = Table(words=4, seed=3)
    words, last, before = [], BOS, 0
    while len(words) < model.max_length:
        scores = model.scores[0, before, last].clone()
        scores[[PAD, BOS]] = -torch.inf
        before, last = last, int(scores.argmax())
        if last == EOS:
            break
        words.append(last)
    (found,) = greedy(model, images([0]))[0]
    assert found.tokens == words
    assert found.score == pytest.approx(model.log_p(0, words), abs=1e-4)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_batch_mates_do_not_change_a_caption(beam_size):
    model = Table(words=4, images=5, sharpness=3.0)
    together = beam_search(model, images([0, 1, 2, 3, 4]), beam_size=beam_size)
    for image, found in enumerate(together):
        assert found == beam_search(model, images([image]), beam_size=beam_size)[0]


def test_a_finished_hypothesis_keeps_its_slot_and_competes_by_score():
    model = Table(words=1)
    word = 3
    log_p = torch.full((6 - 2, 6 - 2, 6 - 2), -20.0)
    model.scores = log_p[None].clone()
    model.scores[0, 0, BOS, [EOS, word]] = torch.tensor([0.6, 0.4]).log()
    model.scores[0, BOS, word, [EOS, word]] = torch.tensor([0.9, 0.1]).log()
    model.scores[0, word, word, EOS] = 0.0
    found = beam_search(model, images([0]), beam_size=2)[0]
    assert [h.tokens for h in found] == [[], [word]]
    assert [h.score for h in found] == pytest.approx([-0.511, -1.022], abs=1e-2)


def test_length_penalty_favours_longer_captions():
    model = Table(words=3, seed=1)
    plain = beam_search(model, images([0]), beam_size=40)[0]
    longer = beam_search(model, images([0]), beam_size=40, length_penalty=2.0)[0]
    ranks = [h.score / (len(h.tokens) + 1) ** 2 for h in longer]
    assert ranks == sorted(ranks, reverse=True)
    assert len(longer[0].tokens) > len(plain[0].tokens)
    assert longer[0].score == pytest.approx(model.log_p(0, longer[0].tokens), abs=1e-4)


def test_forbidden_words_never_come():
    model = Table(words=3, seed=1)
    with_it = beam_search(model, images([0]), beam_size=40)[0]
    assert any(3 in h.tokens for h in with_it)
    without = beam_search(model, images([0]), beam_size=40, forbidden=[3])[0]
    assert without and not any(3 in h.tokens for h in without)


def test_captions_are_cut_at_a_shorter_length():
    model = Table(words=3)
    found = beam_search(model, images([0]), beam_size=40, max_length=1)[0]
    assert sorted(len(h.tokens) for h in found) == [0, 1, 1, 1]


@pytest.mark.parametrize("attention", ["dot", "zodiac"])
def test_captions_of_a_model_score_as_in_training(attention):
    model, batch = tiny(attention=attention).eval(), regions([4, 0, 2])
    for image, found in enumerate(beam_search(model, batch, beam_size=4)):
        for hypothesis in found:
            tokens = torch.tensor([[[BOS, *hypothesis.tokens]]])
            one = Regions(*(part[image, None] for part in vars(batch).values() if part is not None))
            with torch.no_grad():
                log_p = model(one, tokens)[0, 0].log_softmax(-1)
            target = torch.tensor([*hypothesis.tokens, EOS])
            expected = log_p.gather(1, target[:, None]).sum().item()
            assert hypothesis.score == pytest.approx(expected, abs=1e-4)


def test_decoding_does_not_depend_on_the_batch_of_a_model():
    model, batch = tiny(attention="zodiac").eval(), regions([4, 0, 2])
    alone = Regions(
        batch.features[2:, :2], batch.mask[2:, :2], batch.boxes[2:, :2], batch.sizes[2:]
    )
    together, single = beam_search(model, batch)[2], beam_search(model, alone)[0]
    assert [h.tokens for h in together] == [h.tokens for h in single]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="a beam of 0"):
        beam_search(Table(), images([0]), beam_size=0)
    with pytest.raises(InputError, match="captions of up to 4 words, and this model has room for"):
        beam_search(Table(), images([0]), max_length=4)


def test_a_model_that_has_diverged_is_refused():
    model = Table()
    model.scores[0, 0, BOS] = torch.nan
    with pytest.raises(TrainingError, match="not numbers"):
        beam_search(model, images([0]))
