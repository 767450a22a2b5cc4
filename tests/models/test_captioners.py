"""The contract of every captioner in the registry and of every model that ships."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from samples import GRID, SPECIAL, captions, feature_maps, regions

from regionprep import manifests, models
from regionprep.errors import InputError
from regionprep.models import CAPTIONERS, Regions

WORDS, MAX_LENGTH = 11, 5
MODELS = manifests.names("models")

POOLED = {"zodiac_released": "its intensities are means over all that is in the batch"}
"""Models whose captions depend on their batch, on padding and on later words by design, and why."""

every = pytest.mark.parametrize("name", MODELS)
independent = pytest.mark.parametrize("name", [name for name in MODELS if name not in POOLED])


def on_grid(name):
    """Return whether a model is made for one feature map, and refuses sets of regions."""
    return manifests.load("models", name).parameters.grid is not None


def images(name, counts, seed=0):
    """Return images of `counts` regions, or feature maps for who needs them."""
    return (feature_maps if on_grid(name) else regions)(counts, seed=seed)


def build(name, preset="tiny", seed=0, **changes):
    """Return a shipped model in the sizes of a preset, without dropout."""
    torch.manual_seed(seed)
    manifest = manifests.load("models", name)
    chosen = manifest.presets[preset].arguments if preset != "base" else {}
    shape = {"feature_width": 6, "vocabulary_size": WORDS, "max_length": MAX_LENGTH, "grid": GRID}
    shape |= SPECIAL
    return models.build(manifest.captioner, **{**shape, **manifest.arguments, **chosen, **changes})


def same(got, expected, mask=None):
    got, expected = (got, expected) if mask is None else (got[mask], expected[mask])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def part(batch, images, most):
    """Return some images of a batch, padded to `most` regions only; a feature map stays whole."""
    most = batch.mask.shape[1] if batch.grid else most
    return Regions(
        batch.features[images, :most],
        batch.mask[images, :most],
        batch.boxes[images, :most],
        batch.sizes[images],
        batch.grid,
    )


def test_every_captioner_has_a_model_that_ships():
    assert {manifests.load("models", name).captioner for name in MODELS} == set(CAPTIONERS)


@every
def test_every_preset_builds(name):
    for preset in ("base", *manifests.load("models", name).presets):
        with torch.device("meta"):
            assert build(name, preset).vocabulary_size == WORDS


@every
def test_who_needs_a_feature_map_says_how_to_make_one(name):
    if not on_grid(name):
        assert build(name, grid=None)
        return
    with pytest.raises(InputError, match="needs a feature map") as error:
        build(name, grid=None)
    assert "prep extract --backbone NAME --grid" in str(error.value)


@every
def test_parameters_are_as_many_as_the_manifest_says(name):
    manifest = manifests.load("models", name)
    on = manifest.parameters.model_dump()
    expected = on.pop("count")
    with torch.device("meta"):
        model = build(name, "base", **on)
    assert sum(weight.numel() for weight in model.parameters()) == expected


@every
def test_logits_have_a_row_for_each_token(name):
    logits = build(name)(images(name, [4, 2]), captions(2, 3, 5))
    assert logits.shape == (2, 3, 6, WORDS)
    assert logits.isfinite().all()


@every
def test_masked_regions_are_ignored(name):
    model, batch, tokens = build(name).eval(), images(name, [4, 2, 0]), captions(3, 2, 5)
    noise = torch.where(batch.mask[..., None], batch.features, torch.tensor(torch.nan))
    noisy = dataclasses.replace(batch, features=noise)
    same(model(noisy, tokens), model(batch, tokens))


@independent
def test_batch_mates_and_padding_are_ignored(name):
    model, batch, tokens = build(name).eval(), images(name, [2, 4, 0]), captions(3, 2, 5)
    alone = model(part(batch, [0], 2), tokens[:1])
    same(alone, model(batch, tokens)[:1], tokens[:1] != SPECIAL["pad"])


@independent
def test_captions_of_an_image_do_not_know_each_other(name):
    model, batch, tokens = build(name).eval(), images(name, [2, 4]), captions(2, 3, 5)
    same(model(batch, tokens[:, 1:2]), model(batch, tokens)[:, 1:2], tokens[:, 1:2] != 0)


@pytest.mark.parametrize("name", POOLED)
@torch.no_grad()
def test_pooled_models_depend_on_their_batch_and_on_later_words(name):
    model, batch, tokens = build(name).eval(), images(name, [2, 4, 0]), captions(3, 2, 5)
    whole = model(batch, tokens)
    changed = tokens.clone()
    changed[..., 3:] = 7
    alone = model(part(batch, [0], 2), tokens[:1])
    state = model.start(model.encode(batch), 2)
    step, _ = model.step(tokens[..., 0].flatten(), state)
    for other, same_words in [
        (alone, whole[:1]),
        (model(batch, tokens[:, 1:]), whole[:, 1:]),
        (model(batch, changed)[:, :, 0], whole[:, :, 0]),
        (step.unflatten(0, (3, 2)), whole[:, :, 0]),
    ]:
        assert not torch.allclose(other, same_words, atol=1e-5, rtol=1e-5)


@every
def test_captions_depend_on_their_image(name):
    model, tokens = build(name).eval(), captions(2, 2, 5)
    assert not torch.allclose(
        model(images(name, [4, 2]), tokens), model(images(name, [4, 2], seed=1), tokens), atol=1e-3
    )


@independent
def test_later_words_do_not_change_earlier_ones(name):
    model, batch, tokens = build(name).eval(), images(name, [3, 4]), captions(2, 2, 5)
    changed = tokens.clone()
    changed[..., 3:] = 7
    same(model(batch, changed)[:, :, :3], model(batch, tokens)[:, :, :3], tokens[:, :, :3] != 0)
    same(model(batch, tokens[..., :3]), model(batch, tokens)[:, :, :3], tokens[:, :, :3] != 0)


@every
def test_images_without_regions_give_finite_numbers_and_gradients(name):
    model = build(name)
    for batch in (images(name, [0, 3]), images(name, [0, 0])):
        logits = model(batch, captions(2, 2, 5))
        model.zero_grad()
        logits.sum().backward()
        assert logits.isfinite().all()
        assert all(w.grad.isfinite().all() for w in model.parameters() if w.grad is not None)


@every
def test_all_weights_get_finite_gradients(name):
    model = build(name)
    model(images(name, [3, 4]), captions(2, 2, 5)).square().mean().backward()
    weights = dict(model.named_parameters())
    assert [
        key for key, w in weights.items() if w.grad is None or not w.grad.isfinite().all()
    ] == []


@every
def test_evaluation_is_deterministic_and_training_is_not(name):
    model, batch, tokens = build(name, dropout=0.5), images(name, [3, 4]), captions(2, 2, 5)
    assert not torch.equal(model(batch, tokens), model(batch, tokens))
    model.eval()
    assert torch.equal(model(batch, tokens), model(batch, tokens))


@every
def test_weights_round_trip(name):
    model, other = build(name).eval(), build(name, seed=1).eval()
    other.load_state_dict(model.state_dict())
    batch, tokens = images(name, [3, 4]), captions(2, 2, 5)
    assert torch.equal(other(batch, tokens), model(batch, tokens))


@every
def test_export_computes_the_same(name):
    model, batch, tokens = build(name).eval(), images(name, [3, 4]), captions(2, 2, 5)

    class Exported(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, features, mask, boxes, sizes, tokens):
            return self.inner(Regions(features, mask, boxes, sizes, batch.grid), tokens)

    arguments = (batch.features, batch.mask, batch.boxes, batch.sizes, tokens)
    same(torch.export.export(Exported(), arguments).module()(*arguments), model(batch, tokens))


@independent
@torch.no_grad()
def test_step_by_step_is_as_teacher_forcing(name):
    model, batch, tokens = build(name).eval(), images(name, [3, 0, 4]), captions(3, 2, 5)
    words = torch.where(tokens == 0, torch.tensor(5), tokens)
    state = model.start(model.encode(batch), 2)
    steps = []
    for column in words.flatten(0, 1).unbind(1):
        logits, state = model.step(column, state)
        steps.append(logits)
    same(torch.stack(steps, 1).unflatten(0, (3, 2)), model(batch, words))


@independent
@torch.no_grad()
def test_reordered_rows_go_on_from_other_captions(name):
    model, batch, tokens = build(name).eval(), images(name, [3, 4]), captions(2, 3, 4)
    words = torch.where(tokens == 0, torch.tensor(5), tokens)
    index = torch.tensor([1, 1, 0, 5, 3, 5])
    state = model.start(model.encode(batch), 3)
    for column in words[..., :3].flatten(0, 1).unbind(1):
        _, state = model.step(column, state)
    last = words[..., 3].flatten()
    logits, _ = model.step(last, state.reorder(index))
    joined = torch.cat([words[..., :3].flatten(0, 1)[index], last[:, None]], 1).reshape(2, 3, 4)
    same(logits.unflatten(0, (2, 3)), model(batch, joined)[:, :, 3])


@every
def test_half_precision_features_are_taken(name):
    model, batch, tokens = build(name).eval(), images(name, [3, 4]), captions(2, 2, 5)
    half = dataclasses.replace(batch, features=batch.features.half())
    torch.testing.assert_close(model(half, tokens), model(batch, tokens), atol=1e-2, rtol=1e-2)


@every
def test_captions_that_are_too_long_are_refused(name):
    with pytest.raises(InputError, match="a caption of 6 words, and this model has room for 5"):
        build(name)(images(name, [3]), captions(1, 1, 6))


def test_unknown_captioner_names_the_nearest():
    with pytest.raises(InputError) as error:
        models.build("transfromer", feature_width=6, vocabulary_size=9, max_length=4, **SPECIAL)
    assert str(error.value).startswith(
        "unknown captioner 'transfromer'. Did you mean 'transformer'?"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropuot": 0.1}, "unknown argument of captioner 'transformer' 'dropuot'. Did you mean"),
        ({"heads": 5}, "5 heads do not divide a width of 32"),
        ({"heads": "2"}, "argument 'heads' of captioner 'transformer'"),
        ({"decoder_layers": 0}, "argument 'decoder_layers' of captioner 'transformer'"),
        ({"dropout": 1.5}, "argument 'dropout' of captioner 'transformer'"),
        ({"norm": "before"}, "argument 'norm' of captioner 'transformer'"),
        ({"feed_forward_activation": "tanh"}, "Input should be 'relu', 'gelu' or 'none'"),
        ({"attention": "zodiak"}, "unknown attention 'zodiak'. Did you mean 'zodiac'?"),
        ({"attention": {"gate": "tanh"}}, "attention without a name: {'gate': 'tanh'}"),
        ({"attention": {"name": "zodiac", "gates": "tanh"}}, "Did you mean 'gate'?"),
        ({"decoder_attention": "dto"}, "unknown attention 'dto'. Did you mean 'dot'?"),
        ({"connection": "add_nrom"}, "unknown connection 'add_nrom'. Did you mean 'add_norm'?"),
        (
            {"connection": {"name": "add_norm", "tau": 0.1}},
            "argument of connection 'add_norm' 'tau'",
        ),
    ],
)
def test_wrong_arguments_say_which(changes, message):
    with pytest.raises(InputError) as error:
        build("transformer", **changes)
    assert message in str(error.value)
