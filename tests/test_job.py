"""The main job on a handful of scenes: every stage for real, small enough for any machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from regionprep import captioning, job, scenes
from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.detect import run_detect
from regionprep.pipeline.images import ImageReader
from regionprep.pipeline.splits import make_splits, read_images
from regionprep.workspace import Workspace

MANIFEST = """
summary: A handful of scenes.
images: {kind: scenes, seed: 0}
captions: {kind: scenes}
splits: {train: 40, val: 8, test: 6}
defaults: {detector: scenes, backbone: roi, model: zodiac, preset: tiny, min_count: 1}
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return a workspace in which every stage is done."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "handful.yaml").write_text(MANIFEST)
    workspace = initialise(folder / "work", dataset=str(folder / "handful.yaml"))
    commands = job.run_all(workspace)
    assert [command.split()[1] for command in commands] == [
        "splits",
        "vocab",
        "detect",
        "extract",
        "train",
        "caption",
        "evaluate",
    ]
    return workspace


def test_a_second_run_does_nothing_and_says_so(
    done: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.root.rglob("*") if path.is_file()}
    assert job.run_all(done) == {}
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_status_shows_every_stage_as_done(done: Workspace) -> None:
    lines = job.describe(done).splitlines()[1:]
    assert len(lines) == 7
    assert all(line.startswith("  done") for line in lines)


def test_every_image_of_the_split_is_captioned_and_scored(done: Workspace) -> None:
    run = job.run_folder(done)
    captions = json.loads((run / "captions.json").read_text())
    scores = json.loads((run / "scores.json").read_text())
    assert [row["image_id"] for row in captions] == [
        f"scene-{index:06d}" for index in range(48, 54)
    ]
    assert set(scores["per_image"]) == {row["image_id"] for row in captions}
    assert set(scores["corpus"]) >= {"bleu_1", "bleu_4", "rouge_l", "cider", "cider_d"}


def test_a_photograph_gets_the_caption_of_the_same_image_in_the_split(
    done: Workspace, tmp_path: Path
) -> None:
    rows = json.loads((job.run_folder(done) / "captions.json").read_text())
    photo = tmp_path / "photo.png"
    Image.fromarray(scenes.draw(scenes.scene(0, 48))).save(photo)
    [(path, text)] = captioning.caption_photos(done, [photo])
    assert (path, text) == (photo, rows[0]["caption"])


def test_a_photograph_that_is_no_image_is_refused_by_name(done: Workspace, tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_text("not an image")
    with pytest.raises(InputError, match=r"photo\.jpg: not_an_image"):
        captioning.caption_photos(done, [photo])


def test_the_sheet_is_a_picture_of_the_split(done: Workspace) -> None:
    with Image.open(captioning.draw_sheet(done, count=6)) as sheet:
        assert sheet.width > 1000


def test_an_unknown_split_or_run_names_those_there_are(done: Workspace) -> None:
    with pytest.raises(InputError, match=r"unknown split 'tset'\. Did you mean 'test'"):
        captioning.caption_split(done, split="tset")
    with pytest.raises(InputError, match=r"unknown run 'zodiak-tiny'\. Did you mean 'zodiac-tiny'"):
        captioning.find_run(done, "zodiak-tiny")


def test_scores_before_captions_name_the_command(done: Workspace) -> None:
    with pytest.raises(MissingError, match="prep caption --run zodiac-tiny --split val"):
        captioning.evaluate_split(done, split="val")


def test_training_before_features_names_the_command(tmp_path: Path) -> None:
    (tmp_path / "handful.yaml").write_text(MANIFEST)
    workspace = initialise(tmp_path / "work", dataset=str(tmp_path / "handful.yaml"))
    with pytest.raises(MissingError, match="prep extract"):
        job.train_captioner(workspace)


def test_other_boxes_than_the_features_are_refused_before_training(
    done: Workspace, tmp_path: Path
) -> None:
    import shutil

    copy = tmp_path / "work"
    shutil.copytree(done.root, copy)
    workspace = Workspace.open(copy)
    run_detect(workspace, "scenes", max_boxes=12, force=True, progress=False)
    with pytest.raises(MismatchError, match="other boxes"):
        job.train_captioner(workspace, name="another")
    assert not workspace.run("another").exists()


def test_a_bare_folder_of_images_needs_neither_captions_nor_vocabulary(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(3):
        Image.fromarray(scenes.draw(scenes.scene(1, index))).save(photos / f"{index}.png")
    workspace = initialise(tmp_path / "work", images=photos)
    commands = [step.command.split()[1] for step in job.steps(workspace)]
    assert commands == ["splits", "detect", "extract"]
    make_splits(workspace)
    assert run_detect(workspace, "whole", progress=False).regions == 3
    [first, *_] = read_images(workspace)
    assert ImageReader(workspace).read(first.path).shape == (scenes.HEIGHT, scenes.WIDTH, 3)


def test_captioning_is_deterministic(done: Workspace) -> None:
    path = captioning.caption_split(done).path
    before = path.read_bytes()
    torch.manual_seed(1)
    assert captioning.caption_split(done).path.read_bytes() == before
