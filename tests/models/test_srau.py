from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from comparing import random
from samples import captions, regions, tiny

from regionprep.errors import InputError
from regionprep.models import connections
from regionprep.models.attention import DotAttention
from regionprep.models.connections import CONNECTIONS, Memory

IMAGES, CAPTIONS, WORDS, REGIONS, WIDTH, LAYERS = 2, 2, 3, 4, 4, 3
NAMES = ["srau", "srau_normalized", "srau_released"]
MESHED = [("srau", True), ("srau", False), ("srau_normalized", False), ("srau_released", True)]


def connection(name, *, norm_first=False, seed=0, dropout=0.0, **options):
    torch.manual_seed(seed)
    return connections.build(
        name,
        attention=partial(DotAttention, width=WIDTH, heads=2),
        width=WIDTH,
        dropout=dropout,
        norm_first=norm_first,
        layers=LAYERS,
        options=options,
    ).double()


def inputs(spread=2.0):
    hidden = (spread * random(IMAGES * CAPTIONS, WORDS, WIDTH)).detach().requires_grad_()
    layers = tuple(random(IMAGES, REGIONS, WIDTH) for _ in range(LAYERS))
    mask = torch.tensor([[True, True, True, False], [True] * REGIONS])
    return hidden, layers, mask


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def linear(module, x):
    """Return W x + b, sum by sum."""
    return [
        sum(module.weight[i, j] * x[j] for j in range(len(x))) + module.bias[i]
        for i in range(len(module.bias))
    ]


def enc_dec_attn(module, hidden, memory, seen):
    """Return eq. 2 for one word and one image: two heads of width 2."""
    query = linear(module.query, hidden)
    rows = [row for row, is_seen in zip(memory, seen, strict=True) if is_seen]
    keys, values = ([linear(which, row) for row in rows] for which in (module.key, module.value))
    together = []
    for head in range(2):
        part = [2 * head, 2 * head + 1]
        scores = [sum(query[j] * key[j] for j in part) / math.sqrt(2) for key in keys]
        total = sum(torch.exp(score) for score in scores)
        together += [
            sum(torch.exp(s) / total * value[j] for s, value in zip(scores, values, strict=True))
            for j in part
        ]
    return linear(module.output, together)


def gates(name, module, state, found, layer, tau):
    """Return the visual and the language gate of each value of a word."""
    visual, language = [], []
    weighed = linear(module.gates[layer], [*state, *found]) if name == "srau_released" else state
    for score in weighed:
        rising, falling = sigmoid(score), 1 - sigmoid(score)
        rising = rising if rising.item() > tau else torch.zeros_like(rising)
        falling = falling if falling.item() > tau else torch.zeros_like(falling)
        if name == "srau_normalized":
            rising, falling = rising / (rising + falling), falling / (rising + falling)
        if name == "srau_released":
            rising, falling = falling, rising
        visual.append(rising)
        language.append(falling)
    return visual, language


def slow(name, module, hidden, layers, mask, *, tau, meshed):
    """Return eq. 4 with the gates of eq. 5, eq. 6 or the release, value by value."""
    rows = []
    looked_at = range(len(layers)) if meshed else [len(layers) - 1]
    for row in range(len(hidden)):
        image = row // CAPTIONS
        for word in range(WORDS):
            state = list(hidden[row, word])
            total = [torch.zeros((), dtype=torch.float64)] * WIDTH
            for layer in looked_at:
                found = enc_dec_attn(module.attention, state, layers[layer][image], mask[image])
                visual, language = gates(name, module, state, found, layer, tau)
                total = [
                    total[j] + visual[j] * found[j] + language[j] * state[j] for j in range(WIDTH)
                ]
            rows.append(torch.stack([value / math.sqrt(len(looked_at)) for value in total]))
    return torch.stack(rows).reshape(hidden.shape)


