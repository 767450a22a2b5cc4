from __future__ import annotations

import dataclasses
import itertools

import geometry_loop as loop
import hypothesis.strategies as st
import pytest
import torch
from comparing import assert_same, random
from hypothesis import given, settings
from samples import SPECIAL, captions, regions, tiny

from regionprep import manifests, models
from regionprep.errors import InputError
from regionprep.models import attention as attentions
from regionprep.models.attention import (
    AbsoluteGeometryAttention,
    DotAttention,
    GeometryAttention,
    Layout,
    RelationAttention,
)
from regionprep.models.attention.absolute_geometry import absolute_geometry
from regionprep.models.attention.gsa import BIASES, relative_geometry
from regionprep.models.attention.relation import embedding, log_weights

IMAGES, REGIONS, WIDTH = 3, 4, 8
REAL = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * REGIONS])
SUMS = [list(names) for count in (1, 2, 3) for names in itertools.combinations(BIASES, count)]
EVERYONE = [GeometryAttention, RelationAttention, AbsoluteGeometryAttention]


def made(kind, **options):
    torch.manual_seed(0)
    return kind(width=WIDTH, heads=2, **options).double().eval()


def layout(images=IMAGES, count=REGIONS) -> Layout:
    """Return random boxes; two of the first image have the same centre."""
    corner = torch.rand(images, count, 2, dtype=torch.float64) * 50
    size = 5 + torch.rand(images, count, 2, dtype=torch.float64) * 20
    boxes = torch.cat([corner, corner + size], -1)
    if count > 1:
        boxes[0, 1] = boxes[0, 0] + torch.tensor([-2, -1, 2, 1])
    return Layout(boxes, torch.tensor([[80.0, 60.0]] * images, dtype=torch.float64))


def over(module, x, where, real=REAL):
    return module(x, x, x, mask=real, query_mask=real, layout=where)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kinds", SUMS)
def test_gsa_is_the_equations(kinds, signed):
    module = made(GeometryAttention, bias=kinds, signed=signed)
    x, where = random(IMAGES, REGIONS, WIDTH), layout()
    bias = loop.geometric_bias(module, x, where.boxes, kinds, signed=signed)
    slow = loop.attention(module, x, REAL, bias=bias)
    assert_same(module, [x], over(module, x, where), slow, real=REAL)


def test_ng_san_is_the_equations():
    module = made(GeometryAttention, normalize="query")
    x, where = random(IMAGES, REGIONS, WIDTH), layout()
    queries = loop.normalised(loop.heads_of(module, module.query, x), REAL, "instance")
    bias = loop.geometric_bias(module, x, where.boxes, ["query_dependent"])
    slow = loop.attention(module, x, REAL, queries=queries, bias=bias)
    assert_same(module, [x], over(module, x, where), slow, real=REAL)


def test_relation_is_the_equations():
    module, x, where = made(RelationAttention), random(IMAGES, REGIONS, WIDTH), layout()
    slow = loop.attention(module, x, REAL, bias=loop.relation_bias(module, where.boxes))
    assert_same(module, [x], over(module, x, where), slow, real=REAL)


