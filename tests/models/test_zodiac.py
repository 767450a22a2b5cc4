from __future__ import annotations

import pytest
import torch
from comparing import assert_same, random
from zodiac_loop import gelu, zodiac

from regionprep.models.attention import MemoryCache, ZodiacAttention

POOLS = ["causal", "head", "sample", "batch", "released"]
IMAGES, CAPTIONS, QUERIES, KEYS, WIDTH = 2, 2, 3, 4, 4


def attention(**options) -> ZodiacAttention:
    torch.manual_seed(0)
    return ZodiacAttention(width=WIDTH, heads=2, **options).double().eval()


@pytest.mark.parametrize("pool", POOLS)
def test_self_attention_over_regions_is_the_equations(pool):
    module, x = attention(pool=pool), random(IMAGES, KEYS, WIDTH)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    fast = module(x, x, x, mask=mask, query_mask=mask)
    seen = mask[:, None].expand(-1, KEYS, -1)
    slow = zodiac(module, x, x, x, seen, mask, pool=pool, mask_sum=mask.sum())
    assert_same(module, [x], fast, slow)


@pytest.mark.parametrize("pool", POOLS)
def test_attention_of_captions_over_regions_is_the_equations(pool):
    module, memory = attention(pool=pool), random(IMAGES, KEYS, WIDTH)
    query = random(IMAGES * CAPTIONS, QUERIES, WIDTH)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    words = torch.tensor([[True, True, True], [True, False, False], [True, True, False]] * 2)[:4]
    fast = module(query, memory, memory, mask=mask, query_mask=words)
    keys = memory.repeat_interleave(CAPTIONS, 0)
    seen = mask.repeat_interleave(CAPTIONS, 0)
    slow = zodiac(
        module,
        query,
        keys,
        keys,
        seen[:, None].expand(-1, QUERIES, -1),
        words,
        pool=pool,
        mask_sum=seen.sum(),
    )
    assert_same(module, [query, memory], fast, slow)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("padded", [False, True])
def test_causal_self_attention_is_the_equations(pool, padded):
    module, x = attention(pool=pool), random(IMAGES, QUERIES, WIDTH)
    words = torch.tensor([[True, True, True], [True, True, not padded]])
    mask = words if padded else None
    fast = module(x, x, x, mask=mask, query_mask=mask, causal=True)
    seen = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril() & words[:, None]
    # Without padding the released mask has one row for the whole batch.
    mask_sum = seen.sum() if padded else seen[0].sum()
    slow = zodiac(module, x, x, x, seen, words, pool=pool, mask_sum=mask_sum)
    assert_same(module, [x], fast, slow)


@pytest.mark.parametrize("gate", ["sigmoid", "tanh", "identity", "off"])
@pytest.mark.parametrize("use_gelu", [True, False])
def test_gates_zoneup_and_gelu_are_the_equations(gate, use_gelu):
    module = attention(gate=gate, zoneup=0.7, gelu=use_gelu)
    x = random(IMAGES, KEYS, WIDTH)
    every = torch.ones(IMAGES, KEYS, KEYS, dtype=torch.bool)
    slow = zodiac(module, x, x, x, every, every[:, 0], pool="head", use_gelu=use_gelu)
    assert_same(module, [x], module(x, x, x), slow)


def test_released_pool_without_a_mask_is_the_mean_over_all():
    module, x = attention(pool="released"), random(IMAGES, KEYS, WIDTH)
    every = torch.ones(IMAGES, KEYS, KEYS, dtype=torch.bool)
    slow = zodiac(module, x, x, x, every, every[:, 0], pool="batch")
    torch.testing.assert_close(module(x, x, x), slow)


def test_a_mask_for_each_query_is_the_equations():
    module, x = attention(), random(IMAGES, KEYS, WIDTH)
    seen = torch.rand(IMAGES, KEYS, KEYS) < 0.5
    seen[0, 1] = False
    slow = zodiac(module, x, x, x, seen, torch.ones(IMAGES, KEYS), pool="head")
    assert_same(module, [x], module(x, x, x, mask=seen), slow)


def test_gelu_is_torchs_exact_one():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(torch.nn.functional.gelu(x), gelu(x))


def test_last_row_of_causal_is_head():
    causal, head = attention(pool="causal"), attention(pool="head")
    x = random(IMAGES, KEYS, WIDTH)
    last = slice(-1, None)
    torch.testing.assert_close(
        causal(x, x, x, causal=True)[:, last], head(x, x, x, causal=True)[:, last]
    )


@pytest.mark.parametrize(
    ("pool", "depends"), [("sample", False), ("batch", True), ("released", True)]
)
def test_only_batch_and_released_pools_depend_on_the_batch(pool, depends):
    module, x = attention(pool=pool), random(IMAGES, KEYS, WIDTH)
    mask = torch.tensor([[True] * KEYS, [True, True, False, False]])
    together = module(x, x, x, mask=mask, query_mask=mask)[:1]
    alone = module(x[:1], x[:1], x[:1], mask=mask[:1], query_mask=mask[:1])
    assert torch.allclose(together, alone) is not depends


@pytest.mark.parametrize("pool", ["head", "sample", "batch", "released"])
def test_pools_over_the_whole_target_let_later_words_leak(pool):
    module, x = attention(pool=pool), random(1, QUERIES, WIDTH)
    whole = module(x, x, x, causal=True)[:, :2]
    prefix = module(x[:, :2], x[:, :2], x[:, :2], causal=True)
    assert not torch.allclose(whole, prefix)


def test_released_pool_of_a_memory_counts_its_mask_once_in_a_search():
    """At the last step the release's mean goes over all steps, divided by one row of its mask."""
    module, memory = attention(pool="released"), random(IMAGES, KEYS, WIDTH)
    query = random(IMAGES, QUERIES, WIDTH)
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    whole = module(query, memory, memory, mask=mask)
    cache = MemoryCache()
    for step in range(QUERIES):
        last = module(query[:, step : step + 1], memory, memory, mask=mask, cache=cache)
    torch.testing.assert_close(last, whole[:, -1:])


def test_dropout_has_its_own_rate_and_falls_after_the_values():
    module = attention(dropout=0.5).train()
    with torch.no_grad():
        module.output.weight.copy_(torch.eye(WIDTH))
        module.output.bias.zero_()
    x = torch.randn(200, KEYS, WIDTH, dtype=torch.float64)
    dropped = (module(x, x, x) == 0).float().mean()
    assert 0.45 < dropped < 0.55