@pytest.mark.parametrize(("name", "meshed"), MESHED)
@pytest.mark.parametrize("tau", [0.0, 0.2, 0.49])
def test_output_and_gradients_are_the_equations(name, meshed, tau):
    options = {} if name == "srau_released" else {"meshed": meshed}
    module = connection(name, tau=tau, **options)
    hidden, layers, mask = inputs()
    fast = module(hidden, Memory(layers, mask))
    expected = slow(name, module, hidden, layers, mask, tau=tau, meshed=meshed)
    torch.testing.assert_close(fast, expected)
    direction = torch.randn_like(fast)
    wanted = [hidden, *layers, *module.parameters()]
    for got, right in zip(
        torch.autograd.grad((fast * direction).sum(), wanted, materialize_grads=True),
        torch.autograd.grad((expected * direction).sum(), wanted, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, right)


def pair(module, scores):
    """Return the gates of scores given as one word, and their gradients by them."""
    hidden = torch.tensor(scores, dtype=torch.float64).reshape(1, 1, -1).requires_grad_()
    both = module.weigh(hidden, torch.zeros_like(hidden), 0)
    slopes = [torch.autograd.grad(gate.sum(), hidden, retain_graph=True)[0] for gate in both]
    return [gate.flatten().tolist() for gate in both], [it.flatten().tolist() for it in slopes]


def test_a_closed_gate_has_no_gradient_and_its_partner_keeps_its_own():
    scores = [2.0, -2.0, 0.5, 0.0]
    (visual, language), (rise, fall) = pair(connection("srau", tau=0.2), scores)
    s = [1 / (1 + math.exp(-score)) for score in scores]
    slope = [value * (1 - value) for value in s]
    assert visual == pytest.approx([s[0], 0, s[2], 0.5])
    assert language == pytest.approx([0, 1 - s[1], 1 - s[2], 0.5])
    assert rise == pytest.approx([slope[0], 0, slope[2], slope[3]])
    assert fall == pytest.approx([0, -slope[1], -slope[2], -slope[3]])


def test_a_gate_of_exactly_tau_is_closed():
    exactly = 1 / (1 + math.exp(1.0))
    (visual, language), (rise, _) = pair(connection("srau", tau=exactly), [-1.0])
    assert torch.tensor(-1.0, dtype=torch.float64).sigmoid().item() == exactly
    assert (visual, rise) == ([0], [0]) and language == pytest.approx([1 - exactly])


def test_gates_sum_to_one_where_tau_is_0_or_they_are_normalized():
    scores = [-40.0, -3.0, -1.4, 0.0, 1.4, 3.0, 40.0]
    for module in (connection("srau", tau=0.0), connection("srau_normalized", tau=0.2)):
        visual, language = pair(module, scores)[0]
        assert [v + w for v, w in zip(visual, language, strict=True)] == pytest.approx([1] * 7)
    assert pair(connection("srau", tau=0.2), scores)[0][1][-1] == 0


@pytest.mark.parametrize("score", [-1e3, -1e-12, 0.0, 1e-12, 1e3])
def test_normalized_gates_are_finite_up_to_the_highest_tau(score):
    values, slopes = pair(connection("srau_normalized", tau=math.nextafter(0.5, 0)), [score])
    assert all(map(math.isfinite, [x for both in (*values, *slopes) for x in both]))
    assert sum(x for both in values for x in both) == pytest.approx(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tau", [-0.1, 0.5, 0.9, math.nan])
def test_tau_that_can_close_both_gates_is_refused(name, tau):
    with pytest.raises(InputError, match=r"at least 0 and below 0\.5") as error:
        tiny(connection={"name": name, "tau": tau})
    assert f"a tau of {tau}" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_gates_are_kept_on_request_only(name):
    module = connection(name, tau=0.2)
    hidden, layers, mask = inputs()
    module(hidden, Memory(layers, mask))
    assert module.kept_gates is None
    module.keep_gates = True
    output, kept = module(hidden, Memory(layers, mask)), module.kept_gates
    count = LAYERS if name == "srau_released" else 1
    assert kept.visual.shape == kept.language.shape == (count, IMAGES * CAPTIONS, WORDS, WIDTH)
    assert output.requires_grad and not kept.visual.requires_grad
    if name == "srau":
        torch.testing.assert_close(kept.visual[0] > 0, hidden.sigmoid() > 0.2)
        torch.testing.assert_close(kept.language[0] > 0, 1 - hidden.sigmoid() > 0.2)
    module(hidden[:, :1], Memory(layers, mask))
    assert module.kept_gates.visual.shape[2] == 1


def test_norm_first_looks_with_a_norm_and_gates_without():
    module = connection("srau", norm_first=True, tau=0.2)
    hidden, layers, mask = inputs()
    with torch.no_grad():
        module.norm.weight.copy_(torch.tensor([1.0, 2.0, 0.5, 1.0]))
    query = module.norm(hidden)
    found = module.attention(query, layers[-1], layers[-1], mask=mask)
    visual, language = connections.srau.srau(hidden, 0.2)
    torch.testing.assert_close(
        module(hidden, Memory(layers, mask)), visual * found + language * hidden
    )


def test_dropout_falls_on_what_was_found_and_not_on_the_words():
    module = connection("srau", dropout=0.5, tau=0.0)
    hidden, layers, mask = inputs()
    with torch.no_grad():
        for weight in module.attention.output.parameters():
            weight.zero_()
    hidden = hidden.detach()
    torch.testing.assert_close(
        module(hidden, Memory(layers, mask)), (1 - hidden.sigmoid()) * hidden
    )


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_any_decoder_takes_it_and_steps_with_its_caches(name):
    model, batch, tokens = tiny(connection=name).eval(), regions([3, 0]), captions(2, 1, 4)
    words = torch.where(tokens == 0, torch.tensor(5), tokens)
    state, steps = model.start(model.encode(batch), 1), []
    for column in words.flatten(0, 1).unbind(1):
        logits, state = model.step(column, state)
        steps.append(logits)
    together = torch.stack(steps, 1).unsqueeze(1)
    torch.testing.assert_close(together, model(batch, words), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_get_finite_gradients(name):
    model = tiny(connection=name)
    model(regions([3, 0]), captions(2, 2, 4)).square().mean().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in model.parameters())


def test_names_are_in_the_registry():
    assert set(NAMES) <= set(CONNECTIONS)
