from __future__ import annotations

import math

import pytest
import torch
from samples import GRID
from synthesizer_loop import (
    attend,
    kronecker,
    linformer,
    matrix_map,
    mode_product,
    softmax,
    tensor_map,
)

from regionprep.errors import InputError
from regionprep.models import attention
from regionprep.models.attention import MECHANISMS, Layout, MemoryCache, stt, stt_factorized

CELLS, WIDTH = GRID[0] * GRID[1], 4
MADE_FOR_A_GRID = [
    "synthesizer_dense",
    "stt",
    "stt_height",
    "stt_width",
    "stt_channel",
    "stt_sum",
    "stt_random",
    "stt_factorized",
    "stt_random_factorized",
    "stt_mixture",
    "linformer",
]
SYNTHESIZERS = MADE_FOR_A_GRID[:-1]

# Three factors, two, and one: the last is the matrix itself.
DENSE_FACTORS = [
    {},
    {
        "height_factors": [[2, 1], [1, 2], [3, 1]],
        "width_factors": [[3, 1], [2, 3]],
        "channel_factors": [[1, 4]],
    },
    {
        "height_factors": [[6, 2]],
        "width_factors": [[1, 1], [2, 3], [3, 1]],
        "channel_factors": [[1, 2], [1, 1], [1, 2]],
    },
]
RANDOM_FACTORS = [None, [[2, 3], [3, 2]], [[1, 3], [2, 1], [3, 2]], [[6, 6]]]


def mechanism(name, **options):
    torch.manual_seed(0)
    module = attention.build(name, width=WIDTH, heads=2, grid=GRID, options=options)
    for weight in module.parameters():
        torch.nn.init.normal_(weight)  # Maps that are far from even.
    return module.double().eval()


def images():
    random = torch.Generator().manual_seed(1)
    x = torch.randn(2, CELLS, WIDTH, dtype=torch.float64, generator=random)
    return x.requires_grad_()


def same(module, x, slow):
    """Compare outputs and the gradients of all weights and of the cells."""
    fast, slow = module(x, x, x), torch.stack(slow)
    torch.testing.assert_close(fast, slow)
    direction = torch.randn_like(fast)
    wanted = {"x": x, **dict(module.named_parameters())}
    grads = [
        torch.autograd.grad((output * direction).sum(), list(wanted.values()))
        for output in (fast, slow)
    ]
    for name, got, expected in zip(wanted, *grads, strict=True):
        torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")
    return fast


@pytest.mark.parametrize("name", ["stt", "stt_height", "stt_width", "stt_channel", "stt_sum"])
def test_tensor_dense_synthesizers_are_the_equations(name):
    module, x = mechanism(name), images()
    shapes = {
        "height": [(1, 2), (6, 3), (6, 4)],
        "width": [(6, 2), (1, 3), (6, 4)],
        "channel": [(6, 2), (6, 3), (1, 4)],
    }
    kinds = list(shapes) if name == "stt_sum" else [name.removeprefix("stt_")]
    wanted = [shapes["channel" if kind == "stt" else kind] for kind in kinds]
    assert [[tuple(m.shape) for m in one.matrices] for one in module.maps] == wanted
    slow = []
    for cells in x:
        maps = [softmax(tensor_map(cells, GRID, one.matrices)) for one in module.maps]
        slow.append(attend(module, cells, sum(maps)))  # Eq. 13, 14
    same(module, x, slow)


def test_matrix_dense_synthesizer_is_the_equations():
    module, x = mechanism("synthesizer_dense"), images()
    slow = []
    for cells in x:
        z = matrix_map(cells, module.inner.weight, module.outer.weight)
        slow.append(attend(module, cells, softmax(z)))
    same(module, x, slow)


def test_random_synthesizer_is_the_equations():
    module, x = mechanism("stt_random"), images()
    same(module, x, [attend(module, cells, softmax(module.random)) for cells in x])


def factorized_map(dense, cells):
    matrices = [kronecker(factors) for factors in (dense.height, dense.width, dense.channel)]
    return tensor_map(cells, GRID, matrices)


