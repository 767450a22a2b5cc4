"""Faults of disks, clocks, neighbours, images and numbers: the same command mends them all."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from dummy_stage import DummyStage, contents, plan, row, same_rows
from PIL import Image

from regionprep import FeatureStore, cli
from regionprep.errors import BusyError, MismatchError
from regionprep.pipeline import images as image_files
from regionprep.pipeline import splits as splits_stage
from regionprep.pipeline.claim import claimed
from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.detect import run_detect
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.images import ImageFault, decode
from regionprep.pipeline.shards import MANIFEST, Columns, part_name
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.tables import read_images
from regionprep.pipeline.verify import verify
from regionprep.pipeline.vocab import make_vocabulary
from regionprep.workspace import Workspace


def run(folder, stage=DummyStage, **options):
    return run_plan(plan(35), folder, stage, progress=False, **options)


@pytest.fixture
def undisturbed(tmp_path):
    return contents(run(tmp_path / "undisturbed").folder)


# Power and clock.


def test_a_part_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    flush, rename = os.fsync, Path.replace

    def flushed(descriptor):
        events.append(("flush", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        flush(descriptor)

    def renamed(self, target):
        events.append(("rename", str(self), str(target)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    run(tmp_path)
    renames = [place for place, event in enumerate(events) if event[0] == "rename"]
    assert len(renames) == 6  # the plan, four parts, the manifest
    for place in renames:
        _, temporary, final = events[place]
        assert events[place - 1] == ("flush", temporary)
        assert events[place + 1] == ("flush", str(Path(final).parent))


@pytest.mark.parametrize("lost", ["cut", "zeros"])
@pytest.mark.parametrize("block", [512, 4096])
def test_a_part_that_lost_its_last_block_with_the_power_is_made_again(
    tmp_path, undisturbed, lost, block
):
    """As on a disk that renamed before it wrote; the manifest was not reached."""
    folder = run(tmp_path / "folder").folder
    (folder / MANIFEST).unlink()
    path = folder / part_name(3)
    data = path.read_bytes()
    kept = data[: (len(data) - 1) // block * block]
    path.write_bytes(kept if lost == "cut" else kept.ljust(len(data), b"\0"))
    assert [fault.kind for fault in verify(folder)] == ["unfinished", "torn"]
    assert run(folder).shards_made == 1
    assert contents(folder) == undisturbed


def test_a_clock_that_jumps_changes_nothing(tmp_path, undisturbed, monkeypatch):
    rng = random.Random(0)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: rng.uniform(-1e9, 1e10))
        patch.setattr(time, "time_ns", lambda: rng.randrange(10**19))
        folder = run(tmp_path / "folder").folder
    assert contents(folder) == undisturbed
    for path in folder.iterdir():
        moment = rng.uniform(0, 4e9)
        os.utime(path, (moment, moment))
    assert run(folder).shards_made == 0
    (folder / part_name(1)).unlink()
    assert run(folder).shards_made == 1
    assert contents(folder) == undisturbed


def test_a_part_of_a_newer_format_is_named_and_made_again(tmp_path, undisturbed):
    folder = run(tmp_path / "folder").folder
    path = folder / part_name(2)
    now, newer = b'"schema_version": 1', b'"schema_version": 2'
    data = path.read_bytes()
    assert data.count(now) == 1
    path.write_bytes(data.replace(now, newer))
    assert [fault.path for fault in verify(folder)] == [path]
    assert run(folder).shards_made == 1
    assert contents(folder) == undisturbed


# Numbers.


class Trembling(DummyStage):
    """Gives values that are no numbers unless it computes in plain float32."""

    def __init__(self, value, *, heals=True):
        super().__init__(Columns(8, "float32"))
        self.value, self.heals, self.exact = value, heals, []

    def __call__(self, items):
        rows = super().__call__(items)
        self.exact.append(
            torch.get_float32_matmul_precision() == "highest"
            and not torch.backends.cudnn.allow_tf32
            and not torch.is_autocast_enabled("cpu")
        )
        for entry in rows:
            if entry.image_id == "image-0005" and not (self.heals and self.exact[-1]):
                entry.features = np.full((1, 8), self.value, np.float32)
                entry.boxes = np.zeros((1, 4), np.float32)
                entry.scores, entry.classes = np.ones(1, np.float32), np.zeros(1, np.int32)
        return rows


@pytest.fixture
def inexact():
    """Compute as fast as torch can, and restore what was."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_batch_with_features_that_are_no_numbers_is_computed_again_in_float32(
    tmp_path, inexact, value
):
    stage = Trembling(value)
    outcome = run_plan(plan(10), tmp_path, lambda: stage, progress=False)
    assert outcome.statuses == {"ok": 10}
    assert stage.exact == [False, False, True, False]
    assert [len(batch) for batch in stage.batches] == [4, 4, 4, 2]
    store = FeatureStore(tmp_path)
    same_rows(store["image-0005"], row("image-0005", Columns(8, "float32")))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.is_autocast_enabled("cpu")


