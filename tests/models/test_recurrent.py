from __future__ import annotations

import itertools
from functools import partial

import pytest
import recurrent_loop as loop
import torch
from samples import GRID, SPECIAL, captions, feature_maps, regions

from regionprep import models
from regionprep.errors import InputError
from regionprep.models import Regions, show_attend_tell
from regionprep.models.recurrent import AdditiveAttention, RecurrentState
from regionprep.models.show_attend_tell import half_and_half, learning_rule, sampled
from regionprep.training.losses import cross_entropy

LOOPS = {
    "show_attend_tell": loop.show_attend_tell,
    "show_and_tell": loop.show_and_tell,
    "up_down": loop.up_down,
}
WIDTHS = {"word_width": 3, "width": 4, "dropout": 0.0}
PAD, BOS, EOS = SPECIAL["pad"], SPECIAL["bos"], SPECIAL["eos"]
criterion = partial(cross_entropy, pad=PAD)


def build(captioner, *, seed=0, **arguments):
    torch.manual_seed(seed)
    shape = {"feature_width": 6, "vocabulary_size": 11, "max_length": 5, "grid": GRID, **SPECIAL}
    sizes = WIDTHS | ({} if captioner == "show_and_tell" else {"attention_width": 5})
    model = models.build(captioner, **{**shape, **sizes, **arguments}).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.7)
    return model


def as_double(batch):
    features = batch.features.double().requires_grad_()
    return Regions(features, batch.mask, batch.boxes.double(), batch.sizes.double(), batch.grid)


def images(captioner, counts):
    return as_double(feature_maps(counts) if captioner == "show_attend_tell" else regions(counts))


def real_regions(batch, image):
    return [batch.features[image, i] for i in range(batch.mask.shape[1]) if batch.mask[image, i]]


def following(tokens):
    """Return the targets of captions: the words after each, the end, padding."""
    ended = torch.cat([tokens, torch.full_like(tokens[..., :1], PAD)], -1)
    last = (ended != PAD).sum(-1, keepdim=True)
    return ended.scatter(-1, last, EOS)[..., 1:]


