from __future__ import annotations

import itertools

import geometry_loop as loop
import pytest
import torch
from comparing import assert_same, random
from samples import SPECIAL, tiny
from torch import nn

from regionprep import manifests, models
from regionprep.models.attention import DotAttention, NormalizedAttention
from regionprep.models.attention.dot import dot

IMAGES, REGIONS, WIDTH = 3, 4, 4
REAL = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * REGIONS])
NORMS = ["instance", "layer", "batch"]


def attention(**options) -> NormalizedAttention:
    torch.manual_seed(0)
    module = NormalizedAttention(width=WIDTH, heads=2, **options).double()
    with torch.no_grad():  # Scales and shifts that do something.
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) / 2)
    return module


def over(module, x, real=REAL):
    return module(x, x, x, mask=real, query_mask=real)


@pytest.mark.parametrize(
    ("norm", "normalize", "affine"),
    list(itertools.product(NORMS, ["query", "key", "both", "none"], [False, True])),
)
def test_it_is_the_equations(norm, normalize, affine):
    module = attention(norm=norm, normalize=normalize, affine=affine)
    x = random(IMAGES, REGIONS, WIDTH)
    queries, keys = None, None
    if normalize in ("query", "both"):
        heads = loop.heads_of(module, module.query, x)
        queries = loop.normalised(heads, REAL, norm, module.query_norm)
    if normalize in ("key", "both"):
        heads = loop.heads_of(module, module.key, x)
        keys = loop.normalised(heads, REAL, norm, module.key_norm)
    slow = loop.attention(module, x, REAL, queries=queries, keys=keys)
    assert_same(module, [x], over(module, x), slow, real=REAL)


@pytest.mark.parametrize("norm", NORMS)
def test_without_a_mask_all_regions_are_real(norm):
    module, x = attention(norm=norm), random(IMAGES, REGIONS, WIDTH)
    every = torch.ones(IMAGES, REGIONS, dtype=torch.bool)
    torch.testing.assert_close(module(x, x, x), over(module, x, every))


def test_the_mask_of_the_keys_says_what_is_real_where_nothing_else_does():
    module, x = attention(), random(IMAGES, REGIONS, WIDTH)
    torch.testing.assert_close(module(x, x, x, mask=REAL)[REAL], over(module, x)[REAL])


def test_instance_norm_is_torchs_over_what_is_real():
    module, x = attention(), random(1, REGIONS, WIDTH)
    heads = module.split(module.query(x))
    queries, _ = module.prepare(heads, heads, None)
    expected = nn.functional.instance_norm(module.query(x).mT, eps=1e-5).mT
    torch.testing.assert_close(queries, module.split(expected))


@pytest.mark.parametrize("norm", NORMS)
def test_nothing_normalised_is_dot(norm):
    module, plain = attention(norm=norm, normalize="none"), DotAttention(width=WIDTH, heads=2)
    plain.double().load_state_dict(module.state_dict())
    x = random(IMAGES, REGIONS, WIDTH)
    assert torch.equal(over(module, x), over(plain, x))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_one_region_and_none_are_finite_and_so_are_their_gradients(norm, training):
    module = attention(norm=norm, normalize="both", affine=True).train(training)
    for regions, counts in ((1, [1, 0]), (3, [1, 0]), (3, [0, 0]), (0, [0, 0])):
        x = random(2, regions, WIDTH)
        real = torch.arange(regions) < torch.tensor(counts)[:, None]
        output = over(module, x, real)
        output.square().sum().backward()
        assert output.isfinite().all() and x.grad.isfinite().all()
        assert all(w.grad.isfinite().all() for w in module.parameters())
        assert all(buffer.isfinite().all() for buffer in module.buffers())


def test_a_projection_whose_mean_is_subtracted_has_no_bias():
    assert attention().query.bias is None and attention().key.bias is not None
    both = attention(normalize="both", norm="batch")
    assert both.query.bias is None and both.key.bias is None
    assert attention(norm="layer").query.bias is not None


@pytest.mark.parametrize(
    ("norm", "depends"), [("instance", False), ("layer", False), ("batch", True)]
)
def test_only_batch_norm_depends_on_the_batch_and_only_in_training(norm, depends):
    module, x = attention(norm=norm), random(IMAGES, REGIONS, WIDTH)
    together, alone = over(module, x)[:1], over(module, x[:1], REAL[:1])
    assert torch.allclose(together[REAL[:1]], alone[REAL[:1]]) is not depends
    module.eval()
    together, alone = over(module, x)[:1], over(module, x[:1], REAL[:1])
    torch.testing.assert_close(together, alone)


def test_running_statistics_are_torchs_over_all_real_regions():
    module, theirs = attention(norm="batch"), nn.BatchNorm1d(WIDTH, affine=False).double()
    for _ in range(3):
        x = random(IMAGES, REGIONS, WIDTH)
        over(module, x)
        theirs(module.query(x)[REAL])
    torch.testing.assert_close(module.query_norm.running_mean.flatten(), theirs.running_mean)
    torch.testing.assert_close(module.query_norm.running_variance.flatten(), theirs.running_var)
    module.eval()
    theirs.eval()
    x = random(IMAGES, REGIONS, WIDTH)
    heads = module.split(module.query(x))
    queries, _ = module.prepare(heads, heads, REAL)
    torch.testing.assert_close(module.merge(queries)[REAL], theirs(module.query(x)[REAL]))


def test_a_batch_without_regions_leaves_the_running_statistics():
    module = attention(norm="batch")
    over(module, random(2, REGIONS, WIDTH), torch.zeros(2, REGIONS, dtype=torch.bool))
    assert not module.query_norm.running_mean.any()
    assert (module.query_norm.running_variance == 1).all()


def test_a_bias_is_added_where_keys_may_be_looked_at():
    query, key, value = (random(2, 2, REGIONS, 3) for _ in range(3))
    bias = random(2, 1, REGIONS, REGIONS)
    seen = torch.rand(2, 1, REGIONS, REGIONS) < 0.5
    seen[0, 0, 1] = False
    scores = (query @ key.mT / 3**0.5 + bias).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1).nan_to_num() @ value
    heads = dot(query, key, value, allowed=seen, bias=bias)
    torch.testing.assert_close(heads, expected)
    heads.square().sum().backward()
    assert bias.grad.isfinite().all() and (bias.grad[~seen] == 0).all() and bias.grad.any()


@pytest.mark.parametrize(("layers", "millions"), [(1, 18.13), (2, 25.49), (4, 40.20), (6, 54.91)])
@pytest.mark.parametrize("name", ["san", "n_san"])
def test_parameters_are_as_printed(name, layers, millions):
    manifest = manifests.load("models", name)
    sizes = {"encoder_layers": layers, "decoder_layers": layers}
    on = {"feature_width": 2048, "vocabulary_size": 9488, "max_length": 16, **SPECIAL}
    with torch.device("meta"):
        model = models.build("transformer", **{**manifest.arguments, **on, **sizes})
    count = sum(weight.numel() for weight in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


def test_an_affine_norm_starts_as_none_in_a_model():
    """A model draws its matrices, and these are none."""
    attention = {"name": "nsa", "affine": True}
    model = tiny(attention=attention, decoder_attention="dot", cross_attention="dot")
    norm = model.encoder.layers[0].attention.query_norm
    assert (norm.scale == 1).all() and (norm.shift == 0).all()
