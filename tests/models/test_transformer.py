from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformer_loop as loop
from comparing import assert_same
from samples import captions, regions, tiny

from regionprep.models.attention import DotAttention, ZodiacAttention
from regionprep.models.blocks import sinusoids


def count(**arguments):
    with torch.device("meta"):
        model = tiny(
            encoder_layers=6,
            decoder_layers=6,
            width=512,
            heads=8,
            feed_forward=2048,
            feature_width=768,
            vocabulary_size=9488,
            **arguments,
        )
    return sum(weight.numel() for weight in model.parameters())


def test_parameters_are_as_counted_by_hand():
    attention, feed_forward = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512
    encoder = 6 * (attention + feed_forward + 2 * 1024)
    decoder = 6 * (2 * attention + feed_forward + 3 * 1024)
    ends = 2 * 1024 + 768 * 512 + 512 + 9488 * 512 + 9488 * 513
    assert count() == encoder + decoder + ends == 54_259_472


def test_zodiac_adds_eighteen_projections():
    assert count(attention="zodiac") - count() == 18 * (512 * 512 + 512) == 4_727_808
    assert count(attention={"name": "zodiac", "gate": "off"}) == count()


def test_attention_is_chosen_for_each_place():
    model = tiny(attention="zodiac", decoder_attention="dot")
    assert isinstance(model.encoder.layers[0].attention, ZodiacAttention)
    assert isinstance(model.decoder[0].attention, DotAttention)
    assert isinstance(model.decoder[0].connection.attention, ZodiacAttention)


def test_zodiac_pools_whole_maps_in_the_encoder_and_the_past_in_the_decoder():
    model = tiny(attention="zodiac")
    assert model.encoder.layers[0].attention.pool == "head"
    assert model.decoder[0].attention.pool == "causal"
    assert model.decoder[0].connection.attention.pool == "causal"
    assert (
        tiny(attention={"name": "zodiac", "pool": "sample"}).decoder[0].attention.pool == "sample"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [("relu", torch.nn.ReLU), ("gelu", torch.nn.GELU), ("none", torch.nn.Identity)],
)
def test_feed_forward_networks_have_the_chosen_activation(name, kind):
    model = tiny(feed_forward_activation=name)
    assert isinstance(model.encoder.layers[0].feed_forward[1], kind)
    assert isinstance(model.decoder[1].feed_forward[1], kind)


def test_feed_forward_networks_without_activation_are_linear():
    network = tiny(feed_forward_activation="none").encoder.layers[0].feed_forward
    x, y = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    torch.testing.assert_close(
        network(x + y) - network(y), network(x) - network(torch.zeros_like(x))
    )


def test_zodiac_has_a_dropout_of_its_own():
    model = tiny(attention="zodiac", dropout=0.1)
    assert model.encoder.layers[0].attention.dropout.p == 0.2
    assert tiny(dropout=0.1).encoder.layers[0].attention.dropout == 0.1


def test_regions_have_no_order():
    model, batch, tokens = tiny().eval(), regions([4, 4]), captions(2, 2, 5)
    shuffled = regions([4, 4])
    shuffled.features.copy_(batch.features[:, [2, 0, 3, 1]])
    torch.testing.assert_close(model(shuffled, tokens), model(batch, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("norm", "ends"), [("first", True), ("last", False)])
def test_norm_first_ends_each_stack_with_a_norm(norm, ends):
    model = tiny(norm=norm)
    assert isinstance(model.encoder.end, torch.nn.LayerNorm) is ends
    memory = model.encode(regions([3, 4]))
    assert len(memory.layers) == 2
    torch.testing.assert_close(memory.last.mean(-1), torch.zeros(2, 4), atol=1e-5, rtol=0)


def test_positions_are_the_papers():
    table = sinusoids(20, 6)
    assert table[7, 2].item() == pytest.approx(math.sin(7 / 10000 ** (2 / 6)), abs=1e-6)
    assert table[7, 3].item() == pytest.approx(math.cos(7 / 10000 ** (2 / 6)), abs=1e-6)
    assert sinusoids(3, 5).shape == (3, 5)


def test_positions_are_no_part_of_the_weights():
    assert "positions" not in tiny().state_dict()


@pytest.mark.parametrize("norm", ["first", "last"])
def test_it_is_the_paper_s_equations(norm):
    model = tiny(encoder_layers=2, decoder_layers=2, norm=norm).double()
    batch, tokens = regions([3, 1]), captions(2, 1, 4)
    batch = dataclasses.replace(batch, features=batch.features.double().requires_grad_())
    for image, count in enumerate([3, 1]):
        said = [token for token in tokens[image, 0].tolist() if token]
        slow = loop.logits(model, batch.features[image, :count], said)
        assert_same(model, [batch.features], model(batch, tokens)[image, 0, : len(said)], slow)