@pytest.mark.parametrize("factors", DENSE_FACTORS)
def test_factorized_synthesizer_is_the_equations(factors):
    module, x = mechanism("stt_factorized", **factors), images()
    slow = [attend(module, cells, softmax(factorized_map(module.dense, cells))) for cells in x]
    same(module, x, slow)


@pytest.mark.parametrize("factors", RANDOM_FACTORS)
def test_random_factorized_synthesizer_is_the_equations(factors):
    module, x = mechanism("stt_random_factorized", factors=factors), images()
    random = kronecker(module.random.factors)
    same(module, x, [attend(module, cells, softmax(random)) for cells in x])


@pytest.mark.parametrize("mix", ["logits", "letter"])
def test_mixture_synthesizer_is_the_equations(mix):
    module, x = mechanism("stt_mixture", mix=mix), images()
    total = module.theta.exp().sum()
    slow = []
    for cells in x:
        dense = factorized_map(module.dense, cells)
        dense = softmax(dense) if mix == "letter" else dense
        random = kronecker(module.random.factors)
        theta = [module.theta[i].exp() / total for i in (0, 1)]
        slow.append(attend(module, cells, softmax(theta[0] * dense + theta[1] * random)))
    same(module, x, slow)


@pytest.mark.parametrize("rank", [None, 1, 6])
def test_linformer_is_the_equations(rank):
    module, x = mechanism("linformer", rank=rank), images()
    same(module, x, [linformer(module, cells) for cells in x])


def test_linformers_rank_is_half_the_cells():
    assert mechanism("linformer").shorten_keys.shape == (3, CELLS)


@pytest.mark.parametrize("name", SYNTHESIZERS)
def test_rows_of_the_map_sum_to_one_and_of_the_sum_to_three(name):
    weights = mechanism(name).weights(images())
    total = 3.0 if name == "stt_sum" else 1.0
    torch.testing.assert_close(weights.sum(-1), torch.full_like(weights.sum(-1), total))
    assert weights.min() >= 0


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_mode_product_is_entry_by_entry(mode):
    x, matrix = torch.randn(2, 3, 4), torch.randn(5, (2, 3, 4)[mode])
    got = stt.mode_product(x, matrix, mode)
    torch.testing.assert_close(got, mode_product(x, matrix, mode + 1))


def test_row_major_cells_take_eq_9_in_the_reverse_order():
    x, matrices = torch.randn(2, 3, 4).double(), [torch.randn(5, n).double() for n in (2, 3, 4)]
    y = x
    for mode, matrix in enumerate(matrices):
        y = stt.mode_product(y, matrix, mode)
    first, second, third = matrices
    printed = torch.kron(torch.kron(third, second), first)
    column_major = x.permute(2, 1, 0).flatten()
    torch.testing.assert_close(y.permute(2, 1, 0).flatten(), printed @ column_major)  # Eq. 9
    reverse = torch.kron(torch.kron(first, second), third)
    torch.testing.assert_close(y.flatten(), reverse @ x.flatten())


def test_rows_and_columns_of_the_grid_are_not_confused():
    """A map that only looks at the top row of cells does not move with the cells below."""
    module, x = mechanism("stt"), images().detach()
    with torch.no_grad():
        module.maps[0].matrices[0][:, 1:] = 0
    below, above = x.clone(), x.clone()
    below[:, GRID[1] :] += 1
    above[:, : GRID[1]] += 1
    torch.testing.assert_close(module.weights(below), module.weights(x))
    assert not torch.allclose(module.weights(above), module.weights(x))


@pytest.mark.parametrize("shapes", [[(2, 3), (3, 2)], [(2, 2), (1, 3), (3, 1)], [(5, 6)]])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_factors_are_applied_as_their_kronecker_product(shapes, mode):
    factors = [torch.randn(*shape).double() for shape in shapes]
    columns = math.prod(wide for _, wide in shapes)
    x = torch.randn(2, 2, columns).double().movedim(-1, mode)
    whole = factors[0]
    for factor in factors[1:]:
        whole = torch.kron(whole, factor)
    torch.testing.assert_close(kronecker(factors), whole)
    got = stt_factorized.kronecker_mode_product(x, factors, mode)
    torch.testing.assert_close(got, stt.mode_product(x, whole, mode))


