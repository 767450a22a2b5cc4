"""Schedules against values worked out by hand."""

from __future__ import annotations

import pytest

from regionprep.manifests import TrainingRecipe
from regionprep.training.schedules import constant, linear_warmup, noam, schedule, step_decay


def test_constant_is_the_rate() -> None:
    assert [constant(step, rate=5e-4) for step in (1, 10, 10**6)] == [5e-4] * 3


def test_noam_rises_to_its_peak_and_falls_with_the_root() -> None:
    rates = [noam(step, rate=1.0, warmup=100) for step in (1, 50, 100, 400, 10_000)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 0.5, 0.1])


def test_noam_equals_the_papers_formula() -> None:
    width, warmup = 512, 4000
    for step in (1, 399, 4000, 123_456):
        paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert noam(step, rate=(width * warmup) ** -0.5, warmup=warmup) == pytest.approx(paper)


def test_step_decay_changes_after_every_period() -> None:
    rates = [step_decay(step, rate=1.0, factor=0.8, every=3) for step in range(1, 8)]
    assert rates == pytest.approx([1, 1, 1, 0.8, 0.8, 0.8, 0.64])


def test_warmup_is_linear_and_then_over() -> None:
    assert [linear_warmup(step, warmup=4) for step in (1, 2, 4, 5, 99)] == [0.25, 0.5, 1, 1, 1]
    assert linear_warmup(1, warmup=0) == 1


def test_recipe_decays_by_epochs_after_a_warmup_in_steps() -> None:
    recipe = TrainingRecipe(
        schedule="step", learning_rate=5e-4, decay=0.8, decay_every=3, warmup=10
    )
    rate = schedule(recipe, steps_per_epoch=100)
    # Three epochs of 100 steps at the full rate, then x0.8; the first ten steps lead up to it.
    expected = [5e-5, 5e-4, 5e-4, 4e-4, 4e-4, 3.2e-4]
    assert [rate(step) for step in (1, 10, 300, 301, 600, 601)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "first", "later"), [("constant", 1e-4, 1e-3), ("noam", 1e-4, 1e-3 / 2)]
)
def test_recipe_names_its_schedule(name: str, first: float, later: float) -> None:
    recipe = TrainingRecipe(schedule=name, learning_rate=1e-3, warmup=10)
    rate = schedule(recipe, steps_per_epoch=7)
    assert (rate(1), rate(40)) == pytest.approx((first, later))


def test_step_decay_begins_where_it_is_told() -> None:
    rates = [step_decay(step, rate=1.0, factor=0.5, every=2, first=4) for step in range(1, 9)]
    assert rates == pytest.approx([1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125])


def test_recipe_warms_up_and_decays_by_epochs_as_ng_san_does() -> None:
    recipe = TrainingRecipe(
        learning_rate=3e-4, warmup_epochs=3, decay=0.5, decay_every=3, decay_from=7
    )
    rate = schedule(recipe, steps_per_epoch=10)
    expected = [1e-4, 2e-4, *[3e-4] * 4, *[1.5e-4] * 3, *[0.75e-4] * 3, *[0.375e-4] * 3]
    for epoch, expected_rate in enumerate(expected):
        first, last = 10 * epoch + 1, 10 * epoch + 10
        assert (rate(first), rate(last)) == pytest.approx((expected_rate, expected_rate))


def test_both_warmups_hold_where_both_are_given() -> None:
    recipe = TrainingRecipe(schedule="constant", learning_rate=1.0, warmup=4, warmup_epochs=2)
    rate = schedule(recipe, steps_per_epoch=4)
    assert [rate(step) for step in (1, 4, 5, 8)] == pytest.approx([0.125, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("name", ["san", "n_san", "g_san", "ng_san", "san_absolute"])
def test_the_models_of_ng_san_have_its_rates(name: str) -> None:
    from regionprep import manifests

    rate = schedule(manifests.load("models", name).training, steps_per_epoch=1)
    assert [rate(epoch) for epoch in (1, 2, 3, 6, 7, 10, 15)] == pytest.approx(
        [1e-4, 2e-4, 3e-4, 3e-4, 1.5e-4, 0.75e-4, 0.375e-4]
    )
