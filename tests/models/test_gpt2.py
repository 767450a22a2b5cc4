"""GPT-2 against transformers, and what it takes over from pretrained weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from samples import captions, regions
from transformers import GPT2Config, GPT2LMHeadModel

from regionprep import models
from regionprep.errors import InputError, MissingError
from regionprep.models.connections import Connection
from regionprep.models.gpt2 import attend

WORDS, MARKS = 14, 3
SPECIAL = {"pad": 14, "bos": 15, "eos": 16}
"""As in a vocabulary of BPE tokens: the marks come after them."""


class Nothing(Connection):
    def forward(self, hidden, memory, *, words=None, caches=None):
        return hidden

    def caches(self, memory):
        return []


def captioner(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "width": 16, "heads": 4, "feed_forward": 32}
    shape = {"feature_width": 6, "vocabulary_size": WORDS + MARKS, "max_length": 5, "positions": 8}
    return models.build("gpt2", **{**shape, **SPECIAL, **sizes, "dropout": 0.0, **changes})


def theirs(seed=1, **changes):
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8, "vocab_size": WORDS}
    config = GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.fixture
def pretrained(tmp_path):
    theirs().save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


def texts(length=6):
    return torch.randint(0, WORDS, (3, length), generator=torch.Generator().manual_seed(2))


def without_image(model):
    model.connections = torch.nn.ModuleList(Nothing() for _ in model.connections)
    return model.eval()


@torch.no_grad()
def test_without_an_image_it_is_the_gpt2_of_transformers(pretrained):
    model = captioner(pretrained=pretrained)
    model.warm_start()
    got = without_image(model)(regions([2, 0, 3]), texts().unsqueeze(1)).squeeze(1)
    expected = theirs()(texts()).logits
    torch.testing.assert_close(got[..., :WORDS], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_padded_texts_are_as_transformers_has_them(pretrained):
    model = captioner(pretrained=pretrained)
    model.warm_start()
    tokens, real = texts(), torch.arange(6) < torch.tensor([[6], [2], [4]])
    got = without_image(model)(
        regions([2, 0, 3]), tokens.masked_fill(~real, SPECIAL["pad"]).unsqueeze(1)
    ).squeeze(1)
    expected = theirs()(tokens, attention_mask=real.long()).logits
    torch.testing.assert_close(got[real][:, :WORDS], expected[real], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_steps_with_a_cache_are_as_transformers_all_at_once(pretrained):
    model = captioner(pretrained=pretrained)
    model.warm_start()
    without_image(model)
    state, steps = model.start(model.encode(regions([2, 0, 3])), 1), []
    for column in texts().unbind(1):
        logits, state = model.step(column, state)
        steps.append(logits[:, :WORDS])
    torch.testing.assert_close(torch.stack(steps, 1), theirs()(texts()).logits, atol=1e-5, rtol=0)


def test_gradients_are_those_of_transformers(pretrained):
    model, reference = captioner(pretrained=pretrained), theirs()
    model.warm_start()
    without_image(model)(regions([2, 0, 3]), texts().unsqueeze(1))[
        ..., :WORDS
    ].sin().sum().backward()
    reference(texts()).logits.sin().sum().backward()
    weights = dict(model.decoder.named_parameters())
    for name, weight in reference.transformer.named_parameters():
        got = weights[name].grad[: len(weight)]
        torch.testing.assert_close(got, weight.grad, atol=1e-4, rtol=1e-4)


def test_warm_start_takes_gpt2_over_and_leaves_the_rest(pretrained):
    model, before, source = captioner(pretrained=pretrained), captioner(), theirs().transformer
    torch.testing.assert_close(model.state_dict(), before.state_dict(), atol=0, rtol=0)
    model.warm_start()
    for name, weight in source.named_parameters():
        assert torch.equal(model.decoder.get_parameter(name)[: len(weight)], weight)
    marks = slice(WORDS, None)
    assert torch.equal(model.decoder.wte.weight[marks], before.decoder.wte.weight[marks])
    rest = {k: v for k, v in model.state_dict().items() if not k.startswith("decoder.")}
    assert all(torch.equal(before.state_dict()[name], value) for name, value in rest.items())


def test_without_pretrained_weights_nothing_is_read(monkeypatch):
    monkeypatch.setattr("transformers.GPT2Model.from_pretrained", None)
    model, before = captioner(), captioner()
    model.warm_start()
    torch.testing.assert_close(model.state_dict(), before.state_dict(), atol=0, rtol=0)


def test_building_reads_no_weights(monkeypatch):
    monkeypatch.setattr("transformers.GPT2Model.from_pretrained", None)
    assert captioner(pretrained="gpt2").pretrained == "gpt2"


def test_a_vocabulary_of_other_tokens_is_refused(pretrained):
    model = captioner(pretrained=pretrained, pad=13, bos=14, eos=15)
    with pytest.raises(InputError, match="has 14 tokens, and the vocabulary is of 13 others"):
        model.warm_start()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_layers": 3}, "decoder_layers 2 there and 3 here"),
        ({"heads": 2, "width": 32}, "width 16 there and 32 here, heads 4 there and 2 here"),
        ({"positions": 9}, "positions 8 there and 9 here"),
    ],
)
def test_other_sizes_are_refused_with_both(pretrained, changes, message):
    with pytest.raises(InputError) as error:
        captioner(pretrained=pretrained, **changes).warm_start()
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_inner": 48},
        {"activation_function": "relu"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
    ],
)
def test_variants_of_gpt2_are_refused(tmp_path, changes):
    theirs(**changes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="a variant of GPT-2 that computes something else"):
        captioner(pretrained=str(tmp_path)).warm_start()


def test_torn_weights_are_told(pretrained):
    file = Path(pretrained) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(MissingError, match="cannot be had"):
        captioner(pretrained=pretrained).warm_start()


def test_a_vocabulary_of_words_is_refused_however_large(pretrained):
    model = captioner(pretrained=pretrained, vocabulary_size=99, pad=0, bos=1, eos=2)
    with pytest.raises(InputError, match="its own tokens, and the vocabulary is of words") as error:
        model.warm_start()
    assert f"prep vocab --bpe {pretrained}" in str(error.value)


def test_weights_that_cannot_be_had_say_how_to_get_them(tmp_path):
    with pytest.raises(MissingError, match=r"model\.safetensors, which can be fetched") as error:
        captioner(pretrained=str(tmp_path)).warm_start()
    assert f"the pretrained weights '{tmp_path}' cannot be had" in str(error.value)


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingError, match=r"pip install 'regionprep\[gpt2\]'"):
        captioner()


def test_captions_longer_than_gpt2_reads_are_refused_when_it_is_built():
    assert captioner(positions=6).max_length == 5
    with pytest.raises(InputError, match="captions of 5 words do not fit into 5 positions"):
        captioner(positions=5)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(InputError, match="3 heads do not divide a width of 16"):
        captioner(heads=3)


def test_input_and_output_embeddings_are_one():
    model = captioner()
    names = [name for name, it in model.named_parameters() if len(it) == WORDS + MARKS]
    assert names == ["decoder.wte.weight"]


def test_gates_of_every_block_are_kept_for_plots():
    model, tokens = captioner(connection={"name": "srau", "meshed": True}), captions(2, 2, 4)
    for connection in model.connections:
        connection.keep_gates = True
    model(regions([3, 2]), tokens)
    kept = [connection.kept_gates.visual for connection in model.connections]
    assert [gates.shape for gates in kept] == [(2, 4, 5, 16)] * 2
    assert not torch.equal(*kept)


@pytest.mark.parametrize(
    ("norm", "is_normalised"), [("last", [True, True]), ("first", [False, True])]
)
def test_the_encoder_normalises_last_unless_told(norm, is_normalised):
    memory = captioner(norm=norm).encode(regions([3, 4]))
    means = [layer.mean(-1).abs().max() < 1e-5 for layer in memory.layers]
    assert [bool(mean) for mean in means] == is_normalised


def test_what_looks_at_the_image_stands_between_attention_and_mlp():
    """Figure 3, block by block, with GPT-2's own modules."""
    model = captioner(connection={"name": "srau", "tau": 0.2}).eval()
    batch, tokens = regions([3, 2]), captions(2, 1, 5)[:, 0]
    memory, words = model.encode(batch), tokens != SPECIAL["pad"]
    x = model.decoder.wte(tokens) + model.decoder.wpe.weight[: tokens.shape[1]]
    for block, connection in zip(model.decoder.h, model.connections, strict=True):
        h = x + attend(block.attn, block.ln_1(x), heads=4, words=words)
        a = connection(h, memory, words=words)
        x = a + block.mlp(block.ln_2(a))
    expected = model.decoder.ln_f(x) @ model.decoder.wte.weight.T
    torch.testing.assert_close(model(batch, tokens[:, None])[:, 0], expected)


def test_gpt2_small_has_as_many_parameters_as_it_is_known_for():
    with torch.device("meta"):
        model = models.build(
            "gpt2", feature_width=6, vocabulary_size=50257, max_length=20, **SPECIAL
        )
    assert sum(weight.numel() for weight in model.decoder.parameters()) == 124_439_808
