from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kill_at_random
import numpy as np
import pytest
from dummy_stage import COLUMNS, DummyStage, contents, image_ids, plan, row, same_rows

from regionprep import FeatureStore
from regionprep.errors import BusyError, MismatchError, StorageError
from regionprep.pipeline.executor import READERS, run_plan
from regionprep.pipeline.images import ImageFault
from regionprep.pipeline.shards import MANIFEST, PLAN, Columns
from regionprep.pipeline.verify import verify
from regionprep.pipeline.writer import Sink

HERE = Path(__file__).parent


def run(made, folder, stage=DummyStage, **options):
    return run_plan(made, folder, stage, progress=False, **options)


def never():
    raise AssertionError("a model was loaded for nothing")


@pytest.fixture
def undisturbed(tmp_path):
    """Return what the folder of `plan(35)` holds after a run that nothing disturbs."""
    run(plan(35), tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


def test_a_run_makes_every_part_and_says_so(tmp_path):
    outcome = run(plan([*image_ids(24), "bad"]), tmp_path / "new" / "folder")
    rows = [row(name, COLUMNS) for name in image_ids(24)]
    assert (outcome.shards_made, outcome.shards_kept) == (3, 0)
    assert outcome.images == 25
    assert outcome.regions == sum(len(entry.boxes) for entry in rows)
    assert outcome.statuses == {"ok": 24, "truncated": 1}
    assert outcome.folder == tmp_path / "new" / "folder"
    assert set(contents(outcome.folder)) == {
        PLAN,
        MANIFEST,
        "part-00000.parquet",
        "part-00001.parquet",
        "part-00002.parquet",
    }


def test_a_second_run_does_nothing_and_loads_no_model(tmp_path):
    first = run(plan(25), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.*")}
    second = run(plan(25), tmp_path, never)
    assert (second.shards_made, second.shards_kept) == (0, 3)
    assert (second.regions, second.statuses) == (first.regions, first.statuses)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.*")} == before


def test_batches_are_full_and_never_cross_shards(tmp_path):
    stage = DummyStage(batch_size=4)
    names = ["0", "1-bad", "2", "3", "4-bad", "5", "6", "7", "8", "9", "a", "b", "c"]
    run(plan(names, 10), tmp_path, lambda: stage)
    assert stage.batches == [["0", "2", "3", "5"], ["6", "7", "8", "9"], ["a", "b", "c"]]
    store = FeatureStore(tmp_path)
    assert [name for name in store.ids if not store[name].ok] == ["1-bad", "4-bad"]


def test_a_fault_becomes_a_row_with_its_reason(tmp_path):
    run(plan(["a", "bad"]), tmp_path)
    found = FeatureStore(tmp_path)["bad"]
    assert (found.status, found.error) == ("truncated", "bad ends early")
    assert (found.width, found.height) == (3, 4)
    assert found.features.shape == (0, 8)


def test_images_that_all_fail_need_no_batch(tmp_path):
    stage = DummyStage()
    outcome = run(plan(["bad1", "bad2"]), tmp_path, lambda: stage)
    assert stage.batches == []
    assert outcome.statuses == {"truncated": 2}
    assert len(FeatureStore(tmp_path)) == 2


class Values(DummyStage):
    """Every value of an image's features, or of another field, is the one given."""

    def __init__(self, value, field="features", columns=COLUMNS):
        super().__init__(columns)
        self.value, self.field = value, field

    def __call__(self, items):
        rows = [row(name, Columns(8, "float32")) for name in items]
        for entry in rows:
            if entry.image_id == "image-0001":
                getattr(entry, self.field)[:1] = self.value
        return rows


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e5])
def test_features_that_float16_cannot_hold_are_never_stored(tmp_path, value):
    outcome = run(plan(5), tmp_path, lambda: Values(value))
    assert outcome.statuses == {"ok": 4, "not_finite": 1}
    found = FeatureStore(tmp_path)["image-0001"]
    assert found.features.shape == (0, 8)
    assert "8 of" in found.error
    assert found.width == row("image-0001", COLUMNS).width