def test_relation_multiplies_attention_by_its_weights():
    """As the paper writes it: the product of both weights over the sum of the products."""
    relations = relative_geometry(layout(1).boxes, margin=1.0)
    weight, bias = torch.randn(2, 64, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    scores = torch.randn(1, 2, REGIONS, REGIONS, dtype=torch.float64)
    multiplied = (embedding(relations) @ weight.T + bias).relu().clamp_min(1e-6)
    product = multiplied.permute(0, 3, 1, 2) * scores.exp()
    added = (scores + log_weights(embedding(relations), weight, bias)).softmax(-1)
    torch.testing.assert_close(added, product / product.sum(-1, keepdim=True))


def test_absolute_geometry_is_added_to_what_is_projected():
    module, x, where = made(AbsoluteGeometryAttention), random(IMAGES, REGIONS, WIDTH), layout()
    added = [
        [loop.absolute(box, size, WIDTH) for box in boxes]
        for boxes, size in zip(where.boxes, where.sizes, strict=True)
    ]
    slow = loop.attention(module, x + torch.tensor(added, dtype=torch.float64), REAL)
    assert_same(module, [x], over(module, x, where), slow, real=REAL)


@pytest.mark.parametrize("width", [1, 4, 8, 20, 32])
def test_absolute_geometry_is_the_sinusoids_of_centre_and_size(width):
    where = layout()
    got = absolute_geometry(where.boxes, where.sizes, width=width)
    for b, i in itertools.product(range(IMAGES), range(REGIONS)):
        expected = loop.absolute(where.boxes[b, i], where.sizes[b], width)
        assert got[b, i].tolist() == pytest.approx(expected)


def test_a_transformer_adds_absolute_geometry_once_at_the_bottom():
    plain, told = tiny().eval(), tiny(geometry="absolute").eval()
    batch, tokens = regions([4, 2]), captions(2, 2, 5)
    where = absolute_geometry(batch.boxes, batch.sizes, width=16)
    plain.encoder.project.register_forward_hook(lambda module, inputs, hidden: hidden + where)
    torch.testing.assert_close(told(batch, tokens), plain(batch, tokens))


def test_what_boxes_hold_at_padding_is_never_read():
    told = tiny(geometry="absolute").eval()
    batch, tokens = regions([4, 2, 0]), captions(3, 2, 5)
    boxes = batch.boxes.masked_fill(~batch.mask[..., None], torch.nan)
    padded = dataclasses.replace(batch, boxes=boxes)
    assert torch.equal(told(padded, tokens), told(batch, tokens))
    for kind in EVERYONE:
        module, x, where = made(kind), random(IMAGES, REGIONS, WIDTH), layout()
        expected = over(module, x, where)
        boxes = where.boxes.masked_fill(~REAL[..., None], torch.nan)
        got = over(module, x, dataclasses.replace(where, boxes=boxes))
        assert torch.equal(got[REAL], expected[REAL])
        got[REAL].square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(w.grad.isfinite().all() for w in module.parameters())


numbers = st.floats(0, 100, allow_nan=False)
sizes = st.floats(1, 100, allow_nan=False)
lists_of_boxes = st.lists(st.tuples(numbers, numbers, sizes, sizes), min_size=1, max_size=5)


def boxes_at(places) -> torch.Tensor:
    corners = torch.tensor(places, dtype=torch.float64)[None]
    return torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)


@settings(max_examples=50)
@given(
    places=lists_of_boxes,
    shift=st.tuples(st.floats(-500, 500), st.floats(-500, 500)),
    factor=st.floats(0.05, 20),
    signed=st.booleans(),
)
def test_relative_geometry_is_unchanged_by_shifting_and_scaling(places, shift, factor, signed):
    boxes = boxes_at(places)
    moved = boxes * factor + torch.tensor([*shift, *shift], dtype=torch.float64)
    expected = relative_geometry(boxes, signed=signed)
    torch.testing.assert_close(
        relative_geometry(moved, signed=signed), expected, atol=1e-6, rtol=1e-6
    )


@settings(max_examples=50)
@given(places=lists_of_boxes)
def test_relative_geometry_is_the_equation_for_any_boxes(places):
    boxes = boxes_at(places)
    for signed, margin in ((False, 0.0), (True, 0.0), (False, 1.0)):
        got = relative_geometry(boxes, signed=signed, margin=margin)
        for i, j in itertools.product(range(len(places)), repeat=2):
            expected = loop.relation(boxes[0], i, j, signed=signed, margin=margin)
            assert got[0, i, j].tolist() == pytest.approx(expected, abs=1e-6)


def test_only_the_signed_variant_tells_left_from_right():
    boxes = torch.tensor([[[0.0, 0, 10, 10], [20, 30, 30, 40]]])
    plain, signed = relative_geometry(boxes), relative_geometry(boxes, signed=True)
    assert torch.equal(plain[0, 0, 1], plain[0, 1, 0])
    assert (signed[0, 0, 1, :2] > 0).all() and torch.equal(
        signed[0, 0, 1, :2], -signed[0, 1, 0, :2]
    )


