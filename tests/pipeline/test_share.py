"""A plan cut by hand: jobs side by side, then one that finishes the folder."""

from __future__ import annotations

import os

import pytest
from dummy_stage import DummyStage, contents, image_ids, plan

from regionprep.errors import BusyError, InputError, MismatchError
from regionprep.pipeline import claim
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import MANIFEST, PLAN
from regionprep.pipeline.share import Share


def run(folder, shards=None, stage=DummyStage, made=None, **options):
    made = plan(75) if made is None else made
    share = Share.chosen(shards)
    return run_plan(made, folder, stage, share=share, progress=False, **options)


def never():
    raise AssertionError("a model was loaded for nothing")


@pytest.mark.parametrize("text", ["", "3", "0-9", "a-b/10", "-1/10", "0-9/10/2", "٣/10", "1-2/8 "])
def test_what_names_no_shards_is_refused(text):
    with pytest.raises(InputError, match="names no shards"):
        Share.parse(text)


@pytest.mark.parametrize("text", ["8/8", "3-2/8", "0-8/8", "0/0"])
def test_shards_outside_of_the_plan_are_refused(text):
    with pytest.raises(InputError, match="does not lie in"):
        Share.parse(text)


def test_a_share_names_its_first_and_last_shard():
    assert list(Share.parse("2-4/8").of(plan(75))) == [2, 3, 4]
    assert list(Share.parse("7/8").of(plan(75))) == [7]


def test_a_plan_of_another_number_of_shards_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="the plan has 8 shards of 10 images, not 1,000") as caught:
        run(tmp_path / "folder", "0-99/1000", never)
    assert "0-7/8" in caught.value.mend
    assert not (tmp_path / "folder").exists()


def test_two_jobs_and_the_finishing_command_make_the_same_folder(tmp_path):
    run(tmp_path / "undisturbed")
    undisturbed, folder = contents(tmp_path / "undisturbed"), tmp_path / "folder"
    first = run(folder, "0-2/8")
    assert (first.shards_made, first.images, first.left, first.sealed) == (3, 30, 5, False)
    assert "5 shards of the plan are left to other jobs" in str(first)
    assert "without --shards finishes the folder" in str(first)
    second = run(folder, "3-7/8")
    assert (second.shards_made, second.images, second.left) == (5, 45, 0)
    assert "all shards of the plan are there" in str(second)
    assert contents(folder) == {k: v for k, v in undisturbed.items() if k != MANIFEST}
    last = run(folder, stage=never)
    assert (last.shards_made, last.shards_kept, last.sealed) == (0, 8, True)
    assert "--shards" not in str(last)
    assert contents(folder) == undisturbed
    assert {path.name for path in folder.glob(".*")} <= {claim.LOCK}


def test_the_finishing_command_makes_what_jobs_have_left(tmp_path):
    run(tmp_path / "undisturbed")
    run(tmp_path / "folder", "2-3/8")
    assert run(tmp_path / "folder").shards_made == 6
    assert contents(tmp_path / "folder") == contents(tmp_path / "undisturbed")


def test_a_job_given_again_goes_on_with_its_own_shards(tmp_path):
    run(tmp_path, "1-4/8")
    (tmp_path / "part-00003.parquet").unlink()
    again = run(tmp_path, "1-4/8")
    assert (again.shards_made, again.shards_kept, again.left) == (1, 3, 4)
    assert run(tmp_path, "1-4/8", never).shards_kept == 4


def test_a_part_lost_from_a_finished_folder_takes_the_manifest_with_it(tmp_path):
    run(tmp_path)
    (tmp_path / "part-00003.parquet").unlink()
    assert not run(tmp_path, "3/8").sealed
    assert run(tmp_path, stage=never).sealed


class Meanwhile(DummyStage):
    """Calls a function while a part is made."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def __call__(self, items):
        self.call()
        return super().__call__(items)


def test_jobs_work_side_by_side(tmp_path):
    run(tmp_path / "undisturbed")
    folder = tmp_path / "folder"
    run(folder, "0/8", lambda: Meanwhile(lambda: run(folder, "1-7/8")))
    run(folder, stage=never)
    assert contents(folder) == contents(tmp_path / "undisturbed")


def test_the_whole_folder_and_the_same_share_are_busy_while_a_job_works(tmp_path):
    refused = []

    def others():
        for shards in (None, "0-1/8"):
            with pytest.raises(BusyError, match=f"process {os.getpid()} on "):
                run(tmp_path, shards, never)
            refused.append(shards)

    run(tmp_path, "0-1/8", lambda: Meanwhile(others))
    assert {None, "0-1/8"} == set(refused)


def test_a_share_is_busy_while_the_whole_folder_is_worked_on(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "SECONDS_TO_JOIN", 0)
    refused = []

    def other():
        with pytest.raises(BusyError, match=f"process {os.getpid()} on "):
            run(tmp_path, "0-1/8", never)
        refused.append(True)

    run(tmp_path, stage=lambda: Meanwhile(other))
    assert refused


def test_a_job_of_another_plan_is_refused(tmp_path):
    run(tmp_path, "0-1/8")
    before = contents(tmp_path)
    with pytest.raises(MismatchError, match="weights was not set, is other"):
        run(tmp_path, "2-3/8", never, plan(image_ids(75), weights="other"))
    assert contents(tmp_path) == before


def test_starting_over_is_for_whole_folders(tmp_path):
    run(tmp_path, "0-1/8")
    with pytest.raises(InputError, match="--force starts the whole folder over"):
        run(tmp_path, "0-1/8", never, force=True)
    assert (tmp_path / PLAN).exists()