def test_features_that_stay_no_numbers_are_a_row_that_says_so(tmp_path):
    stage = Trembling(np.nan, heals=False)
    outcome = run_plan(plan(10), tmp_path, lambda: stage, progress=False)
    assert outcome.statuses == {"ok": 9, "not_finite": 1}
    assert len(stage.exact) == 4
    assert "8 of 8 values of features" in FeatureStore(tmp_path)["image-0005"].error


# Neighbours.


def test_splits_and_vocab_wait_for_nobody_and_name_who_is_there(workspace):
    before = workspace.images.read_bytes()
    with claimed(workspace.root):
        for command in (make_splits, make_vocabulary):
            with pytest.raises(BusyError, match=f"process {os.getpid()} on "):
                command(workspace)
    assert workspace.images.read_bytes() == before
    assert not make_splits(workspace).changed


def test_of_two_splits_at_once_one_works(workspace, monkeypatch):
    inside, go_on, outcomes = threading.Event(), threading.Event(), []
    original = splits_stage.write_tables

    def slow(*arguments):
        inside.set()
        go_on.wait(30)
        return original(*arguments)

    monkeypatch.setattr(splits_stage, "write_tables", slow)
    first = threading.Thread(
        target=lambda: outcomes.append(make_splits(workspace, seed=1, val=2, test=1))
    )
    first.start()
    inside.wait(30)
    with pytest.raises(BusyError):
        make_splits(workspace, seed=2, val=1, test=2)
    go_on.set()
    first.join()
    assert outcomes[0].images == {"train": 3, "val": 2, "test": 1}
    assert Workspace.open(workspace.root).dataset.splits.seed == 1
    assert {row.split for row in read_images(workspace)} == {"train", "val", "test"}


def test_splits_that_are_told_to_stop_leave_nothing_half_done(workspace, monkeypatch):
    def stopped(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = {path: path.read_bytes() for path in workspace.root.glob("*.*")}
    monkeypatch.setattr(splits_stage, "write_tables", stopped)
    with pytest.raises(KeyboardInterrupt):
        make_splits(workspace)
    assert {path: path.read_bytes() for path in workspace.root.glob("*.*")} == before


def test_new_splits_beside_a_detection_hurt_neither(workspace, photographs, monkeypatch):
    """The run goes on with the images that it began with; what is new is told afterwards."""
    original = image_files.ImageReader.read
    changed = []

    def read(self, path):
        if not changed:
            changed.append(path)
            Image.new("RGB", (9, 9)).save(photographs / "new.png")
            make_splits(Workspace.open(workspace.root), seed=1, val=1, test=1)
        return original(self, path)

    monkeypatch.setattr(image_files.ImageReader, "read", read)
    outcome = run_detect(workspace, "grid", progress=False)
    assert outcome.images == 6
    assert not verify(outcome.folder)
    assert len(read_images(workspace)) == 7
    with pytest.raises(MismatchError, match=r"1 images are new \(new\)"):
        run_detect(workspace, "grid", progress=False)


# Images.


class FailingDisk(io.FileIO):
    def readinto(self, buffer):
        if self.tell() > 1000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(buffer)

    def readall(self):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "tif", "gif", "bmp"])
def test_a_disk_that_fails_in_the_middle_of_an_image_is_unreadable(tmp_path, monkeypatch, ending):
    path = tmp_path / f"image.{ending}"
    noise = np.random.default_rng(0).integers(0, 256, (400, 300, 3), np.uint8)
    Image.fromarray(noise).save(path)
    monkeypatch.setattr(image_files, "_open_file", lambda p: io.BufferedReader(FailingDisk(p), 64))
    with pytest.raises(ImageFault) as caught:
        decode(path)
    assert (caught.value.status, caught.value.error) == ("unreadable", "Input/output error")


