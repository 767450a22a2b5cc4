"""The same plan on Dask: the same bytes, whatever becomes of workers and scheduler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import dask
import distributed  # noqa: F401 - fills dask.config, which a test sets
import pytest
from dummy_stage import DummyStage, contents, image_ids, plan
from noted_stage import Noted, cannot, die, die_once, fail, fail_twice, kill

from regionprep.errors import ClusterError, InputError, MismatchError, MissingError
from regionprep.pipeline import cluster
from regionprep.pipeline.cluster import Job, Team, make_shard
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import MANIFEST, Columns
from regionprep.pipeline.verify import verify

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def address():
    """Return the address of a scheduler with two workers, each a process."""
    with cluster.local_cluster(2) as started:
        yield started.scheduler_address


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def undisturbed(tmp_path):
    run_plan(plan(75), tmp_path / "undisturbed", DummyStage, progress=False)
    return contents(tmp_path / "undisturbed")


def never():
    raise AssertionError("the driver needs no stage")


def run(folder, notes, address, count=75, **options):
    elsewhere = partial(Noted, notes, **options)
    team = Team(cluster=address)
    return run_plan(plan(count), folder, never, elsewhere=elsewhere, team=team, progress=False)


def lines(path):
    return path.read_text().split()


def test_a_cluster_makes_the_same_bytes_each_image_once(tmp_path, address, notes, undisturbed):
    outcome = run(tmp_path / "folder", notes, address, pause=0.02)
    assert contents(tmp_path / "folder") == undisturbed
    assert (outcome.shards_made, outcome.shards_kept) == (8, 0)
    assert sorted(lines(notes / "images")) == image_ids(75)
    # A model is loaded once a process, and both have worked.
    assert len(lines(notes / "stages")) == len(set(lines(notes / "stages"))) == 2
    again = run(tmp_path / "folder", notes, "tcp://127.0.0.1:1")
    assert (again.shards_made, again.shards_kept) == (0, 8)


def test_what_is_done_is_kept_and_what_is_no_part_replaced(tmp_path, address, notes, undisturbed):
    folder = tmp_path / "folder"
    shutil.copytree(tmp_path / "undisturbed", folder)
    (folder / MANIFEST).unlink()
    (folder / "part-00002.parquet").write_bytes(b"torn")
    (folder / "part-00005.parquet").unlink()
    outcome = run(folder, notes, address)
    assert (outcome.shards_made, outcome.shards_kept) == (2, 6)
    assert sorted(lines(notes / "images")) == image_ids(75)[20:30] + image_ids(75)[50:60]
    assert contents(folder) == undisturbed


def test_a_killed_worker_changes_nothing(tmp_path, address, notes, undisturbed):
    run(tmp_path / "folder", notes, address, at="image-0042", act=die_once, pause=0.02)
    assert (notes / "died").exists()
    assert contents(tmp_path / "folder") == undisturbed
    assert verify(tmp_path / "folder") == []
    # No shard but the one that the worker had in its hands was begun again.
    twice = [name for name, times in Counter(lines(notes / "images")).items() if times > 1]
    assert set(twice) <= set(image_ids(75)[40:50])


def test_a_shard_that_raises_is_tried_a_few_times_and_then_tells_as_locally(
    tmp_path, address, notes, undisturbed
):
    with pytest.raises(ZeroDivisionError) as locally:
        stage = partial(Noted, notes, {}, at="image-0042", act=fail)
        run_plan(plan(75), tmp_path / "local", stage, progress=False)
    (notes / "images").unlink()
    folder = tmp_path / "folder"
    with pytest.raises(ZeroDivisionError) as caught:
        run(folder, notes, address, at="image-0042", act=fail)
    assert str(caught.value) == str(locally.value)
    assert "shards that failed: 4; all others are done" in caught.value.__notes__[0]
    assert Counter(lines(notes / "images"))["image-0042"] == cluster.TRIES
    missing = {"part-00004.parquet", MANIFEST}
    assert contents(folder) == {k: v for k, v in undisturbed.items() if k not in missing}
    run(folder, notes, address)
    assert contents(folder) == undisturbed


def test_a_fault_that_passes_is_not_told(tmp_path, address, notes, undisturbed):
    run(tmp_path / "folder", notes, address, at="image-0042", act=fail_twice)
    assert contents(tmp_path / "folder") == undisturbed


def test_what_the_user_must_mend_ends_the_run_at_once(tmp_path, address, notes):
    with pytest.raises(InputError, match=r"weights\.pt: the weights are of another") as caught:
        run(tmp_path / "folder", notes, address, at="image-0000", act=cannot)
    assert caught.value.mend == "Take others."
    assert lines(notes / "images").count("image-0000") == 1


def test_other_columns_than_those_there_are_refused(tmp_path, address, notes, undisturbed):
    folder = tmp_path / "undisturbed"
    (folder / "part-00002.parquet").unlink()

    def elsewhere(settings):
        return DummyStage(Columns(9))

    with pytest.raises(MismatchError, match=r"feature_width=8.*feature_width=9"):
        run_plan(
            plan(75),
            folder,
            never,
            elsewhere=elsewhere,
            team=Team(cluster=address),
            progress=False,
        )


def test_a_shard_that_kills_every_worker_is_given_up_and_the_rest_is_made(
    tmp_path, notes, undisturbed
):
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        cluster.local_cluster(2) as started,
        pytest.raises(ClusterError, match="every worker that made shard 4 died"),
    ):
        run(tmp_path / "folder", notes, started.scheduler_address, at="image-0042", act=die)
    missing = {"part-00004.parquet", MANIFEST}
    rest = {k: v for k, v in undisturbed.items() if k not in missing}
    found = contents(tmp_path / "folder")
    # What dead workers left: half a part, and the name of the image that they were reading.
    left = {name for name in found if name.endswith(".tmp") or name.startswith(".reading-")}
    assert {name: found[name] for name in found.keys() - left} == rest


def test_a_folder_that_a_worker_does_not_see_is_named(tmp_path):
    job = Job.of(plan(5), tmp_path, DummyStage, {})
    with pytest.raises(MismatchError, match=f"{tmp_path}: a worker on .* finds there no plan"):
        make_shard(job, 0)
    plan(6).write(tmp_path)
    with pytest.raises(MismatchError, match="another plan"):
        make_shard(job, 0)


def test_a_shard_that_is_there_is_not_made_again(tmp_path, notes, undisturbed):
    folder = tmp_path / "undisturbed"
    job = Job.of(plan(75), folder, partial(Noted, notes), {})
    record = make_shard(job, 3)
    assert (record.file, record.rows) == ("part-00003.parquet", 10)
    assert not (notes / "images").exists()
    (folder / "part-00003.parquet").unlink()
    assert make_shard(job, 3) == record
    assert lines(notes / "images") == image_ids(75)[30:40]


@pytest.mark.slow
def test_photographs_by_two_workers_are_those_by_one_process(workspace, timm_weights, address):
    # Here, since what they import takes seconds.
    from regionprep.pipeline.detect import run_detect
    from regionprep.pipeline.extract import run_extract

    weights = timm_weights("test_resnet")
    options = {"progress": False, "device": "cpu", "shard_size": 2, "force": True}

    def made(**team):
        regions = run_detect(workspace, "grid", max_boxes=4, **options, **team)
        features = run_extract(
            workspace, "grid", "timm:test_resnet", weights=weights, **options, **team
        )
        assert (regions.shards_made, features.shards_made) == (3, 3)
        return contents(regions.folder), contents(features.folder)

    assert made(team=Team(cluster=address)) == made()


def test_a_scheduler_that_is_lost_ends_the_run_and_another_goes_on(
    tmp_path, address, notes, undisturbed
):
    code = (
        "import sys, time; from regionprep.pipeline import cluster\n"
        "if __name__ == '__main__':\n"
        "    with cluster.local_cluster(1) as started:\n"
        "        print(started.scheduler_address, flush=True); time.sleep(600)\n"
    )
    (tmp_path / "scheduler.py").write_text(code)
    # Without GPUs to look for, it imports no torch.
    paths = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, tmp_path / "scheduler.py"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        lost = process.stdout.readline().strip()
        with pytest.raises(ClusterError, match="scheduler is gone"):
            run(tmp_path / "folder", notes, lost, at="image-0042", act=partial(kill, process.pid))
    finally:
        process.kill()
        process.communicate()
    found = contents(tmp_path / "folder")
    assert 0 < len([name for name in found if name.startswith("part-")]) < 8
    run(tmp_path / "folder", notes, address)
    assert contents(tmp_path / "folder") == undisturbed


def test_a_cluster_of_ours_listens_on_the_loopback_alone(address):
    import psutil

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_a_scheduler_that_does_not_answer_is_told(tmp_path, notes, monkeypatch):
    monkeypatch.setattr(cluster, "SECONDS_TO_CONNECT", 1)
    with pytest.raises(ClusterError, match=r"tcp://127\.0\.0\.1:1: no Dask scheduler") as caught:
        run(tmp_path / "folder", notes, "tcp://127.0.0.1:1")
    assert "dask scheduler" in caught.value.mend


def test_without_dask_the_extra_is_named(tmp_path, notes, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingError, match=r"pip install 'regionprep\[dask\]'"):
        run(tmp_path / "folder", notes, "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give one of the two"),
        ({"workers": 2, "cluster": "tcp://host:1"}, "give one of the two"),
        ({"cluster": "tls://host:1"}, "--tls-ca-file"),
        ({"cluster": "tcp://host:1", "tls_key": HERE}, "--tls-ca-file"),
        ({"workers": 2, "tls_ca_file": HERE, "tls_cert": HERE, "tls_key": HERE}, "--cluster tls"),
        (
            dict.fromkeys(("tls_ca_file", "tls_cert", "tls_key"), HERE / "none")
            | {"cluster": "tls://host:1"},
            "there is no such file",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        Team(**options)


def test_a_command_without_options_has_no_team():
    assert Team.chosen(None, None, None, None, None) is None
    assert Team.chosen(2, None, None, None, None) == Team(workers=2)


@pytest.mark.parametrize(
    ("visible", "count", "given"),
    [
        (None, 0, [None] * 3),
        ("", 2, [None] * 3),
        (None, 2, ["0", "1", "0"]),
        ("5,7", 2, ["5", "7", "5"]),
    ],
)
def test_each_worker_has_a_gpu(monkeypatch, visible, count, given):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    environments = cluster._environments(3)
    assert [variables.get("CUDA_VISIBLE_DEVICES") for variables in environments] == given