def test_factorized_synthesizer_never_writes_its_products_out(monkeypatch):
    def written(*matrices):
        raise AssertionError("a Kronecker product was written out")

    module = mechanism("stt_factorized")
    monkeypatch.setattr(torch, "kron", written)
    module.weights(images())


def test_stt_is_stt_channel():
    x, state = images(), mechanism("stt").state_dict()
    channel = mechanism("stt_channel")
    channel.load_state_dict(state)
    assert MECHANISMS["stt"] is MECHANISMS["stt_channel"]
    assert torch.equal(channel(x, x, x), mechanism("stt")(x, x, x))


def test_a_random_map_is_trained_or_left_as_it_is():
    trained, fixed = mechanism("stt_random"), mechanism("stt_random", trainable=False)
    assert "random" in dict(trained.named_parameters())
    assert "random" not in dict(fixed.named_parameters())
    assert fixed.state_dict()["random"].shape == (CELLS, CELLS)
    assert fixed.state_dict()["random"].std() > 0.1


def test_fixed_random_maps_differ_between_layers_and_survive_saving():
    torch.manual_seed(0)
    first, second = (
        attention.build(
            "stt_random", width=4, heads=2, grid=GRID, options={"trainable": False}
        ).eval()
        for _ in range(2)
    )
    assert not torch.equal(first.random, second.random)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.random, second.random)


def test_weights_of_the_mixture_are_equal_at_first_and_sum_to_one():
    module = attention.build("stt_mixture", width=WIDTH, heads=2, grid=GRID)
    assert module.theta.softmax(-1).tolist() == [0.5, 0.5]
    with torch.no_grad():
        module.theta.copy_(torch.tensor([1.0, -2.0]))
        module.random.factors[0].zero_()  # What is left of the logits is the image's share.
    x = torch.randn(2, CELLS, WIDTH)
    share = math.exp(1) / (math.exp(1) + math.exp(-2))
    torch.testing.assert_close(module.weights(x), (share * module.dense(x)).softmax(-1))


@pytest.mark.parametrize(("mix", "flat"), [("logits", False), ("letter", True)])
def test_to_the_letter_an_image_moves_no_weight_by_more_than_e(mix, flat):
    module, x = mechanism("stt_mixture", mix=mix), 100 * images()
    with torch.no_grad():
        module.random.factors[0].zero_()
    weights = module.weights(x)
    ratio = weights.amax(-1) / weights.amin(-1)
    assert bool((ratio <= math.e).all()) is flat


@pytest.mark.parametrize("name", MADE_FOR_A_GRID)
@pytest.mark.parametrize(
    ("keys", "grid", "given"),
    [
        (4, None, "4 of no known grid"),
        (6, None, "6 of no known grid"),
        (4, (2, 2), "of a grid of 2 x 2"),
        (6, (3, 2), "of a grid of 3 x 2"),
    ],
)
def test_other_regions_are_refused_by_both_grids(name, keys, grid, given):
    module, x = mechanism(name), torch.randn(2, keys, WIDTH).double()
    where = Layout(torch.zeros(2, keys, 4), torch.ones(2, 2), grid)
    mask = torch.ones(2, keys, dtype=torch.bool)
    with pytest.raises(InputError) as error:
        module(x, x, x, mask=mask, layout=where)
    message = f"the model is made for a grid of 2 x 3 cells, and these regions are {given}"
    assert str(error.value).startswith(message)
    assert "prep extract --backbone NAME --grid" in str(error.value)


@pytest.mark.parametrize("name", MADE_FOR_A_GRID)
def test_cells_without_a_layout_are_told_by_their_number(name):
    module, x = mechanism(name), images()
    where = Layout(torch.zeros(2, CELLS, 4), torch.ones(2, 2), GRID)
    assert torch.equal(module(x, x, x), module(x, x, x, layout=where))
    few = x[:, :4]
    with pytest.raises(InputError, match="2 x 3 cells, and these regions are 4 of no known grid"):
        module(few, few, few)


