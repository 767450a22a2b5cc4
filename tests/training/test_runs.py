"""A run's folder: configuration, presets, and opening it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up import BACKBONE, DETECTOR, manifest

from regionprep.errors import ManifestError, MismatchError, MissingError, StorageError
from regionprep.manifests import ModelManifest, ParameterCount, Preset
from regionprep.pipeline.vocab import Vocabulary, WordVocabulary
from regionprep.training import RunConfig, load_run, train
from regionprep.training.runs import resolve
from regionprep.workspace import Workspace


@pytest.fixture
def folder(workspace: Workspace) -> Path:
    """Return a short run's folder."""
    return train(
        workspace,
        with_presets(),
        preset="small",
        detector=DETECTOR,
        backbone=BACKBONE,
        device="cpu",
        max_steps=2,
        progress=False,
    )


def with_presets() -> ModelManifest:
    small = Preset(arguments={"feed_forward": 8}, training={"epochs": 2, "label_smoothing": 0.1})
    wrong = Preset(training={"epoch": 2})
    return manifest().model_copy(update={"presets": {"small": small, "wrong": wrong}})


def test_configuration_comes_back_as_it_was_written(folder: Path) -> None:
    config = RunConfig.load(folder)
    assert folder.name == config.name == "tiny-small"
    assert config.model == resolve(with_presets(), "small")
    assert (config.detector, config.backbone) == (DETECTOR, BACKBONE)
    assert config.versions.keys() == {"regionprep", "torch", "python"}
    before = (folder / "config.yaml").read_bytes()
    config.save(folder)
    assert (folder / "config.yaml").read_bytes() == before
    assert RunConfig.load(folder) == config


def test_a_preset_changes_arguments_and_recipe() -> None:
    resolved = resolve(with_presets(), "small", batch_images=7)
    assert resolved.arguments == manifest().arguments | {"feed_forward": 8}
    assert (resolved.training.epochs, resolved.training.batch_images) == (2, 7)
    assert resolved.training.label_smoothing == 0.1
    assert resolved.presets == {}


def test_base_is_the_manifest_itself_and_the_user_comes_before_the_preset() -> None:
    assert resolve(with_presets(), "base").arguments == manifest().arguments
    assert resolve(with_presets(), "small", epochs=9).training.epochs == 9


def test_what_a_paper_reports_stays_with_its_own_size_and_recipe() -> None:
    told = {
        "scores": {"bleu_4": 36.8},
        "parameters": ParameterCount(count=7),
        "command": "prep train --model tiny",
    }
    reported = with_presets().model_copy(update=told)

    def kept(**changes: Any) -> set[str]:
        resolved = resolve(reported, **{"preset": "base", **changes})
        return {name for name, value in told.items() if getattr(resolved, name) == value}

    assert kept() == told.keys()
    assert kept(epochs=9) == {"parameters"}
    assert kept(preset="small") == set()


def test_an_unknown_preset_or_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ManifestError, match=r"unknown preset 'smal'. Did you mean 'small'\?"):
        resolve(with_presets(), "smal")
    with pytest.raises(ManifestError, match=r"unknown key 'epoch'. Did you mean 'epochs'\?"):
        resolve(with_presets(), "wrong")


def test_a_name_that_leads_elsewhere_is_refused(workspace: Workspace) -> None:
    with pytest.raises(ManifestError, match=r"name: .*'../../elsewhere'"):
        train(
            workspace,
            manifest(),
            name="../../elsewhere",
            detector=DETECTOR,
            backbone=BACKBONE,
            device="cpu",
            progress=False,
        )


def test_a_run_opens_in_eval_mode_with_its_own_vocabulary(
    folder: Path, workspace: Workspace
) -> None:
    there = Vocabulary.load(workspace.vocabulary)
    workspace.vocabulary.unlink()
    run = load_run(folder, "cpu")
    assert not run.model.training
    assert run.vocabulary == there


def test_another_vocabulary_is_refused_naming_both(folder: Path) -> None:
    there = Vocabulary.load(folder / "vocab.json")
    other = WordVocabulary([*there.words, "zebra"], [*there.counts, 1])
    other.save(folder / "vocab.json")
    with pytest.raises(MismatchError) as refusal:
        load_run(folder, "cpu")
    assert other.fingerprint[:12] in str(refusal.value)
    assert there.fingerprint[:12] in str(refusal.value)


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(
    folder: Path, workspace: Workspace
) -> None:
    other = train(
        workspace,
        manifest(),
        detector=DETECTOR,
        backbone=BACKBONE,
        device="cpu",
        max_steps=1,
        progress=False,
    )
    best = Path("checkpoints", "best.safetensors")
    (folder / best).write_bytes((other / best).read_bytes())
    with pytest.raises(MismatchError, match=r"arguments.feed_forward is 32 there and 8 now"):
        load_run(folder, "cpu")


def test_a_torn_checkpoint_is_no_model(folder: Path) -> None:
    best = folder / "checkpoints" / "best.safetensors"
    best.write_bytes(best.read_bytes()[:-1])
    with pytest.raises(StorageError, match="torn"):
        load_run(folder, "cpu")


def test_a_run_that_is_not_there_or_has_no_checkpoint_says_what_to_do(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(MissingError, match="prep train"):
        load_run(tmp_path / "nowhere", "cpu")
    (folder / "checkpoints" / "best.safetensors").unlink()
    with pytest.raises(MissingError, match="no best checkpoint yet"):
        load_run(folder, "cpu")