def assert_same(model, batch, fast, slow):
    torch.testing.assert_close(fast, slow)
    direction = torch.randn_like(fast)
    wanted = [batch.features, *model.parameters()]
    for got, expected in zip(
        torch.autograd.grad((fast * direction).sum(), wanted, materialize_grads=True),
        torch.autograd.grad((slow * direction).sum(), wanted, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize(
    ("captioner", "options"),
    [
        ("show_attend_tell", {}),
        ("show_attend_tell", {"selector": False}),
        ("show_and_tell", {}),
        ("up_down", {}),
    ],
)
def test_captions_are_read_as_the_equations_say(captioner, options, length):
    model = build(captioner, **options)
    batch, tokens = images(captioner, [3, 1, 0]), captions(3, 2, 4)[..., : length + 1]
    slow = [
        LOOPS[captioner](model, real_regions(batch, image), caption.tolist()).logits
        for image in range(3)
        for caption in tokens[image]
    ]
    assert_same(model, batch, model(batch, tokens), torch.stack(slow).unflatten(0, (3, 2)))


def test_masked_regions_get_no_weight_and_the_others_all():
    torch.manual_seed(0)
    attention = AdditiveAttention(feature_width=6, hidden_width=4, width=5)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    keys = attention.key(torch.randn(2, 3, 6))
    weights, log_weights = attention(keys, torch.randn(4, 4), mask)
    assert weights.unflatten(0, (2, 2))[:, :, 2].eq(0).all() and weights[2:].eq(0).all()
    torch.testing.assert_close(weights[:2].sum(-1), torch.ones(2))
    torch.testing.assert_close(weights[:2, :2].log(), log_weights[:2, :2])
    assert log_weights[weights == 0].eq(0).all()


def test_reordering_moves_rows_and_keeps_the_images():
    state = RecurrentState("images", (torch.arange(4), torch.arange(4) * 10))
    moved = state.reorder(torch.tensor([1, 1, 3, 2]))
    assert moved.memory == "images"
    assert [row.tolist() for row in moved.rows] == [[1, 1, 3, 2], [10, 10, 30, 20]]


def with_a_missing_caption(tokens):
    """Return captions of which the last is missing, as batches pad them, and their targets."""
    tokens, targets = tokens.clone(), following(tokens)
    tokens[-1, -1, 1:] = PAD
    targets[-1, -1] = PAD
    return tokens, targets


def test_soft_loss_is_the_likelihood_and_the_penalty_over_real_steps():
    model = build("show_attend_tell", penalty=0.7)
    batch = images("show_attend_tell", [1, 0, 1])
    tokens, targets = with_a_missing_caption(captions(3, 2, 4))
    total = torch.zeros((), dtype=torch.float64)
    for image, number in itertools.product(range(3), range(2)):
        places, words = real_regions(batch, image), targets[image, number].tolist()
        words = [word for word in words if word != PAD]
        if not words:
            continue
        reading = loop.show_attend_tell(model, places, tokens[image, number].tolist())
        total = total - loop.log_p(reading, words)
        total = total + 0.7 * loop.penalty(reading.weights, len(words))
    slow = total / (targets != PAD).sum()
    assert_same(model, batch, model.loss(batch, tokens, targets, in_double), slow)


def in_double(logits, targets):
    """Return the cross-entropy, which the recipes' criterion takes in float32."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 2), targets.flatten(), ignore_index=PAD
    )


def test_label_smoothing_reaches_the_likelihood():
    model = build("show_attend_tell")
    batch, tokens = images("show_attend_tell", [1, 1]), captions(2, 2, 4)
    smooth = partial(cross_entropy, pad=PAD, label_smoothing=0.2)
    targets, logits = following(tokens), model(batch, tokens)
    torch.testing.assert_close(
        model.loss(batch, tokens, targets, smooth) - smooth(logits, targets),
        model.loss(batch, tokens, targets, criterion) - criterion(logits, targets),
    )


CELLS, STEPS = 3, 3


def tiny_hard_problem():
    """Return a hard model, its one image of three cells, and one caption of three steps."""
    model = build("show_attend_tell", attention="hard", grid=(1, CELLS))
    batch = as_double(regions([CELLS]))
    tokens = torch.tensor([[BOS, 4, 7]])
    return model, batch, tokens, [4, 7, EOS]


def gradient(model, value):
    found = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
    return [one.clone() for one in found]


@pytest.mark.parametrize("baseline", [0.0, -1.7])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
def test_hard_gradient_is_in_the_mean_that_of_the_bound_over_all_paths(baseline, entropy_weight):
    """Eq. 3.5 by going through all 27 paths, against eq. 3.7 in the mean over the same paths."""
    model, batch, tokens, targets = tiny_hard_problem()
    places = real_regions(batch, 0)
    bound = torch.zeros((), dtype=torch.float64)
    estimate = [torch.zeros_like(weight) for weight in model.parameters()]
    for path in itertools.product(range(CELLS), repeat=STEPS):
        reading = loop.show_attend_tell(model, places, tokens[0].tolist(), list(path))
        p = torch.stack([reading.weights[t][i] for t, i in enumerate(path)]).prod()
        bound = bound + p * loop.log_p(reading, targets)
        # The rule takes H's gradient along a path, not that of the path's probability with it.
        bound = bound + entropy_weight * p.detach() * loop.entropy(reading.weights, STEPS)
        chosen = iter(torch.eye(CELLS, dtype=torch.float64)[list(path)])
        words = model.embed(tokens)
        read, glimpses, _ = model.look(
            words, model.start(model.encode(batch), 1), lambda _, chosen=chosen: next(chosen)[None]
        )
        log_p = model.predict(words, read).log_softmax(-1)[0, range(STEPS), targets].sum()[None]
        added = learning_rule(
            log_p,
            glimpses,
            torch.ones(1, STEPS, dtype=torch.bool),
            baseline=baseline,
            reward_weight=1.0,
            entropy_weight=entropy_weight,
        )
        for total, one in zip(estimate, gradient(model, (log_p + added).sum()), strict=True):
            total += p.item() * one
    for got, expected in zip(estimate, gradient(model, bound), strict=True):
        torch.testing.assert_close(got, expected)


def test_hard_loss_is_the_learning_rule_with_its_weights_over_words():
    """Where all cells are the same the path does not matter, and the reward adds no value."""
    model = build("show_attend_tell", attention="hard", reward_weight=0.5, entropy_weight=0.3)
    model.train()
    batch = images("show_attend_tell", [1, 0, 1])
    tokens, targets = with_a_missing_caption(captions(3, 2, 4))
    with torch.no_grad():
        batch.features[:, 1:] = batch.features[:, :1]
    total = torch.zeros((), dtype=torch.float64)
    for image, number in itertools.product(range(3), range(2)):
        words = [word for word in targets[image, number].tolist() if word != PAD]
        reading = loop.show_attend_tell(
            model, real_regions(batch, image), tokens[image, number].tolist()
        )
        total = total - loop.log_p(reading, words)
        total = total - 0.3 * loop.entropy(reading.weights, len(words))
    slow = total / (targets != PAD).sum()
    torch.testing.assert_close(model.loss(batch, tokens, targets, in_double), slow)


def test_hard_loss_has_the_gradient_of_its_rule_along_the_paths_it_drew(monkeypatch):
    weights = {"reward_weight": 0.3, "entropy_weight": 0.2}
    model = build("show_attend_tell", attention="hard", grid=(1, CELLS), **weights)
    model.baseline.fill_(-1.7)
    batch, tokens = as_double(regions([CELLS])), torch.tensor([[BOS, 4, 7]])
    targets = torch.tensor([4, 7, EOS])

    def path():
        chosen = iter(torch.eye(CELLS, dtype=torch.float64)[[2, 0, 1]])
        return lambda _: next(chosen)[None]

    monkeypatch.setattr(show_attend_tell, "half_and_half", lambda *_: path())
    words = model.embed(tokens)
    read, glimpses, _ = model.look(words, model.start(model.encode(batch), 1), path())
    log_p = model.predict(words, read).log_softmax(-1)[0, range(STEPS), targets].sum()[None]
    real = torch.ones(1, STEPS, dtype=torch.bool)
    added = learning_rule(log_p, glimpses, real, baseline=-1.7, **weights)
    expected = gradient(model, -(log_p + added).sum() / STEPS)
    got = gradient(model, model.loss(batch, tokens[None], targets[None, None], in_double))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_reward_is_what_exceeds_the_baseline_and_carries_no_gradient():
    model, batch, tokens, _ = tiny_hard_problem()
    words = model.embed(tokens)
    torch.manual_seed(0)
    _, glimpses, _ = model.look(words, model.start(model.encode(batch), 1), sampled)
    log_p = torch.tensor([-4.0], dtype=torch.float64, requires_grad=True)
    real = torch.tensor([[True, True, False]])
    rule = partial(learning_rule, log_p, glimpses, real, entropy_weight=0.0)
    value = rule(baseline=-1.5, reward_weight=0.2).sum()
    [of_reward] = torch.autograd.grad(value, log_p, retain_graph=True, materialize_grads=True)
    assert value == 0 and of_reward == 0
    log_p_places = (glimpses.selected * glimpses.weights).sum(-1).log()[0, :2].sum()
    for got, one in zip(gradient_of(model, value), gradient_of(model, log_p_places), strict=True):
        torch.testing.assert_close(got, 0.2 * (-4.0 + 1.5) * one)


def gradient_of(model, value):
    return torch.autograd.grad(
        value, list(model.parameters()), retain_graph=True, materialize_grads=True
    )


def test_images_set_to_their_expectation_learn_as_soft_attention_does():
    hard = build("show_attend_tell", attention="hard", expected_rate=1 - 1e-12, entropy_weight=0.0)
    soft = build("show_attend_tell", penalty=0.0)
    soft.load_state_dict(hard.state_dict(), strict=False)
    batch, tokens = images("show_attend_tell", [1, 1]), captions(2, 2, 4)
    one, other = (m.loss(batch, tokens, following(tokens), in_double) for m in (hard, soft))
    torch.testing.assert_close(one, other)
    for got, expected in zip(gradient(hard, one), gradient(soft, other), strict=True):
        torch.testing.assert_close(got, expected)


def test_half_of_the_images_with_all_their_captions_keep_the_expectation():
    torch.manual_seed(0)
    select = half_and_half(2000, 3, 0.5, torch.device("cpu"))
    weights = torch.tensor([0.2, 0.3, 0.5]).expand(6000, 3)
    kept = (select(weights) == weights).all(-1)
    one_hot = select(weights)[~kept]
    assert kept.equal((select(weights) == weights).all(-1)), "the same images at every step"
    assert (one_hot.sort(-1).values == torch.tensor([0.0, 0.0, 1.0])).all()
    by_image = kept.unflatten(0, (2000, 3))
    assert by_image.all(-1).equal(by_image.any(-1))
    assert 0.46 < by_image.float().mean() < 0.54


def test_locations_are_drawn_by_their_weights():
    torch.manual_seed(0)
    drawn = sampled(torch.tensor([[0.1, 0.6, 0.0, 0.3]]).expand(20_000, 4))
    assert (drawn.sum(-1) == 1).all() and drawn[:, 2].eq(0).all()
    torch.testing.assert_close(
        drawn.mean(0), torch.tensor([0.1, 0.6, 0.0, 0.3]), atol=0.015, rtol=0
    )
    assert sampled(torch.zeros(2, 4)).eq(0).all()


def test_the_baseline_is_a_moving_average_of_log_p_a_caption():
    model = build("show_attend_tell", attention="hard", expected_rate=1 - 1e-12)
    batch = images("show_attend_tell", [1, 0, 1])
    tokens, targets = with_a_missing_caption(captions(3, 2, 4))
    log_p = -in_double(model(batch, tokens), targets) * (targets != PAD).sum() / 5
    model.loss(batch, tokens, targets, criterion)
    torch.testing.assert_close(model.baseline, 0.1 * log_p.detach(), atol=1e-4, rtol=1e-5)
    model.loss(batch, tokens, targets, criterion)
    torch.testing.assert_close(model.baseline, 0.19 * log_p.detach(), atol=1e-4, rtol=1e-5)
    model.eval().loss(batch, tokens, targets, criterion)
    torch.testing.assert_close(model.baseline, 0.19 * log_p.detach(), atol=1e-4, rtol=1e-5)
    assert "baseline" in model.state_dict()


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_losses_of_images_without_regions_are_finite_and_all_weights_learn(attention):
    model = build("show_attend_tell", attention=attention)
    tokens = captions(2, 2, 4)
    for counts in ([1, 0], [0, 0]):
        batch = images("show_attend_tell", counts)
        loss = model.loss(batch, tokens, following(tokens), criterion)
        assert loss.isfinite() and all(one.isfinite().all() for one in gradient(model, loss))
    batch = images("show_attend_tell", [1, 1])
    model.loss(batch, tokens, following(tokens), criterion).backward()
    assert [key for key, weight in model.named_parameters() if not weight.grad.any()] == []


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_a_tiny_model_learns_eight_images_by_heart_from_its_own_loss(attention):
    sizes = {"word_width": 16, "width": 32, "attention_width": 16}
    torch.manual_seed(0)
    model = models.build(
        "show_attend_tell",
        **{"feature_width": 6, "vocabulary_size": 11, "max_length": 5, "grid": GRID, **SPECIAL},
        **sizes,
        attention=attention,
        dropout=0.0,
    )
    batch = feature_maps([1] * 8)
    words = torch.randint(3, 11, (8, 1, 4), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.full((8, 1, 1), BOS), words], -1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(80):
        optimiser.zero_grad()
        model.loss(batch, tokens, following(tokens), criterion).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    written = [best[0].tokens for best in models.beam_search(model.eval(), batch, beam_size=3)]
    assert written == words[:, 0].tolist()


@torch.no_grad()
def test_sampled_decoding_looks_at_one_cell_a_word():
    model = build("show_attend_tell", attention="hard", decoding="sampled").eval()
    batch = images("show_attend_tell", [1])
    start = model.start(model.encode(batch), 200)
    logits, _ = model.step(torch.full((200,), BOS), start)
    cells = [
        loop.show_attend_tell(model, real_regions(batch, 0), [BOS], [place]).logits[0]
        for place in range(6)
    ]
    nearest = (logits.unsqueeze(1) - torch.stack(cells)).abs().amax(-1)
    assert (nearest.min(-1).values < 1e-9).all()
    assert len(nearest.argmin(-1).unique()) > 1
    found = models.beam_search(model, batch, beam_size=2)
    assert len(found[0]) == 2
    assert torch.equal(model(batch, captions(1, 2, 3)), model(batch, captions(1, 2, 3)))


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_show_attend_tell_refuses_region_sets_and_names_the_command(attention):
    with pytest.raises(InputError) as error:
        build("show_attend_tell", attention=attention, grid=None)
    assert "captioner 'show_attend_tell' needs a feature map" in str(error.value)
    assert "prep extract --backbone NAME --grid" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "firm"}, "argument 'attention' of captioner 'show_attend_tell'"),
        ({"penalty": -1.0}, "argument 'penalty' of captioner 'show_attend_tell'"),
        ({"expected_rate": 1.5}, "argument 'expected_rate' of captioner 'show_attend_tell'"),
        ({"decoding": "sample"}, "argument 'decoding' of captioner 'show_attend_tell'"),
        ({"selectr": True}, "Did you mean 'selector'?"),
    ],
)
def test_wrong_arguments_say_which(changes, message):
    with pytest.raises(InputError) as error:
        build("show_attend_tell", **changes)
    assert message in str(error.value)
