"""The contract of every attention mechanism in the registry."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from samples import GRID

from regionprep.errors import InputError
from regionprep.models import attention
from regionprep.models.attention import MECHANISMS, Layout, MemoryCache, WordCache
from regionprep.models.options import takes

WIDTH, HEADS = 16, 4
KEYS = GRID[0] * GRID[1]
DECODERS = [name for name, kind in MECHANISMS.items() if kind.decodes]
SIDES = [(name, "encoder") for name in MECHANISMS] + [(name, "decoder") for name in DECODERS]

OWN_PART = {"aoa": "its gate and its information are also of the query; see test_aoa.py"}
"""Which mechanisms give a query something even where it may look at nothing, and what."""

every = pytest.mark.parametrize("name", MECHANISMS)
decoding = pytest.mark.parametrize("name", DECODERS)
both = pytest.mark.parametrize(("name", "side"), SIDES)


def mechanism(name, side="encoder", dropout=0.0):
    torch.manual_seed(0)
    options = {"dropout": 0.0} if dropout == 0 else {}
    decoder = side == "decoder"
    return attention.build(
        name,
        width=WIDTH,
        heads=HEADS,
        dropout=dropout,
        decoder=decoder,
        grid=GRID,
        options=options,
    )


def on_grid(name):
    """Return whether a mechanism is made for one feature map, which knows no partial mask."""
    return takes(MECHANISMS[name], "grid")


def layout(images, keys):
    corner = torch.rand(images, keys, 2) * 50
    boxes = torch.cat([corner, corner + 5 + torch.rand(images, keys, 2) * 20], -1)
    return Layout(boxes, torch.full((images, 2), 64.0), GRID if keys == KEYS else None)


def real(name, counts):
    """Return a mask of the first `counts` keys; a feature map is there as a whole or not at all."""
    counts = torch.tensor([[KEYS if count and on_grid(name) else count] for count in counts])
    return torch.arange(KEYS) < counts


def over_regions(module, x, mask, where):
    return module(x, x, x, mask=mask, query_mask=mask, layout=where)


@both
def test_output_has_the_shape_of_the_query(name, side):
    module, x = mechanism(name, side), torch.randn(2, KEYS, WIDTH)
    assert module(x, x, x, layout=layout(2, KEYS)).shape == (2, KEYS, WIDTH)
    if MECHANISMS[name].decodes:
        query = torch.randn(6, 3, WIDTH)
        assert module(query, x, x, layout=layout(2, KEYS)).shape == (6, 3, WIDTH)


@both
def test_masked_regions_are_ignored(name, side):
    module, x, where = mechanism(name, side), torch.randn(3, KEYS, WIDTH), layout(3, KEYS)
    mask = real(name, [3, KEYS, 0])
    expected = over_regions(module, x, mask, where)[mask]
    changed, boxes = x.clone(), where.boxes.clone()
    changed[~mask], boxes[~mask] = 1e3, 0.0
    elsewhere = dataclasses.replace(where, boxes=boxes)
    torch.testing.assert_close(over_regions(module, changed, mask, elsewhere)[mask], expected)


@both
def test_batch_mates_and_padding_are_ignored(name, side):
    module, x, where = mechanism(name, side), torch.randn(3, KEYS, WIDTH), layout(3, KEYS)
    mask = real(name, [3, KEYS, 1])
    only = int(mask[0].sum())
    together = over_regions(module, x, mask, where)[:1, :only]
    alone = Layout(where.boxes[:1, :only], where.sizes[:1], where.grid if on_grid(name) else None)
    got = over_regions(module, x[:1, :only], mask[:1, :only], alone)
    torch.testing.assert_close(got, together, atol=1e-5, rtol=1e-5)


@decoding
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_rows_that_share_keys_are_as_if_each_had_its_own(name, side):
    module = mechanism(name, side)
    query, memory = torch.randn(6, 3, WIDTH), torch.randn(2, KEYS, WIDTH)
    mask = real(name, [3, KEYS])
    words = torch.arange(3) < torch.tensor([[1], [3], [2], [3], [3], [1]])
    shared = module(query, memory, memory, mask=mask, query_mask=words)
    own = memory.repeat_interleave(3, 0)
    separate = module(query, own, own, mask=mask.repeat_interleave(3, 0), query_mask=words)
    torch.testing.assert_close(shared[words], separate[words])


@both
def test_images_without_regions_give_finite_numbers_and_gradients(name, side):
    module = mechanism(name, side)
    for keys in (KEYS,) if on_grid(name) else (0, KEYS):
        x = torch.randn(2, keys, WIDTH, requires_grad=True)
        mask = torch.zeros(2, keys, dtype=torch.bool)
        mask[1] = True
        output = over_regions(module, x, mask, layout(2, keys))
        output.sum().backward()
        assert output.isfinite().all() and x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


@both
@pytest.mark.parametrize("boxes", [[[10, 10, 30, 40]] * KEYS, [[5, 5, 5, 5]] * KEYS])
def test_boxes_in_one_place_and_single_regions_give_finite_gradients(name, side, boxes):
    module, x = mechanism(name, side), torch.randn(2, KEYS, WIDTH, requires_grad=True)
    mask = real(name, [1, KEYS])
    where = dataclasses.replace(layout(2, KEYS), boxes=torch.tensor([boxes, boxes]).float())
    output = over_regions(module, x, mask, where)
    output[mask].square().sum().backward()
    assert output.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize(("name", "side"), [it for it in SIDES if it[0] not in OWN_PART])
def test_a_query_that_may_look_at_nothing_takes_nothing(name, side):
    module, x = mechanism(name, side), torch.randn(2, KEYS, WIDTH)
    nothing = torch.zeros(2, KEYS, dtype=torch.bool)
    output = over_regions(module, x, nothing, layout(2, KEYS))
    torch.testing.assert_close(output, module.output.bias.expand_as(output))


@both
def test_all_weights_get_finite_gradients(name, side):
    module, x = mechanism(name, side), torch.randn(2, KEYS, WIDTH)
    module(x, x, x, layout=layout(2, KEYS)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@both
def test_evaluation_is_deterministic_and_training_is_not(name, side):
    module, x, where = (
        mechanism(name, side, dropout=0.5),
        torch.randn(2, KEYS, WIDTH),
        layout(2, KEYS),
    )
    assert not torch.equal(module(x, x, x, layout=where), module(x, x, x, layout=where))
    module.eval()
    assert torch.equal(module(x, x, x, layout=where), module(x, x, x, layout=where))


@every
def test_weights_round_trip(name):
    module, x = mechanism(name).eval(), torch.randn(2, KEYS, WIDTH)
    torch.manual_seed(1)
    other = attention.build(name, width=WIDTH, heads=HEADS, grid=GRID)
    other.load_state_dict(module.state_dict())
    where = layout(2, KEYS)
    assert torch.equal(other.eval()(x, x, x, layout=where), module(x, x, x, layout=where))


@every
def test_export_computes_the_same(name):
    module, x, where = mechanism(name).eval(), torch.randn(2, KEYS, WIDTH), layout(2, KEYS)
    mask = real(name, [3, KEYS])

    class Exported(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x, mask, boxes, sizes):
            return over_regions(self.inner, x, mask, Layout(boxes, sizes, where.grid))

    arguments = (x, mask, where.boxes, where.sizes)
    program = torch.export.export(Exported(), arguments).module()
    torch.testing.assert_close(program(*arguments), over_regions(module, x, mask, where))


@decoding
def test_later_words_do_not_change_earlier_ones(name):
    module, x = mechanism(name, "decoder"), torch.randn(2, KEYS, WIDTH)
    memory = torch.randn(2, 4, WIDTH)
    whole = module(x, x, x, causal=True)
    torch.testing.assert_close(module(x[:, :3], x[:, :3], x[:, :3], causal=True), whole[:, :3])
    over = module(x, memory, memory)
    torch.testing.assert_close(module(x[:, :3], memory, memory), over[:, :3])


@decoding
@pytest.mark.parametrize("steps", [[1] * KEYS, [4, 1, 1], [2, 4]])
def test_words_step_by_step_are_as_all_at_once(name, steps):
    module, x = mechanism(name, "decoder"), torch.randn(2, KEYS, WIDTH)
    cache = WordCache(length=8)
    with torch.no_grad():
        parts = [module(new, new, new, causal=True, cache=cache) for new in x.split(steps, 1)]
        whole = module(x, x, x, causal=True)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@decoding
def test_the_cache_of_words_never_moves_nor_grows(name):
    module, x = mechanism(name, "decoder"), torch.randn(2, 3, WIDTH)
    cache, places = WordCache(length=3), set()
    with torch.no_grad():
        for new in x.split(1, 1):
            module(new, new, new, causal=True, cache=cache)
            cache.reorder(torch.tensor([1, 0]))
            places.add((cache.keys.data_ptr(), cache.keys.shape, cache.values.data_ptr()))
    assert len(places) == 1


@decoding
def test_a_memory_step_by_step_is_as_all_at_once_and_projected_once(name):
    module, x = mechanism(name, "decoder"), torch.randn(4, 5, WIDTH)
    memory, mask = torch.randn(2, 3, WIDTH), torch.tensor([[True, True, False], [True] * 3])
    whole = module(x, memory, memory, mask=mask)
    cache, nothing = MemoryCache(), torch.full_like(memory, torch.nan)
    parts = [
        module(new, memory if step == 0 else nothing, memory, mask=mask, cache=cache)
        for step, new in enumerate(x.split(1, 1))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)


@decoding
def test_reordered_caches_go_on_from_other_rows(name):
    module, x = mechanism(name, "decoder"), torch.randn(3, 4, WIDTH)
    memory, index = torch.randn(1, 3, WIDTH), torch.tensor([2, 0, 0])
    words, seen = WordCache(length=4), MemoryCache()
    with torch.no_grad():
        first = x[:, :3]
        module(first, first, first, causal=True, cache=words)
        module(first, memory, memory, cache=seen)
        words.reorder(index)
        seen.reorder(index)
        last = x[:, 3:]
        got = module(last, last, last, causal=True, cache=words)
        looked = module(last, memory, memory, cache=seen)
        joined = torch.cat([first[index], last], 1)
        expected = module(joined, joined, joined, causal=True)[:, 3:]
        expected_look = module(joined, memory, memory)[:, 3:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(looked, expected_look, atol=1e-5, rtol=1e-5)


@every
def test_heads_that_do_not_divide_the_width_are_refused(name):
    with pytest.raises(InputError, match="3 heads do not divide a width of 16"):
        attention.build(name, width=16, heads=3, grid=GRID)


@every
def test_unknown_options_name_the_nearest(name):
    with pytest.raises(InputError) as error:
        attention.build(name, width=16, heads=4, grid=GRID, options={"dropuot": 0.1})
    assert f"argument of attention '{name}' 'dropuot'. Did you mean 'dropout'?" in str(error.value)


@pytest.mark.parametrize("name", [name for name in MECHANISMS if on_grid(name)])
def test_a_feature_map_is_asked_for_by_the_command_that_makes_it(name):
    with pytest.raises(InputError, match=f"attention '{name}' needs a feature map") as error:
        attention.build(name, width=16, heads=4)
    assert "prep extract --backbone NAME --grid" in str(error.value)


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name not in DECODERS])
def test_mechanisms_of_encoders_are_refused_in_decoders(name):
    with pytest.raises(InputError, match=f"attention '{name}' is for encoders") as error:
        attention.build(name, width=16, heads=4, grid=GRID, decoder=True)
    assert "decoder_attention" in str(error.value)


def test_unknown_mechanism_names_the_nearest():
    with pytest.raises(InputError) as error:
        attention.build("zodiak", width=16, heads=4)
    assert str(error.value).startswith("unknown attention 'zodiak'. Did you mean 'zodiac'? Known:")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gate": "sigmoyd"},
            "unknown gate of attention 'zodiac' 'sigmoyd'. Did you mean 'sigmoid'",
        ),
        ({"pool": "heads"}, "unknown pool of attention 'zodiac' 'heads'. Did you mean 'head'"),
        (
            {"zoneup": "one"},
            "argument 'zoneup' of attention 'zodiac': Input should be a valid number",
        ),
        ({"width": 8}, "unknown argument of attention 'zodiac' 'width'"),
    ],
)
def test_wrong_options_say_which(options, message):
    with pytest.raises(InputError) as error:
        attention.build("zodiac", width=16, heads=4, options=options)
    assert message in str(error.value)


def test_shapes_are_enforced_in_tests():
    x = torch.randn(2, KEYS, WIDTH)
    with pytest.raises(Exception, match="query"):
        mechanism("dot")(x, x[:, :, :8], x)
