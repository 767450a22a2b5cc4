from __future__ import annotations

import math

import connection_loops as loops
import pytest
import torch
from comparing import assert_same, random
from samples import regions, tiny

from regionprep.errors import InputError
from regionprep.models import attention, connections
from regionprep.models.attention import MemoryAttention
from regionprep.models.connections import Memory

IMAGES, CAPTIONS, WORDS, REGIONS, WIDTH, LAYERS = 2, 2, 3, 4, 4, 3
MASK = torch.tensor([[True, True, False, True], [False] * REGIONS])


def memory_attention(**options) -> MemoryAttention:
    torch.manual_seed(0)
    return MemoryAttention(width=WIDTH, heads=2, **options).double()


def meshed(norm_first: bool) -> connections.Connection:
    torch.manual_seed(0)
    return connections.build(
        "meshed",
        attention=lambda: attention.build("dot", width=WIDTH, heads=2, decoder=True),
        width=WIDTH,
        dropout=0.0,
        norm_first=norm_first,
        layers=LAYERS,
    ).double()


@pytest.mark.parametrize("slots", [1, 3])
def test_memory_slots_are_the_equations(slots):
    module, x = memory_attention(slots=slots), random(IMAGES, REGIONS, WIDTH)
    fast = module(x, x, x, mask=MASK, query_mask=MASK)
    slow = [
        loops.memory_augmented(module, query, image[seen], image[seen])
        for image, seen in zip(x, MASK, strict=True)
        for query in image
    ]
    assert_same(module, [x], fast, torch.stack(slow).reshape(x.shape))


def test_slots_are_seen_where_nothing_is_masked():
    module, x = memory_attention(slots=2), random(IMAGES, REGIONS, WIDTH)
    slow = [loops.memory_augmented(module, query, image, image) for image in x for query in image]
    torch.testing.assert_close(module(x, x, x), torch.stack(slow).reshape(x.shape))


def test_slots_start_with_the_deviations_of_the_authors_code():
    module = MemoryAttention(width=512, heads=8)
    assert module.slot_keys.shape == module.slot_values.shape == (1, 40, 512)
    torch.testing.assert_close(module.slot_keys.std().item(), 1 / 64, atol=1e-3, rtol=0)
    torch.testing.assert_close(module.slot_values.std().item(), 1 / 40, atol=1e-3, rtol=0)


def test_memory_without_slots_is_refused():
    with pytest.raises(InputError, match="argument 'slots' of attention 'memory'"):
        attention.build("memory", width=WIDTH, heads=2, options={"slots": 0})


@pytest.mark.parametrize("norm_first", [True, False])
def test_meshed_connection_is_the_equations(norm_first):
    module, hidden = meshed(norm_first), random(IMAGES * CAPTIONS, WORDS, WIDTH)
    layers = tuple(random(IMAGES, REGIONS, WIDTH) for _ in range(LAYERS))
    fast = module(hidden, Memory(layers, MASK))
    slow = []
    for row, words in enumerate(hidden):
        image = row // CAPTIONS
        seen = [layer[image][MASK[image]] for layer in layers]
        for word in words:
            slow.append(
                loops.add_and_norm(
                    module.residual, word, lambda y, seen=seen: loops.meshed(module, y, seen)
                )
            )
    assert_same(module, [hidden, *layers], fast, torch.stack(slow).reshape(hidden.shape))


def test_open_gates_add_what_all_layers_give_by_their_square_root():
    module, hidden = meshed(norm_first=True), random(1, WORDS, WIDTH)
    for gate in module.gates:
        torch.nn.init.zeros_(gate.weight)
        torch.nn.init.constant_(gate.bias, 100.0)
    layer, mask = random(1, REGIONS, WIDTH), torch.ones(1, REGIONS, dtype=torch.bool)
    query = module.residual.norm(hidden)
    once = module.attention(query, layer, layer, mask=mask)
    got = module(hidden, Memory((layer,) * LAYERS, mask))
    torch.testing.assert_close(got, hidden + math.sqrt(LAYERS) * once)


def test_a_meshed_decoder_has_a_gate_for_each_layer_of_the_encoder():
    model = tiny(encoder_layers=3, decoder_layers=2, connection="meshed")
    assert [len(layer.connection.gates) for layer in model.decoder] == [3, 3]
    state = model.start(model.encode(regions([3])), 2)
    assert [len(cache.memory) for cache in state.caches] == [3, 3]
