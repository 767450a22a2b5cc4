"""The main job on a handful of scenes: every stage for real, small enough for any machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from regionprep import captioning, cli, job, scenes
from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.detect import run_detect
from regionprep.pipeline.extract import run_extract
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


def copied(workspace: Workspace, folder: Path) -> Workspace:
    return Workspace.open(Path(shutil.copytree(workspace.root, folder / "copy")))


def small(folder: Path, **splits: int) -> Workspace:
    """Return a workspace of few scenes, with its tables, whose defaults name no backbone."""
    text = MANIFEST.replace("{train: 40, val: 8, test: 6}", json.dumps(splits))
    (folder / "few.yaml").write_text(text.replace("backbone: roi, ", ""))
    workspace = initialise(folder / "few", dataset=str(folder / "few.yaml"))
    make_splits(workspace)
    return workspace


def line_of(workspace: Workspace, verb: str) -> str:
    lines = [line.strip() for line in job.describe(workspace).splitlines()[1:]]
    [line] = [line for line in lines if line[7:].startswith(f"prep {verb}")]
    return line


def test_a_detector_that_is_no_network_leaves_the_backbone_to_the_user(tmp_path: Path) -> None:
    workspace = small(tmp_path, train=4, val=0, test=2)
    assert line_of(workspace, "extract") == "to do  prep extract --detector scenes --backbone roi"
    run_detect(workspace, "whole", progress=False)
    assert line_of(workspace, "extract") == "to do  prep extract --detector whole --backbone NAME"
    with pytest.raises(InputError, match="no backbone is named"):
        job.run_all(workspace)


@pytest.mark.parametrize(("val", "scored"), [(3, True), (0, False)])
def test_a_dataset_without_test_is_scored_on_val_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], val: int, scored: bool
) -> None:
    workspace = small(tmp_path, train=12, val=val, test=0)
    commands = list(job.run_all(workspace))
    told = capsys.readouterr().out
    assert job.run_all(workspace) == {}
    ends = ["prep caption --split val", "prep evaluate --split val"]
    assert (commands[-2:] == ends) is scored
    assert (job.run_folder(workspace) / "scores-val.json").exists() is scored
    for text in (told, job.describe(workspace)):
        assert (job.UNSCORED in text) is not scored


def test_the_train_command_is_that_of_the_run(done: Workspace, tmp_path: Path) -> None:
    workspace = copied(done, tmp_path)
    shutil.rmtree(workspace.root / "runs")
    job.train_captioner(workspace, model="transformer", preset="tiny", seed=3, epochs=1)
    assert line_of(workspace, "train") == (
        "done   prep train --model transformer --preset tiny --seed 3 --epochs 1"
    )
    job.train_captioner(workspace, name="other", epochs=1)
    line = line_of(workspace, "train")
    assert line == (
        "done   prep train --model zodiac --preset tiny --name other --epochs 1"
        "  # the newest of other, transformer-tiny"
    )
    assert line_of(workspace, "caption") == "to do  prep caption --run other"


def test_a_run_that_was_stopped_goes_on_as_it_was_begun(done: Workspace, tmp_path: Path) -> None:
    workspace = copied(done, tmp_path)
    shutil.rmtree(workspace.root / "runs")
    run = job.train_captioner(workspace, model="transformer", preset="tiny", epochs=1)
    before = (run / "config.yaml").read_bytes()
    (run / "finished.json").unlink()
    assert next(iter(job.run_all(workspace))) == (
        "prep train --model transformer --preset tiny --epochs 1"
    )
    assert (run / "config.yaml").read_bytes() == before
    assert [path.name for path in run.parent.iterdir()] == [run.name]


def test_features_that_are_made_come_before_those_that_nobody_has(
    done: Workspace, tmp_path: Path
) -> None:
    workspace = copied(done, tmp_path)
    features = workspace.root / "features"
    (features / "scenes").rename(features / "elsewhere")
    shutil.copytree(features / "elsewhere" / "roi", features / "feature_map" / "lite")
    os.utime(features / "elsewhere" / "roi" / "manifest.json", (1, 1))
    assert job.choose_pair(workspace) == job.Pair(
        "feature_map", "lite", "the newest of feature_map + lite, elsewhere + roi"
    )
    assert (
        "  done   prep extract --grid --backbone lite"
        "  # the newest of feature_map + lite, elsewhere + roi"
    ) in job.describe(workspace).splitlines()
    assert "prep detect" not in job.describe(workspace)
    # The run's own features have gone: the command that makes them comes in place of its line.
    assert "stale  prep extract --detector scenes --backbone roi  # run" in job.describe(workspace)
    shutil.copytree(features / "elsewhere" / "roi", features / "scenes" / "roi")
    assert job.choose_pair(workspace) == job.Pair("scenes", "roi")


def test_what_was_made_of_other_tables_is_stale_and_stays(done: Workspace, tmp_path: Path) -> None:
    workspace = copied(done, tmp_path)
    make_splits(workspace, train=38)
    lines = [line.strip() for line in job.describe(workspace).splitlines()[1:]]
    assert [line.partition("  #")[0] for line in lines] == [
        "done   prep splits",
        "stale  prep vocab --min-count 1 --max-length 16",
        "stale  prep detect --detector scenes --force",
        "stale  prep extract --detector scenes --backbone roi --force",
        "stale  prep train --model zodiac --preset tiny --force",
        "stale  prep caption",
        "stale  prep evaluate",
    ]
    before = {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")}
    workspace = Workspace.open(workspace.root)
    with pytest.raises(MismatchError, match=r"vocab.json: stale: .*\n.*`prep vocab --min-count 1"):
        job.run_all(workspace)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_other_boxes_make_features_stale_and_other_features_a_run(
    done: Workspace, tmp_path: Path
) -> None:
    workspace = copied(done, tmp_path)
    run_detect(workspace, "scenes", max_boxes=12, force=True, progress=False)
    assert "regions/scenes has other boxes by now" in line_of(workspace, "extract")
    assert line_of(workspace, "train").startswith("done")
    run_extract(workspace, force=True, progress=False)
    assert line_of(workspace, "extract").startswith("done")
    assert line_of(workspace, "train").endswith("trained on other features of scenes + roi")


def test_a_damaged_table_is_told_by_status_with_exit_code_2(
    done: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    workspace = copied(done, tmp_path)
    workspace.images.write_bytes(workspace.images.read_bytes()[:-9])
    monkeypatch.setattr("sys.argv", ["prep", "-w", str(workspace.root), "status"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "images.parquet: is damaged" in capsys.readouterr().err


def test_captioning_is_deterministic(done: Workspace) -> None:
    path = captioning.caption_split(done).path
    before = path.read_bytes()
    torch.manual_seed(1)
    assert captioning.caption_split(done).path.read_bytes() == before