def test_features_that_float32_holds_are_stored(tmp_path):
    columns = Columns(8, "float32")
    outcome = run(plan(5), tmp_path, lambda: Values(1e5, columns=columns))
    assert outcome.statuses == {"ok": 5}
    assert (FeatureStore(tmp_path)["image-0001"].features[0] == 1e5).all()


@pytest.mark.parametrize("field", ["boxes", "scores"])
def test_boxes_and_scores_that_are_no_numbers_are_never_stored(tmp_path, field):
    outcome = run(plan(5), tmp_path, lambda: Values(np.nan, field))
    assert outcome.statuses == {"ok": 4, "not_finite": 1}
    assert field in FeatureStore(tmp_path)["image-0001"].error


class Dropping(DummyStage):
    def __call__(self, items):
        return super().__call__(items)[1:]


def test_a_stage_that_loses_an_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match="returned 3 rows for 4 images"):
        run(plan(5), tmp_path, Dropping)


class Breaking(DummyStage):
    def __call__(self, items):
        if "image-0012" in items:
            raise RuntimeError("out of memory")
        return super().__call__(items)


def test_what_was_done_before_an_error_stays(tmp_path, undisturbed):
    with pytest.raises(RuntimeError, match="out of memory"):
        run(plan(35), tmp_path / "folder", Breaking)
    assert set(contents(tmp_path / "folder")) == {PLAN, "part-00000.parquet"}
    outcome = run(plan(35), tmp_path / "folder")
    assert (outcome.shards_made, outcome.shards_kept) == (3, 1)
    assert contents(tmp_path / "folder") == undisturbed


