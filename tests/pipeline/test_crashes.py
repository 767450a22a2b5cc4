"""An image whose reading kills the process costs one run, then is a row with the reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dummy_stage import DummyStage, contents, plan

from regionprep import FeatureStore
from regionprep.pipeline import crashes
from regionprep.pipeline.crashes import forget_crashes, surviving_crashes
from regionprep.pipeline.detect import Photographs, run_detect
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.images import STATUSES, ImageFault, ImageReader
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.tables import read_images
from regionprep.pipeline.verify import verify

HERE = Path(__file__).parent
DEADLY = {
    "image-0004": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "image-0013": os.abort,
    "image-0014": lambda: os._exit(3),
    # Not os.kill: that one may end another thread first.
    "image-0033": lambda: signal.raise_signal(signal.SIGSEGV),
}


class Deadly(DummyStage):
    def read(self, image_id):
        DEADLY.get(image_id, lambda: None)()
        return image_id


def in_a_child(work):
    """Return the exit code of a child that does `work`; negative for a signal."""
    child = os.fork()
    if child == 0:
        # What a dying process says is expected here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work()
        except BaseException:
            os._exit(100)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def again_until_done(work):
    """Return how often `work` was killed before it ended well."""
    for killed in range(20):
        code = in_a_child(work)
        if code == 0:
            return killed
        assert code in (3, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV)
    raise AssertionError("it never ended")


def test_images_that_kill_the_process_become_rows_and_the_rest_is_done(tmp_path):
    killed = again_until_done(lambda: run_plan(plan(35), tmp_path, Deadly, progress=False))
    assert 1 <= killed <= len(DEADLY)
    store = FeatureStore(tmp_path)
    assert store.statuses == {"ok": 31, "crashed": 4}
    assert "SIGKILL" in store["image-0004"].error
    assert "SIGABRT" in store["image-0013"].error
    assert "with 3" in store["image-0014"].error
    assert "SIGSEGV" in store["image-0033"].error
    assert store["image-0013"].features.shape == (0, 8)
    assert not verify(tmp_path)
    assert not list(tmp_path.glob(".reading*")) + list(tmp_path.glob(".crashed*"))


def test_what_was_found_is_kept_when_the_next_run_is_killed_too(tmp_path):
    """Otherwise two such images in one shard would take turns for ever."""
    names = ["image-0004", "image-0013"]
    for name in names:
        (tmp_path / f".reading-elsewhere-{name}").write_bytes(name.encode() + b"\0")
    read = Deadly().read

    def killed_at_once():
        with surviving_crashes(tmp_path, read):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(killed_at_once) == -signal.SIGKILL
    for path in tmp_path.glob(".reading-*"):
        path.unlink()
    with surviving_crashes(tmp_path, read) as careful:
        for name in names:
            with pytest.raises(ImageFault, match="crashed: reading it kills the process by SIG"):
                careful(name)
    forget_crashes(tmp_path)
    assert not list(tmp_path.iterdir())
    assert "crashed" in STATUSES


def test_a_run_killed_by_others_blames_no_image(tmp_path):
    first = run_plan(plan(35), tmp_path / "undisturbed", DummyStage, progress=False)

    class Slow(DummyStage):
        def read(self, image_id):
            time.sleep(0.01)
            return image_id

    child = os.fork()
    if child == 0:
        run_plan(plan(35), tmp_path / "killed", Slow, progress=False)
        os._exit(0)
    while not any(path.read_bytes() for path in (tmp_path / "killed").glob(".reading-*")):
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not [fault for fault in verify(tmp_path / "killed") if fault.kind == "surplus"]
    assert run_plan(plan(35), tmp_path / "killed", Slow, progress=False).statuses == {"ok": 35}
    assert contents(tmp_path / "killed") == contents(first.folder)


def test_notes_name_what_is_under_way_and_nothing_else(tmp_path):
    inside = threading.Barrier(4)

    def read(name):
        if name != "before":
            inside.wait(10)
            inside.wait(10)
        return name

    with surviving_crashes(tmp_path, read) as careful:
        assert careful("before") == "before"
        names = ["a", "ü-🚀", "with\nlines"]
        threads = [threading.Thread(target=careful, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        inside.wait(10)
        assert crashes._suspects(tmp_path) == set(names)
        inside.wait(10)
        for thread in threads:
            thread.join()
        assert crashes._suspects(tmp_path) == set()
    assert not list(tmp_path.iterdir())


def test_a_name_too_long_to_be_noted_is_read_all_the_same(tmp_path):
    seen = []

    def read(name):
        seen.append((name, crashes._suspects(tmp_path)))

    with surviving_crashes(tmp_path, read) as careful:
        for name in ("n" * crashes.SLOT, "n" * (crashes.SLOT - 1)):
            careful(name)
    assert seen == [("n" * crashes.SLOT, set()), ("n" * 4095, {"n" * 4095})]


def test_a_reader_that_outlives_the_run_writes_nowhere(tmp_path):
    go_on, inside = threading.Event(), threading.Event()

    def read(name):
        inside.set()
        go_on.wait(10)

    with surviving_crashes(tmp_path, read) as careful:
        thread = threading.Thread(target=careful, args=("late",))
        thread.start()
        inside.wait(10)
    # Whatever is opened next gets the number of the closed file.
    with (tmp_path / "other").open("w+b", buffering=0) as other:
        go_on.set()
        thread.join()
        assert other.read() == b""


def test_a_decoder_that_never_ends_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(crashes, "LIMIT", 0.1)
    (tmp_path / ".reading-here-1").write_bytes(b"endless\0")
    with (
        surviving_crashes(tmp_path, lambda name: time.sleep(60)) as careful,
        pytest.raises(ImageFault, match="does not end within"),
    ):
        careful("endless")


def test_an_interrupted_trial_leaves_no_child(tmp_path, monkeypatch):
    def interrupted(child):
        children.append(child)
        raise KeyboardInterrupt

    children = []
    monkeypatch.setattr(crashes, "_exit_code", interrupted)
    (tmp_path / ".reading-here-1").write_bytes(b"a\0")
    with (
        pytest.raises(KeyboardInterrupt),
        surviving_crashes(tmp_path, lambda name: time.sleep(60)),
    ):
        raise AssertionError("not reached")
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_a_trial_holds_no_lock_of_its_dead_parent(tmp_path):
    """A run that is killed while it tries an image must not block the next one."""
    program = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from dummy_stage import DummyStage, plan
from regionprep.pipeline.executor import run_plan

class Stage(DummyStage):
    def read(self, image_id):
        print("trial", flush=True)
        time.sleep(5)
        return image_id

run_plan(plan(5), Path(sys.argv[1]), Stage, progress=False)
"""
    (tmp_path / ".reading-here-1").write_bytes(b"image-0001\0")
    command = [sys.executable, "-c", program, str(tmp_path), str(HERE)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "trial\n"
    process.kill()
    process.wait()
    outcome = run_plan(plan(5), tmp_path, DummyStage, progress=False)
    process.stdout.close()
    assert outcome.statuses == {"ok": 5}


def test_damaged_notes_stop_nothing(tmp_path):
    (tmp_path / crashes.CRASHED).write_text("{")
    (tmp_path / ".reading-here-1").write_bytes(b"\xff\0\0" * 3000)
    assert run_plan(plan(5), tmp_path, DummyStage, progress=False).statuses == {"ok": 5}
    assert not verify(tmp_path)


def test_a_photograph_that_kills_detection_is_a_row(workspace, monkeypatch):
    original = Photographs.__getitem__

    def read(self, image_id):
        if image_id == "3":
            os.abort()
        return original(self, image_id)

    monkeypatch.setattr(Photographs, "__getitem__", read)
    assert again_until_done(lambda: run_detect(workspace, "grid", progress=False)) == 1
    store = FeatureStore(workspace.regions("grid"))
    assert store.statuses == {"ok": 4, "not_an_image": 1, "crashed": 1}
    assert not store["3"].ok


def test_a_photograph_that_kills_splits_is_counted(workspace, monkeypatch):
    original = ImageReader.probe

    def probe(self, path):
        if path == "3.png":
            os.abort()
        return original(self, path)

    workspace.images.unlink()
    monkeypatch.setattr(ImageReader, "probe", probe)
    assert again_until_done(lambda: make_splits(workspace)) == 1
    rows = {row.image_id: (row.width, row.height) for row in read_images(workspace)}
    assert rows["3"] == (0, 0)
    assert rows["2"] == (64, 48)
    assert not list(workspace.root.glob(".reading*"))
