"""A workspace is found from anywhere inside, and its files are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regionprep import manifests
from regionprep.captioning import find_run
from regionprep.errors import InputError, ManifestError, MissingError, StorageError
from regionprep.manifests import DatasetManifest, ImageSource
from regionprep.workspace import Workspace, write_bytes, write_text

DATASET = DatasetManifest(name="mine", summary="Mine.", images=ImageSource(root="images"))


def test_a_workspace_comes_back_from_its_file(tmp_path: Path):
    made = Workspace.create(tmp_path / "a" / "b", DATASET)
    assert Workspace.open(tmp_path / "a" / "b") == made


def test_every_command_finds_it_from_any_folder_inside(tmp_path: Path, monkeypatch):
    made = Workspace.create(tmp_path, DATASET)
    deep = tmp_path / "features" / "x"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert Workspace.find() == made
    assert Workspace.find(tmp_path) == made


def test_outside_of_any_workspace_the_command_that_makes_one_is_named(tmp_path: Path):
    for way in (Workspace.find, Workspace.open):
        with pytest.raises(MissingError, match=r"no workspace.yaml here.*\n.*prep init"):
            way(tmp_path)


def test_all_faults_of_its_file_are_told_together(tmp_path: Path):
    (tmp_path / "workspace.yaml").write_text("name: x\nsummary: x\nimages: {rot: y, seed: one}\n")
    with pytest.raises(ManifestError) as caught:
        Workspace.open(tmp_path)
    message = str(caught.value)
    assert "images: unknown key 'rot'. Did you mean 'root'?" in message
    assert "images.seed" in message


def test_another_dataset_does_not_take_its_place(tmp_path: Path):
    Workspace.create(tmp_path, DATASET)
    with pytest.raises(InputError, match="holds another workspace"):
        Workspace.create(tmp_path, DATASET.model_copy(update={"name": "other"}))
    assert Workspace.open(tmp_path).dataset == DATASET


def test_an_unchanged_choice_touches_no_file(tmp_path: Path):
    made = Workspace.create(tmp_path, DATASET)
    stamp = (tmp_path / "workspace.yaml").stat().st_mtime_ns
    made.save()
    assert (tmp_path / "workspace.yaml").stat().st_mtime_ns == stamp


def test_folders_follow_the_design(tmp_path: Path):
    made = Workspace(tmp_path, DATASET)
    assert made.regions("d") == tmp_path / "regions/d"
    assert made.features("d", "b") == tmp_path / "features/d/b"
    assert made.run("r") == tmp_path / "runs/r"
    assert made.image_root() == tmp_path / "images"


def finish(folder: Path, *, at: int = 0) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    os.utime(folder / "manifest.json", (at, at))


def test_the_detector_meant_is_the_only_one_here_or_the_default(tmp_path: Path):
    made = Workspace(tmp_path, DATASET)
    default = DATASET.defaults.detector
    assert made.choose_detector(None) == default
    finish(made.regions("whole"), at=2)
    assert made.choose_detector(None) == "whole"
    finish(made.regions("boxes"), at=1)
    with pytest.raises(InputError, match=r"several detectors could be meant: boxes, whole"):
        made.choose_detector(None)
    assert made.choose_detector("grid") == "grid"
    finish(made.regions(default), at=0)
    assert made.choose_detector(None) == default
    assert made.detectors() == ["whole", "boxes", default]


def test_features_are_listed_from_the_newest_to_the_oldest(tmp_path: Path):
    made = Workspace(tmp_path, DATASET)
    for at, pair in enumerate([("b", "x"), ("a", "y"), ("c", "x")]):
        finish(made.features(*pair), at=at)
    assert made.pairs() == [("c", "x"), ("a", "y"), ("b", "x")]
    assert made.choose_features("a", None) == ("a", "y")
    with pytest.raises(InputError, match=r"could be meant: a \+ y, b \+ x, c \+ x"):
        made.choose_features(None, None)


def begin_run(workspace: Workspace, name: str, *, trained: bool) -> None:
    folder = workspace.run(name)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    if trained:
        (folder / "checkpoints" / "last.safetensors").touch()
        (folder / "checkpoints" / "best.safetensors").touch()


def test_a_run_that_nothing_was_trained_in_hides_no_trained_one(tmp_path: Path):
    made = Workspace(tmp_path, DATASET)
    begin_run(made, "leftover", trained=False)
    assert find_run(made, None) == made.run("leftover")
    begin_run(made, "trained", trained=True)
    begin_run(made, "another", trained=False)
    assert find_run(made, None) == made.run("trained")
    assert find_run(made, "leftover") == made.run("leftover")


def test_several_trained_runs_are_named_and_one_is_asked_for(tmp_path: Path):
    made = Workspace(tmp_path, DATASET)
    for name in ("b", "a"):
        begin_run(made, name, trained=True)
    begin_run(made, "leftover", trained=False)
    with pytest.raises(InputError, match=r"several runs: a, b\n.*--run"):
        find_run(made, None)
    with pytest.raises(InputError, match=r"unknown run 'c'.*a, b, leftover"):
        find_run(made, "c")


def test_a_file_is_replaced_whole(tmp_path: Path):
    path = tmp_path / "file"
    write_text(path, "é" * 10)
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_says_what_it_needs(
    tmp_path: Path, monkeypatch, fails: str
):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if fails == "fsync" else (Path, "replace")), full)
    with pytest.raises(StorageError, match=r"No space left .* \(3 bytes needed, \d+ free\)"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_what_dead_processes_left_is_swept_and_what_living_ones_write_is_not(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    leftover, busy = tmp_path / f".file.{dead.pid}.tmp", tmp_path / ".file.1.tmp"
    foreign = tmp_path / ".file.notes.tmp"
    for file in (leftover, busy, foreign):
        file.touch()
    write_bytes(tmp_path / "file", b"x")
    assert not leftover.exists()
    assert busy.exists()
    assert foreign.exists()


def test_a_folder_that_is_not_there_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(StorageError, match="nowhere"):
        write_bytes(tmp_path / "nowhere" / "file", b"x")


def test_a_workspace_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the folder cannot be made: Not a directory"):
        Workspace.create(tmp_path / "file" / "work", manifests.load("datasets", "scenes"))
