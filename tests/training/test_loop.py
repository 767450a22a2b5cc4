"""The loop: it learns, keeps the best, refuses what does not fit and stops at nonsense."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up import BACKBONE, DETECTOR, WIDTH, image_id, manifest, right, row, words, write_features
from torch import Tensor

from regionprep import manifests
from regionprep.errors import BusyError, InputError, MismatchError, MissingError, TrainingError
from regionprep.models import beam_search
from regionprep.pipeline.claim import claimed
from regionprep.pipeline.shards import ImageRow
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.vocab import Vocabulary, WordVocabulary
from regionprep.training import load_run, loop, pad_regions, read_metrics, train
from regionprep.training.checkpoints import load
from regionprep.training.engine import Engine
from regionprep.training.losses import cross_entropy
from regionprep.workspace import Workspace


def fit(workspace: Workspace, *, recipe: dict[str, Any] | None = None, **options: Any) -> Path:
    given = {"detector": DETECTOR, "backbone": BACKBONE, "device": "cpu", "progress": False}
    return train(workspace, manifest(**recipe or {}), **(given | options))


def losses(folder: Path) -> list[float]:
    return [line["train_loss"] for line in read_metrics(folder / "metrics.jsonl") if epoch(line)]


def epoch(line: dict[str, Any]) -> bool:
    return bool(line["event"] == "epoch")


def last_weights(folder: Path) -> dict[str, Tensor]:
    return load(folder / "checkpoints" / "last.safetensors").weights()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left | right)


def test_learns_to_say_what_images_show(workspace: Workspace) -> None:
    folder = fit(workspace, recipe={"epochs": 20, "batch_images": 8, "learning_rate": 1e-2})
    run = load_run(folder, "cpu")
    store = FeatureStore(workspace.features(DETECTOR, BACKBONE))
    held_out = list(range(32, 40))
    regions = pad_regions([store[image_id(index)] for index in held_out])
    told = [run.vocabulary.decode(best[0].tokens) for best in beam_search(run.model, regions)]
    assert all(set(words(i)) <= set(said) for i, said in zip(held_out, told, strict=True))
    assert losses(folder)[-1] < 0.3 * losses(folder)[0]


def test_metrics_tell_every_epoch_and_the_steps_between(workspace: Workspace) -> None:
    folder = fit(workspace, score=right, select_by="right", log_every=4)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if epoch(line)] == [6, 12, 18]
    assert [line["epoch"] for line in lines if epoch(line)] == [1, 2, 3]
    assert [line["step"] for line in lines if not epoch(line)] == [4, 8, 12, 16, 18]
    assert {"train_loss", "val_loss", "val_right", "seconds"} <= lines[-1].keys()
    assert {"loss", "rate", "tokens_per_s", "gradient_norm", "data_share"} <= lines[0].keys()


def test_the_epoch_that_scores_best_is_kept(workspace: Workspace) -> None:
    figures = iter([0.2, 0.9, 0.4])
    folder = fit(workspace, score=lambda found: {"made_up": next(figures)}, select_by="made_up")
    best = load(folder / "checkpoints" / "best.safetensors").progress
    assert (best.step, best.best, best.best_epoch) == (12, 0.9, 1)
    assert json.loads((folder / "finished.json").read_text())["best_epoch"] == 2
    assert not same(last_weights(folder), load(folder / "checkpoints/best.safetensors").weights())


def test_without_a_score_the_lowest_loss_on_val_is_best(workspace: Workspace) -> None:
    folder = fit(workspace, recipe={"epochs": 4, "learning_rate": 0.05})
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if epoch(line)]
    lowest = min(lines, key=lambda line: line["val_loss"])
    best = load(folder / "checkpoints" / "best.safetensors").progress
    assert (best.step, best.best) == (lowest["step"], lowest["val_loss"])


def test_loss_on_val_is_the_mean_over_its_tokens(workspace: Workspace) -> None:
    folder = fit(workspace, recipe={"epochs": 1, "batch_images": 5})
    run = load_run(folder, "cpu", checkpoint="last")
    store = FeatureStore(workspace.features(DETECTOR, BACKBONE))
    data = loop.open_data(workspace, store, run.vocabulary, captions_per_image=2, seed=0)
    batch = data.val.batch(range(8))
    with torch.inference_mode():
        expected = cross_entropy(run.model(batch.regions, batch.inputs), batch.targets, pad=0)
    told = read_metrics(folder / "metrics.jsonl")[-1]["val_loss"]
    assert told == pytest.approx(expected.item(), rel=1e-4)


def test_an_unknown_metric_is_refused_with_those_there_are(workspace: Workspace) -> None:
    with pytest.raises(InputError, match=r"unknown metric 'wright'. Did you mean 'right'\?"):
        fit(workspace, score=right, select_by="wright")


def test_without_val_the_last_epoch_counts_as_the_best(workspace: Workspace) -> None:
    from made_up import write_dataset

    write_dataset(workspace, {"train": range(32)})
    folder = fit(workspace, score=right, select_by="right", recipe={"epochs": 2})
    best = load(folder / "checkpoints" / "best.safetensors").progress
    assert (best.step, best.best) == (12, None)


def test_stops_after_max_steps_with_a_validation(workspace: Workspace) -> None:
    folder = fit(workspace, max_steps=8)
    lines = read_metrics(folder / "metrics.jsonl")
    assert lines[-1]["step"] == 8
    assert "val_loss" in lines[-1]
    assert load_run(folder, "cpu").config.max_steps == 8


def test_same_seed_same_weights_another_seed_others(workspace: Workspace) -> None:
    runs = {
        name: last_weights(fit(workspace, name=name, seed=seed, max_steps=4))
        for name, seed in {"one": 0, "again": 0, "other": 1}.items()
    }
    assert same(runs["one"], runs["again"])
    assert not same(runs["one"], runs["other"])


def test_rate_follows_the_recipes_schedule(workspace: Workspace) -> None:
    recipe = {"schedule": "step", "decay": 0.5, "decay_every": 1, "learning_rate": 1e-3}
    folder = fit(workspace, recipe=recipe, log_every=6)
    rates = [line["rate"] for line in read_metrics(folder / "metrics.jsonl") if not epoch(line)]
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])


@pytest.mark.parametrize(
    ("recipe", "bound"), [({"clip_norm": 1e-3}, 1e-3), ({"clip_value": 1e-4}, None)]
)
def test_gradients_are_clipped_as_the_recipe_says(
    workspace: Workspace, recipe: dict[str, float], bound: float | None
) -> None:
    seen: list[float] = []

    def watch(engine: Engine, loss: Tensor) -> float:
        norm = backward(engine, loss)
        gradients = [p.grad for p in engine.captioner.parameters() if p.grad is not None]
        largest = max(gradient.abs().max().item() for gradient in gradients)
        seen.append(torch.nn.utils.get_total_norm(gradients).item() if bound else largest)
        return norm

    backward = Engine.backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "backward", watch)
        fit(workspace, recipe=recipe, max_steps=2)
    assert seen == pytest.approx([*recipe.values()] * 2, rel=1e-3)


def test_a_finished_run_is_left_as_it_is(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fit(workspace, max_steps=2)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert fit(workspace, max_steps=2, progress=True) == folder
    assert "run tiny is finished: nothing to do" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_name_with_another_configuration_is_refused_with_the_difference(
    workspace: Workspace,
) -> None:
    folder = fit(workspace, max_steps=2)
    with pytest.raises(MismatchError) as refusal:
        fit(workspace, max_steps=2, seed=5, recipe={"label_smoothing": 0.1})
    assert "seed is 0 there and 5 now" in str(refusal.value)
    assert "training.label_smoothing is 0.0 there and 0.1 now" in str(refusal.value)
    assert "--force" in str(refusal.value)
    fit(workspace, max_steps=2, seed=5, recipe={"label_smoothing": 0.1}, force=True)
    assert load_run(folder, "cpu").config.seed == 5


def test_features_made_anew_are_another_configuration(workspace: Workspace) -> None:
    fit(workspace, max_steps=2)
    write_features(workspace, [row(index) for index in range(41)], force=True)
    with pytest.raises(MismatchError, match=r"features is '[0-9a-f]{12}' there"):
        fit(workspace, max_steps=2)


def test_nothing_is_written_when_data_are_refused(workspace: Workspace) -> None:
    write_features(workspace, [row(index) for index in range(30)], force=True)
    with pytest.raises(MissingError, match="2 of the 32 train images have no features"):
        fit(workspace)
    assert not (workspace.root / "runs").exists()


def test_nothing_is_written_when_a_model_does_not_fit_the_features(workspace: Workspace) -> None:
    with pytest.raises(InputError, match="needs a feature map, and these features are sets"):
        train(workspace, manifests.load("models", "stt"), detector=DETECTOR, backbone=BACKBONE)
    assert not (workspace.root / "runs").exists()


def test_features_that_are_not_there_name_their_command(workspace: Workspace) -> None:
    with pytest.raises(MissingError, match="prep extract --detector made --backbone vgg"):
        fit(workspace, backbone="vgg")


def test_a_vocabulary_of_another_dataset_is_refused(workspace: Workspace) -> None:
    there = Vocabulary.load(workspace.vocabulary)
    WordVocabulary(there.words, there.counts, dataset="another").save(workspace.vocabulary)
    with pytest.raises(MismatchError, match="vocabulary of another dataset"):
        fit(workspace)


def test_a_second_process_on_a_run_is_refused(workspace: Workspace) -> None:
    folder = workspace.run("tiny")
    folder.mkdir(parents=True)
    with claimed(folder), pytest.raises(BusyError, match="worked on by process"):
        fit(workspace)


def spoil(monkeypatch: pytest.MonkeyPatch, *, at: int, by: float) -> None:
    """Multiply the loss of a step."""
    count = iter(range(1, 1000))

    def spoilt(*given: Any, **options: Any) -> Tensor:
        loss = cross_entropy(*given, **options)
        return loss * by if loss.requires_grad and next(count) == at else loss

    monkeypatch.setattr(loop, "cross_entropy", spoilt)


@pytest.mark.parametrize(("by", "what"), [(math.nan, "loss nan"), (math.inf, "loss inf")])
def test_a_loss_that_is_no_number_stops_with_the_last_good_checkpoint(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, by: float, what: str
) -> None:
    spoil(monkeypatch, at=5, by=by)
    with pytest.raises(TrainingError, match=f"{what}.* at step 5, in epoch 1, at a rate of 0.005"):
        fit(workspace, checkpoint_every=3)
    folder = workspace.run("tiny")
    assert load(folder / "checkpoints" / "last.safetensors").progress.step == 3
    record = json.loads((folder / "failure.json").read_text())
    assert (record["step"], record["epoch"], len(record["image_ids"])) == (5, 1, 6)
    monkeypatch.undo()
    undisturbed = last_weights(fit(workspace, name="other", checkpoint_every=3))
    assert same(last_weights(fit(workspace, checkpoint_every=3)), undisturbed)
    assert not (folder / "failure.json").exists()


def test_a_gradient_that_is_no_number_stops_before_the_weights_are_spoilt(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, at=2, by=1e38)
    with pytest.raises(TrainingError, match="norm of the gradients inf at step 2"):
        fit(workspace)


@pytest.mark.parametrize("name", ["last", "best"])
def test_a_torn_checkpoint_is_told_and_replaced_by_the_whole_one(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    undisturbed = last_weights(fit(workspace, name="other"))
    folder = fit(workspace)
    (folder / "finished.json").unlink()
    torn = folder / "checkpoints" / f"{name}.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    fit(workspace, progress=True)
    assert f"{name}.safetensors: the checkpoint is torn" in capsys.readouterr().err
    assert same(last_weights(folder), undisturbed)
    assert load_run(folder, "cpu", checkpoint=name)


def test_an_interrupted_run_says_where_it_stands_and_goes_on(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(engine: Engine, rate: float) -> None:
        if next(count) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        update(engine, rate)

    update, count = Engine.update, iter(range(1, 100))
    monkeypatch.setattr(Engine, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(workspace)
    told = capsys.readouterr().err
    assert "stopped at step 7 of 18; the same command goes on after step 6" in told
    monkeypatch.undo()
    fit(workspace, progress=True)
    assert "going on after step 6 of 18" in capsys.readouterr().err


def test_low_precision_trains_and_keeps_float32_weights(workspace: Workspace) -> None:
    folder = fit(workspace, precision="bf16-mixed", score=right, select_by="right", max_steps=3)
    assert {weight.dtype for weight in last_weights(folder).values()} == {torch.float32}
    assert load_run(folder, "cpu").config.precision == "bf16-mixed"


def test_images_whose_features_failed_are_counted(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ImageRow.failed(image_id(3), "truncated", "ends early", feature_width=WIDTH)
    write_features(workspace, [failed, *(row(i) for i in range(40) if i != 3)], force=True)
    fit(workspace, max_steps=1, progress=True)
    told = capsys.readouterr().err
    assert "31 images to train on, 1 left out for their features have failed" in told


def test_out_of_memory_names_the_batch_and_a_smaller_one(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: Engine, loss: Tensor) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "backward", fail)
    with pytest.raises(TrainingError, match=r"no room for a batch of 6 images\n.*--batch-images 3"):
        fit(workspace)


def test_a_diverging_run_stops(workspace: Workspace) -> None:
    with pytest.raises(TrainingError, match="learning_rate"):
        fit(workspace, recipe={"learning_rate": 1e35})