@pytest.mark.parametrize("kind", EVERYONE)
@pytest.mark.parametrize(
    "box", [[5, 5, 5, 5], [5, 5, 5, 20], [20, 20, 5, 5], [0, 0, 0, 0], [3, 3, 9, 9]]
)
def test_boxes_without_area_and_coincident_ones_are_finite(kind, box):
    for options in (
        [{"bias": list(BIASES), "signed": s} for s in (False, True)]
        if (kind is GeometryAttention)
        else [{}]
    ):
        module, x = made(kind, **options), random(IMAGES, REGIONS, WIDTH)
        where = layout()
        where.boxes[:, :2] = torch.tensor(box, dtype=torch.float64)
        output = over(module, x, where)
        output.square().sum().backward()
        assert output.isfinite().all() and x.grad.isfinite().all()
        assert all(w.grad.isfinite().all() for w in module.parameters())


@pytest.mark.parametrize("kind", EVERYONE)
def test_where_boxes_lie_matters(kind):
    module, x, where = made(kind), random(IMAGES, REGIONS, WIDTH), layout()
    other = Layout(where.boxes.flip(1), where.sizes)
    assert not torch.allclose(over(module, x, where)[0], over(module, x, other)[0])


def test_gsa_without_geometry_is_dot():
    module, plain = made(GeometryAttention), made(DotAttention)
    with torch.no_grad():
        module.geometric_query.weight.zero_()
        module.geometric_query.bias.zero_()
    plain.load_state_dict(module.state_dict(), strict=False)
    x = random(IMAGES, REGIONS, WIDTH)
    torch.testing.assert_close(over(module, x, layout())[REAL], over(plain, x, None)[REAL])


@pytest.mark.parametrize("name", ["gsa", "relation", "absolute_geometry"])
def test_boxes_are_asked_for_by_the_commands_that_make_them(name):
    module, x = attentions.build(name, width=WIDTH, heads=2), torch.randn(1, 2, WIDTH)
    with pytest.raises(InputError, match=f"attention '{name}' needs the boxes") as error:
        module(x, x, x)
    assert "prep detect" in str(error.value) and "prep extract" in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsa", {"bias": "query_dependant"}, "Did you mean 'query_dependent'?"),
        ("gsa", {"bias": ["key_dependent", "key"]}, "unknown bias of attention 'gsa' 'key'"),
        ("gsa", {"bias": []}, "the bias of attention 'gsa' is a sum of []"),
        ("gsa", {"bias": ["key_dependent"] * 2}, "at most once"),
        ("gsa", {"norm": "group"}, "argument 'norm' of attention 'gsa': Input should be"),
        ("nsa", {"normalise": "key"}, "Did you mean 'normalize'?"),
        ("nsa", {"normalize": "value"}, "argument 'normalize' of attention 'nsa': Input should be"),
    ],
)
def test_wrong_options_say_which(name, options, message):
    with pytest.raises(InputError) as error:
        attentions.build(name, width=WIDTH, heads=2, options=options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "bias", "millions"),
    [
        ("g_san", "content_independent", 40.20),
        ("g_san", "query_dependent", 41.25),
        ("g_san", "key_dependent", 41.25),
        ("ng_san", "query_dependent", 41.25),
    ],
)
def test_parameters_are_as_counted(name, bias, millions):
    arguments = manifests.load("models", name).arguments
    arguments = {**arguments, "attention": {**arguments["attention"], "bias": bias}}
    on = {"feature_width": 2048, "vocabulary_size": 9488, "max_length": 16, **SPECIAL}
    with torch.device("meta"):
        model = models.build("transformer", **{**arguments, **on})
    count = sum(weight.numel() for weight in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize(("kind", "scales"), [("gsa", True), ("relation", False)])
def test_a_mechanism_sees_where_boxes_lie_to_each_other_alone(kind, scales):
    """Moved together they are the same; scaled together too, but for the pixel of `relation`."""
    module = attentions.build(kind, width=16, heads=4).double().eval()
    x, corner = torch.randn(2, 5, 16).double(), torch.rand(2, 5, 2).double() * 200
    boxes = torch.cat([corner, corner + 40 + torch.rand(2, 5, 2).double() * 100], -1)
    sizes = torch.full((2, 2), 640.0).double()
    here, moved, twice = (
        module(x, x, x, layout=Layout(where, sizes)) for where in (boxes, boxes + 17, boxes * 2)
    )
    torch.testing.assert_close(moved, here)
    assert torch.allclose(twice, here) is scales