def test_an_error_in_reading_stops_the_run(tmp_path):
    class Stage(DummyStage):
        def read(self, image_id):
            raise OSError(errno.EIO, "the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(plan(35), tmp_path, Stage)
    assert set(contents(tmp_path)) == {PLAN}


def test_reading_ahead_is_bounded(tmp_path):
    lock, ahead, most = threading.Lock(), set(), []

    class Stage(DummyStage):
        def read(self, image_id):
            with lock:
                ahead.add(image_id)
                most.append(len(ahead))
            return image_id

        def __call__(self, items):
            time.sleep(0.01)
            with lock:
                ahead.difference_update(items)
            return super().__call__(items)

    run(plan(300, 100), tmp_path, Stage)
    # A batch that waits, and the window ahead of it.
    assert max(most) <= 2 * Stage().batch_size + 2 * READERS


def test_nothing_is_printed_where_there_is_no_terminal(tmp_path, capfd):
    run_plan(plan(5), tmp_path, DummyStage, progress=True)
    assert capfd.readouterr() == ("", "")


# Going on, and starting over.


def test_a_changed_plan_is_refused_by_name_and_changes_nothing(tmp_path):
    run(plan(25, detector={"weights": "1"}), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(MismatchError, match=r"detector\.weights was 1, is 2") as caught:
        run(plan(25, detector={"weights": "2"}), tmp_path, never)
    assert "--force" in str(caught.value)
    assert contents(tmp_path) == before


def test_force_starts_over(tmp_path):
    run(plan(25, weights="1"), tmp_path)
    outcome = run(plan(12, weights="2"), tmp_path, force=True)
    assert outcome.shards_made == 2
    assert FeatureStore(tmp_path).metadata["weights"] == "2"
    assert verify(tmp_path) == []


def test_force_starts_over_where_the_plan_is_damaged(tmp_path):
    run(plan(12), tmp_path)
    (tmp_path / PLAN).write_text("{")
    with pytest.raises(StorageError, match=r"plan\.json: is damaged"):
        run(plan(12), tmp_path)
    assert run(plan(12), tmp_path, force=True).shards_made == 2


def test_other_columns_under_the_same_settings_are_refused(tmp_path):
    run(plan(25), tmp_path)
    (tmp_path / "part-00002.parquet").unlink()
    with pytest.raises(MismatchError, match=r"feature_width=8.*feature_width=9"):
        run(plan(25), tmp_path, lambda: DummyStage(Columns(9)))


def test_leftovers_of_dead_runs_are_swept(tmp_path):
    (tmp_path / ".part-00000.parquet.123.tmp").write_bytes(b"half")
    (tmp_path / f".{PLAN}.123.tmp").write_bytes(b"half")
    run(plan(5), tmp_path)
    assert set(contents(tmp_path)) == {PLAN, MANIFEST, "part-00000.parquet"}


def test_parts_of_another_plan_are_made_again(tmp_path, undisturbed):
    folder = tmp_path / "folder"
    run(plan(35, weights="other"), folder)
    (folder / PLAN).unlink()
    assert run(plan(35), folder).shards_made == 4
    assert contents(folder) == undisturbed


def test_a_missing_part_is_made_again_and_the_manifest_with_it(tmp_path, undisturbed):
    folder = tmp_path / "folder"
    run(plan(35), folder)
    (folder / "part-00002.parquet").unlink()
    made = []

    class Stage(DummyStage):
        def __call__(self, items):
            made.extend(items)
            # While a part is missing there is no manifest that vouches for it.
            assert not (folder / MANIFEST).exists()
            return super().__call__(items)

    outcome = run(plan(35), folder, Stage)
    assert (outcome.shards_made, outcome.shards_kept) == (1, 3)
    assert made == image_ids(35)[20:30]
    assert contents(folder) == undisturbed


@pytest.mark.parametrize("seed", [1, 2])
def test_runs_killed_at_any_moment_end_as_an_undisturbed_one(tmp_path, seed):
    folder = tmp_path / "killed"
    folder.mkdir()
    command = [sys.executable, HERE / "kill_at_random.py", folder, "20", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run(kill_at_random.PLAN, folder)
    run(kill_at_random.PLAN, tmp_path / "undisturbed")
    assert contents(folder) == contents(tmp_path / "undisturbed")


SLOW_RUN = """
import sys
from dummy_stage import DummyStage, plan
from regionprep.pipeline.executor import run_plan

class Stage(DummyStage):
    def __call__(self, items):
        print("batch", flush=True)
        return super().__call__(items)

run_plan(plan(35), sys.argv[1], lambda: Stage(pause=float(sys.argv[2])))
"""


@pytest.fixture
def slow_run(tmp_path):
    """Return a function that starts a run in a process and waits for its third shard."""
    started = []

    def start(folder, pause=0.5, batches=7):
        command = [sys.executable, "-c", SLOW_RUN, str(folder), str(pause)]
        environment = {**os.environ, "PYTHONPATH": str(HERE)}
        process = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        for _ in range(batches):
            assert process.stdout.readline() == "batch\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_does_and_says_what_is_done(
    tmp_path, undisturbed, slow_run, number
):
    process = slow_run(tmp_path / "folder")
    process.send_signal(number)
    said = process.communicate(timeout=5)[1]
    assert process.returncode != 0
    assert "stopped: 2 of 4 shards (20 of 35 images) are done and stay" in said
    assert set(contents(tmp_path / "folder")) == {
        PLAN,
        "part-00000.parquet",
        "part-00001.parquet",
    }
    outcome = run(plan(35), tmp_path / "folder")
    assert outcome.shards_kept == 2
    assert contents(tmp_path / "folder") == undisturbed


def test_of_two_runs_one_works_and_the_other_names_it(tmp_path, undisturbed, slow_run):
    folder = tmp_path / "folder"
    process = slow_run(folder, batches=1)
    with pytest.raises(BusyError, match=f"process {process.pid} on ") as caught:
        run(plan(35), folder, never)
    assert os.uname().nodename in str(caught.value)
    process.kill()
    process.wait()
    # A dead process holds nothing, whatever it left behind.
    assert (folder / ".lock.json").exists()
    run(plan(35), folder)
    assert contents(folder) == undisturbed


def test_a_folder_is_busy_for_a_second_run_of_the_same_process_too(tmp_path):
    refused = []

    class Stage(DummyStage):
        def __call__(self, items):
            with pytest.raises(BusyError, match=f"process {os.getpid()}"):
                run(plan(5), tmp_path)
            refused.append(items)
            return super().__call__(items)

    run(plan(5), tmp_path, Stage)
    assert refused


def test_a_holder_file_that_cannot_be_read_does_not_hide_that_it_is_busy(tmp_path):
    class Stage(DummyStage):
        def __call__(self, items):
            (tmp_path / ".lock.json").write_text("{")
            with pytest.raises(BusyError, match="another process"):
                run(plan(5), tmp_path)
            return super().__call__(items)

    run(plan(5), tmp_path, Stage)


def test_a_run_may_live_in_a_thread(tmp_path):
    thread = threading.Thread(target=run, args=(plan(5), tmp_path))
    thread.start()
    thread.join()
    assert len(FeatureStore(tmp_path)) == 5


# Full and failing disks.


def fail_at(monkeypatch, limit, number=errno.ENOSPC):
    append, written = Sink._append, [0]

    def failing(self, view):
        room = limit - written[0]
        written[0] += len(view)
        append(self, view[: max(room, 0)])
        if len(view) > room:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Sink, "_append", failing)


@pytest.mark.parametrize("seed", range(6))
def test_a_full_disk_at_any_byte_leaves_only_whole_parts(tmp_path, monkeypatch, undisturbed, seed):
    folder = tmp_path / "folder"
    sizes = [len(data) for name, data in undisturbed.items() if name.startswith("part")]
    limit = random.Random(seed).randrange(sum(sizes)) if seed else 0
    with monkeypatch.context() as patch:
        fail_at(patch, limit)
        with pytest.raises(StorageError, match="No space left on device") as caught:
            run(plan(35), folder)
    assert f"{folder}{os.sep}" in str(caught.value)
    assert "bytes are free" in str(caught.value)
    assert "needed" in str(caught.value)
    found = contents(folder)
    assert found == {name: undisturbed[name] for name in found}
    assert MANIFEST not in found
    run(plan(35), folder)
    assert contents(folder) == undisturbed


def test_a_failing_disk_is_named_with_its_reason(tmp_path, monkeypatch):
    fail_at(monkeypatch, 100, errno.EIO)
    with pytest.raises(StorageError, match=r"cannot be written: Input/output error"):
        run(plan(5), tmp_path)


@pytest.mark.parametrize("limit", [0, 1000])
def test_an_interrupt_while_a_part_is_written_leaves_no_part(tmp_path, monkeypatch, capfd, limit):
    def interrupted(self, view):
        if self.bytes >= limit:
            raise KeyboardInterrupt

    monkeypatch.setattr(Sink, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(plan(5), tmp_path)
    assert set(contents(tmp_path)) == {PLAN}
    assert "stopped: 0 of 1 shards" in capfd.readouterr().err


@pytest.fixture
def small_disk(tmp_path):
    """Return a mounted file system of 4 MB, where mounting is permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not mount or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk_that_fills_up_is_told_and_goes_on_with_room(small_disk, tmp_path):
    columns, made = Columns(2048), plan(200, 100)

    def stage():
        return DummyStage(columns, longest=20)

    with pytest.raises(StorageError) as caught:
        run(made, small_disk / "folder", stage)
    assert "needed for this file" in str(caught.value)
    assert set(contents(small_disk / "folder")) <= {PLAN, "part-00000.parquet"}
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    run(made, small_disk / "folder", stage)
    run(made, tmp_path / "undisturbed", stage)
    assert contents(small_disk / "folder") == contents(tmp_path / "undisturbed")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        run(plan(5), tmp_path / "file" / "folder")


def test_rows_of_a_run_are_those_of_its_stage(tmp_path):
    run(plan(35), tmp_path)
    store = FeatureStore(tmp_path)
    for name in image_ids(35):
        same_rows(store[name], row(name, COLUMNS))


def test_a_stage_may_say_that_one_image_is_at_fault(tmp_path):
    """`read` decides; what it raises travels with its status, sizes and reason."""

    class Stage(DummyStage):
        def read(self, image_id):
            raise ImageFault("too_large", "9 pixels", width=3, height=3)

    outcome = run(plan(2), tmp_path, Stage)
    assert outcome.statuses == {"too_large": 2}
    assert json.loads((tmp_path / MANIFEST).read_text())["parts"][0]["regions"] == 0