def good_images(folder):
    """Write one image of every kind that people have; return their upright sizes by id."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    image = Image.fromarray(noise)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(folder / "turned.jpg", exif=exif)
    image.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(noise[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    image.convert("RGBA").save(folder / "alpha.png")
    image.convert("P").save(folder / "palette.png")
    image.convert("L").save(folder / "grey.png")
    image.convert("1").save(folder / "bits.png")
    image.save(folder / "frames.gif", save_all=True, append_images=[image.rotate(180)])
    image.save(folder / "progressive.jpg", progressive=True)
    image.save(folder / "web.webp")
    image.save(folder / "wrong.jpg", format="PNG")
    Image.new("RGB", (1, 1)).save(folder / "one.png")
    Image.new("RGB", (1, 5000)).save(folder / "thin.png")
    (folder / "inside.png").symlink_to(folder / "grey.png")
    odd = {"turned": (20, 30), "one": (1, 1), "thin": (1, 5000)}
    return {path.stem: odd.get(path.stem, (30, 20)) for path in folder.iterdir()}


def bad_images(folder, outside):
    """Write one image of every kind that cannot be used; return their statuses by id."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8))
    image.save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:2000])
    (folder / "empty.jpg").touch()
    (folder / "text.jpg").write_text("no image at all")
    Image.new("1", (12_000, 12_000)).save(folder / "huge.png")
    image.save(outside)
    (folder / "escaping.png").symlink_to(outside)
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    return {
        "cut": "truncated",
        "empty": "not_an_image",
        "text": "not_an_image",
        "huge": "too_large",
        "escaping": "outside_root",
        "dangling": "missing",
    }


@pytest.fixture
def twentieth_bad(tmp_path):
    """Return a folder of which 5 % are bad, the sizes of the good, the statuses of the bad."""
    folder = tmp_path / "photos"
    folder.mkdir()
    bad = bad_images(folder, tmp_path / "secret.png")
    taken = set(folder.iterdir())
    for number in range(100):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    (kinds := tmp_path / "kinds").mkdir()
    sizes = good_images(kinds)
    for path in kinds.iterdir():
        path.rename(folder / path.name)
    (folder / "inside.png").unlink()
    (folder / "inside.png").symlink_to(folder / "grey.png")
    assert len(taken) / len(list(folder.iterdir())) == 6 / 120
    return folder, sizes, bad


def prep(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.app([str(argument) for argument in arguments])
    return ended.value.code


def test_a_job_with_bad_images_ends_well_and_counts_them_by_reason(
    tmp_path, twentieth_bad, capsys, monkeypatch
):
    folder, sizes, bad = twentieth_bad
    monkeypatch.setitem(cli._chosen, "workspace", None)
    root = tmp_path / "work"
    assert prep("init", root, "--images", folder) == 0
    assert prep("-w", root, "splits") == 0
    told = capsys.readouterr().out
    # A file that ends early has a whole header, so only decoding finds it.
    assert "kept without regions: 2 not_an_image" in told
    assert "truncated" not in told
    detect = ("-w", root, "detect", "--detector", "whole")
    assert prep(*detect) == 0
    reasons = "1 missing, 2 not_an_image, 1 outside_root, 1 too_large, 1 truncated"
    assert f"6 images could not be used: {reasons}" in capsys.readouterr().out
    assert prep(*detect, "--strict") == 1
    store = FeatureStore(root / "regions" / "whole")
    assert {name: store[name].status for name in store if not store[name].ok} == bad
    assert all(store[name].error for name in bad)
    for name, (width, height) in sizes.items():
        assert (store[name].width, store[name].height) == (width, height), name
        assert store[name].boxes.tolist() == [[0, 0, width, height]]
    assert len(store) == 120


def test_the_limit_of_pixels_is_raised_by_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (30, 20)).save(tmp_path / "photos" / "a.png")
    workspace = initialise(tmp_path / "work", images=tmp_path / "photos")
    assert make_splits(workspace, max_pixels=599).unusable == {"too_large": 1}
    workspace = Workspace.open(workspace.root)
    store = FeatureStore(run_detect(workspace, "whole", progress=False).folder)
    assert "`prep splits --max-pixels` raises it" in store["a"].error
    monkeypatch.setitem(cli._chosen, "workspace", None)
    assert prep("-w", workspace.root, "splits", "--max-pixels", 600) == 0
    assert "cannot be used" not in capsys.readouterr().out
    workspace = Workspace.open(workspace.root)
    outcome = run_detect(workspace, "whole", force=True, progress=False)
    assert outcome.statuses == {"ok": 1}
