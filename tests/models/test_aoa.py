from __future__ import annotations

import connection_loops as loops
import pytest
import torch
from comparing import assert_same, random

from regionprep.models import attention, connections
from regionprep.models.attention import AoaAttention
from regionprep.models.connections import Memory

IMAGES, CAPTIONS, WORDS, REGIONS, WIDTH = 2, 2, 3, 4, 4
MASK = torch.tensor([[True, True, False, True], [False] * REGIONS])


def aoa_attention() -> AoaAttention:
    torch.manual_seed(0)
    return AoaAttention(width=WIDTH, heads=2).double()


def connection(norm_first: bool) -> connections.Connection:
    torch.manual_seed(0)
    return connections.build(
        "aoa",
        attention=lambda: attention.build("dot", width=WIDTH, heads=2, decoder=True),
        width=WIDTH,
        dropout=0.0,
        norm_first=norm_first,
        layers=1,
    ).double()


def gated(module, query, keys):
    attended = loops.joined_heads(module, query, keys, keys)
    return loops.attention_on_attention(module.on_attention, query, attended)


def test_self_attention_over_regions_is_the_equations():
    module, x = aoa_attention(), random(IMAGES, REGIONS, WIDTH)
    fast = module(x, x, x, mask=MASK, query_mask=MASK)
    slow = [
        gated(module, query, image[seen])
        for image, seen in zip(x, MASK, strict=True)
        for query in image
    ]
    assert_same(module, [x], fast, torch.stack(slow).reshape(x.shape))


def test_causal_self_attention_is_the_equations():
    module, x = aoa_attention(), random(IMAGES, WORDS, WIDTH)
    slow = [gated(module, words[t], words[: t + 1]) for words in x for t in range(WORDS)]
    assert_same(module, [x], module(x, x, x, causal=True), torch.stack(slow).reshape(x.shape))


def test_a_query_that_may_look_at_nothing_has_only_its_own_part():
    module, x = aoa_attention(), random(IMAGES, REGIONS, WIDTH)
    nothing = torch.zeros(IMAGES, REGIONS, dtype=torch.bool)
    got = module(x, x, x, mask=nothing)
    torch.testing.assert_close(got, module.on_attention(x, torch.zeros_like(x)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_connection_is_the_equations(norm_first):
    module, hidden = connection(norm_first), random(IMAGES * CAPTIONS, WORDS, WIDTH)
    last = random(IMAGES, REGIONS, WIDTH)
    fast = module(hidden, Memory((torch.full_like(last, torch.nan), last), MASK))
    slow = []
    for row, words in enumerate(hidden):
        seen = last[row // CAPTIONS][MASK[row // CAPTIONS]]

        def branch(query, seen=seen):
            attended = loops.dot(module.attention, query, seen, seen)
            return loops.attention_on_attention(module.on_attention, query, attended)

        slow += [loops.add_and_norm(module.residual, word, branch) for word in words]
    assert_same(module, [hidden, last], fast, torch.stack(slow).reshape(hidden.shape))