@pytest.mark.parametrize("name", MADE_FOR_A_GRID)
@pytest.mark.parametrize("keys", [0, 1])
def test_a_batch_whose_features_have_all_failed_has_no_grid_and_is_taken(name, keys):
    module, x = mechanism(name), torch.zeros(2, keys, WIDTH).double()
    where = Layout(torch.zeros(2, keys, 4), torch.ones(2, 2))
    output = module(x, x, x, mask=torch.zeros(2, keys, dtype=torch.bool), layout=where)
    assert torch.equal(output, module.output.bias.expand_as(output))


@pytest.mark.parametrize("name", MADE_FOR_A_GRID)
def test_what_sees_less_than_the_grid_sees_nothing(name):
    module, x = mechanism(name), images()
    whole, nothing = module(x, x, x), module.output.bias
    mask = torch.ones(2, CELLS, dtype=torch.bool)
    mask[1, 2] = False
    output = module(x, x, x, mask=mask)
    torch.testing.assert_close(output[0], whole[0])
    torch.testing.assert_close(output[1], nothing.expand(CELLS, -1))
    each = torch.ones(2, CELLS, CELLS, dtype=torch.bool)
    each[0, 3, 1] = False
    output = module(x, x, x, mask=each)
    torch.testing.assert_close(output[0, 3], nothing)
    torch.testing.assert_close(output[0, :3], whole[0, :3])
    torch.testing.assert_close(output[1], whole[1])


@pytest.mark.parametrize("name", MADE_FOR_A_GRID)
@pytest.mark.parametrize("words", [{"causal": True}, {"cache": MemoryCache()}])
def test_words_are_refused(name, words):
    module, x = mechanism(name), images()
    with pytest.raises(InputError, match="words cannot look through attention that is made for a"):
        module(x, x, x, **words)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "stt_factorized",
            {"height_factors": [[2, 2], [2, 1]]},
            "factors of A_(H), 6 x 2, multiply up to 4 x 2: 2 x 2 and 2 x 1\n  Choose factors "
            "[rows, columns] whose rows multiply up to 6 and whose columns multiply up to 2.",
        ),
        (
            "stt_factorized",
            {"width_factors": [[6, 2]]},
            "factors of A_(W), 6 x 3, multiply up to 6 x 2: 6 x 2",
        ),
        (
            "stt_factorized",
            {"channel_factors": [[1, 2], [1, 3]]},
            "factors of A_(C), 1 x 4, multiply up to 1 x 6: 1 x 2 and 1 x 3",
        ),
        (
            "stt_random_factorized",
            {"factors": [[2, 2], [2, 3]]},
            "factors of R, 6 x 6, multiply up to 4 x 6: 2 x 2 and 2 x 3",
        ),
        (
            "stt_mixture",
            {"random_factors": [[5, 6]]},
            "factors of R, 6 x 6, multiply up to 5 x 6: 5 x 6",
        ),
        (
            "stt_factorized",
            {"height_factors": [[2, 2, 2]]},
            "argument 'height_factors' of attention 'stt_factorized': List should have at most 2",
        ),
        (
            "stt_random_factorized",
            {"factors": []},
            "argument 'factors' of attention 'stt_random_factorized': List should have at least 1",
        ),
        (
            "stt_random_factorized",
            {"factors": [[0, 6]]},
            "argument 'factors' of attention 'stt_random_factorized': Input should be greater",
        ),
        (
            "stt_mixture",
            {"mix": "letters"},
            "argument 'mix' of attention 'stt_mixture': Input should be 'logits' or 'letter'",
        ),
        (
            "stt_random",
            {"trainable": "no"},
            "argument 'trainable' of attention 'stt_random': Input should be a valid boolean",
        ),
        ("linformer", {"rank": 7}, "a rank of 7 for 6 cells shortens nothing"),
        ("linformer", {"rank": 0}, "argument 'rank' of attention 'linformer': Input should be"),
    ],
)
def test_wrong_options_say_which(name, options, message):
    with pytest.raises(InputError) as error:
        mechanism(name, **options)
    assert str(error.value).startswith(message)
