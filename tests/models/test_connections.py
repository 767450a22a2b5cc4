"""The contract of every connection in the registry, through every attention of decoders."""

from __future__ import annotations

import pytest
import torch
from samples import GRID

from regionprep.errors import InputError
from regionprep.models import attention, connections
from regionprep.models.attention import MECHANISMS
from regionprep.models.connections import CONNECTIONS, Memory
from regionprep.models.options import takes

WIDTH, HEADS, LAYERS = 16, 4, 3
REGIONS = GRID[0] * GRID[1]
DECODERS = [name for name, kind in MECHANISMS.items() if kind.decodes]

every = pytest.mark.parametrize("name", CONNECTIONS)
through = pytest.mark.parametrize("looking", DECODERS)
norms = pytest.mark.parametrize("norm_first", [True, False])


def connection(name, looking="dot", *, norm_first=True, dropout=0.0):
    torch.manual_seed(0)
    return connections.build(
        name,
        attention=lambda: attention.build(
            looking,
            width=WIDTH,
            heads=HEADS,
            decoder=True,
            grid=GRID,
            options={"dropout": 0.0},
        ),
        width=WIDTH,
        dropout=dropout,
        norm_first=norm_first,
        layers=LAYERS,
    )


def memory(counts, *, regions=REGIONS, requires_grad=False):
    layers = tuple(
        torch.randn(len(counts), regions, WIDTH, requires_grad=requires_grad) for _ in range(LAYERS)
    )
    return Memory(layers, torch.arange(regions) < torch.tensor(counts)[:, None])


def same(got, expected):
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@every
@through
@norms
def test_output_has_the_shape_of_the_hidden_states(name, looking, norm_first):
    module = connection(name, looking, norm_first=norm_first)
    for rows in (2, 6):
        assert module(torch.randn(rows, 3, WIDTH), memory([4, 2])).shape == (rows, 3, WIDTH)


@every
@through
@norms
def test_all_weights_get_finite_gradients(name, looking, norm_first):
    module, images = connection(name, looking, norm_first=norm_first), memory([4, 2])
    direction = torch.randn(4, 3, WIDTH)
    (module(torch.randn(4, 3, WIDTH), images) * direction).sum().backward()
    weights = dict(module.named_parameters())
    assert [k for k, w in weights.items() if w.grad is None or not w.grad.isfinite().all()] == []


@every
def test_connections_of_all_layers_look_at_each_and_others_at_the_last(name):
    images = memory([4, 2], requires_grad=True)
    connection(name)(torch.randn(4, 3, WIDTH), images).square().sum().backward()
    looked_at = [layer.grad is not None and bool(layer.grad.any()) for layer in images.layers]
    of_all = takes(CONNECTIONS[name], "layers")
    assert looked_at == ([True] * LAYERS if of_all else [False] * (LAYERS - 1) + [True])


@every
@through
def test_masked_regions_are_ignored(name, looking):
    module, hidden, images = connection(name, looking), torch.randn(6, 3, WIDTH), memory([3, 6, 0])
    noisy = tuple(torch.where(images.mask[..., None], layer, 99.0) for layer in images.layers)
    same(module(hidden, Memory(noisy, images.mask)), module(hidden, images))


@every
@through
def test_batch_mates_and_captions_of_an_image_are_ignored(name, looking):
    module, hidden, images = connection(name, looking), torch.randn(6, 3, WIDTH), memory([3, 6, 1])
    words = torch.arange(3) < torch.tensor([[3], [1], [2], [3], [1], [3]])
    together = module(hidden, images, words=words)[2:3]
    alone = Memory(tuple(layer[1:2] for layer in images.layers), images.mask[1:2])
    got = module(hidden[2:3], alone, words=words[2:3])
    same(got[words[2:3]], together[words[2:3]])


@every
@through
@norms
def test_images_without_regions_give_finite_numbers_and_gradients(name, looking, norm_first):
    module = connection(name, looking, norm_first=norm_first)
    for counts, regions in (([0, 3], REGIONS), ([0, 0], REGIONS), ([0, 0], 0)):
        hidden = torch.randn(4, 3, WIDTH, requires_grad=True)
        images = memory(counts, regions=regions, requires_grad=True)
        output = module(hidden, images)
        module.zero_grad()
        output.square().sum().backward()
        assert output.isfinite().all() and hidden.grad.isfinite().all()
        assert all(i.grad.isfinite().all() for i in images.layers if i.grad is not None)
        assert all(w.grad.isfinite().all() for w in module.parameters() if w.grad is not None)


@every
@through
def test_later_words_do_not_change_earlier_ones(name, looking):
    module, hidden, images = connection(name, looking), torch.randn(4, 5, WIDTH), memory([4, 2])
    same(module(hidden[:, :3], images), module(hidden, images)[:, :3])


@every
@through
@torch.no_grad()
def test_words_step_by_step_are_as_all_at_once(name, looking):
    module, hidden, images = connection(name, looking), torch.randn(4, 5, WIDTH), memory([4, 0])
    caches = module.caches(images)
    parts = [module(word, images, caches=caches) for word in hidden.split(1, 1)]
    same(torch.cat(parts, 1), module(hidden, images))


@every
@through
@torch.no_grad()
def test_reordered_caches_go_on_from_other_rows(name, looking):
    module, hidden, images = connection(name, looking), torch.randn(4, 4, WIDTH), memory([4, 2])
    index, caches = torch.tensor([1, 1, 2, 2]), module.caches(images)
    module(hidden[:, :3], images, caches=caches)
    for cache in caches:
        cache.reorder(index)
    got = module(hidden[:, 3:], images, caches=caches)
    joined = torch.cat([hidden[index, :3], hidden[:, 3:]], 1)
    same(got, module(joined, images)[:, 3:])


@every
def test_evaluation_is_deterministic_and_training_is_not(name):
    module, images = connection(name, dropout=0.5), memory([4, 2])
    hidden = torch.randn(4, 3, WIDTH)
    assert not torch.equal(module(hidden, images), module(hidden, images))
    module.eval()
    assert torch.equal(module(hidden, images), module(hidden, images))


@every
@through
def test_export_computes_the_same(name, looking):
    module, hidden, images = connection(name, looking), torch.randn(4, 3, WIDTH), memory([4, 2])

    class Exported(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module.eval()

        def forward(self, hidden, mask, *layers):
            return self.inner(hidden, Memory(layers, mask))

    arguments = (hidden, images.mask, *images.layers)
    same(torch.export.export(Exported(), arguments).module()(*arguments), module(hidden, images))


@every
def test_options_that_do_not_exist_are_refused(name):
    with pytest.raises(InputError, match=f"unknown argument of connection '{name}' 'layers'"):
        connections.build(
            name,
            attention=lambda: attention.build("dot", width=WIDTH, heads=HEADS),
            width=WIDTH,
            dropout=0.0,
            norm_first=True,
            layers=LAYERS,
            options={"layers": 2},
        )
