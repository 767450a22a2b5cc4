"""What `prep verify` finds beyond a part's bytes: plans, manifests, tables, whole workspaces."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from dummy_stage import DummyStage, contents, plan

from regionprep import cli
from regionprep.errors import InputError, MissingError
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.parts import Manifest
from regionprep.pipeline.shards import MANIFEST, PLAN
from regionprep.pipeline.store import read_part
from regionprep.pipeline.tables import ImageRecord, write_tables
from regionprep.pipeline.verify import verify, verify_path

IDS = [f"image-{number:02d}" for number in range(25)]
PREP = "prep extract --detector frcnn --backbone clip"


@pytest.fixture
def folder(workspace):
    """Return the only features of a workspace, of 3 parts."""
    folder = workspace.features("frcnn", "clip")
    remake(folder)
    return folder


def remake(folder, force=False):
    return run_plan(plan(IDS), folder, DummyStage, force=force, progress=False)


def kinds(faults):
    return {fault.path.name: fault.kind for fault in faults}


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


MANIFEST_EDITS = {
    "rows": lambda content: content["parts"][1].update(rows=9),
    "regions": lambda content: content["parts"][1].update(regions=1),
    "statuses": lambda content: content["parts"][1].update(statuses={"ok": 9}),
    "part": lambda content: content["parts"].pop(),
    "columns": lambda content: content["columns"].update(dtype="float32"),
    "stage": lambda content: content.update(stage="regions"),
    "notes": lambda content: content["settings"]["versions"].update(numpy="0"),
}


@pytest.mark.parametrize("what", MANIFEST_EDITS)
def test_an_altered_manifest_is_found_and_made_again_of_the_parts(folder, what):
    whole = contents(folder)
    edit(folder / MANIFEST, MANIFEST_EDITS[what])
    (fault,) = verify(folder, quick=True)
    assert (fault.path.name, fault.kind) == (MANIFEST, "altered")
    assert "Remove it" in fault.mend
    assert PREP in fault.mend
    (folder / MANIFEST).unlink()
    assert remake(folder).shards_made == 0
    assert contents(folder) == whole


def test_a_torn_manifest_is_found_with_what_the_parts_hide(folder):
    whole = contents(folder)
    (folder / MANIFEST).write_text("{")
    flip(folder / "part-00001.parquet")
    assert kinds(verify(folder)) == {MANIFEST: "torn", "part-00001.parquet": "altered"}
    (folder / MANIFEST).unlink()
    (folder / "part-00001.parquet").unlink()
    remake(folder)
    assert contents(folder) == whole


def test_a_torn_plan_is_found_and_made_again_without_the_parts(folder):
    whole = contents(folder)
    (folder / PLAN).write_bytes(whole[PLAN][:-20])
    (fault,) = verify(folder)
    assert (fault.path.name, fault.kind) == (PLAN, "torn")
    assert PREP in fault.mend
    (folder / PLAN).unlink()
    assert kinds(verify(folder)) == {"clip": "missing"}
    assert remake(folder).shards_made == 0
    assert contents(folder) == whole


def test_notes_altered_in_the_plan_are_told_of_the_plan(folder):
    edit(folder / PLAN, lambda content: content["settings"]["versions"].update(numpy="0"))
    (fault,) = verify(folder, quick=True)
    assert (fault.path.name, fault.kind) == (PLAN, "altered")
    assert f"{PREP} --force" in fault.mend


def test_another_version_s_plan_is_told_as_foreign(folder):
    edit(folder / PLAN, lambda content: content.update(schema_version=99))
    assert kinds(verify(folder, quick=True)) == {PLAN: "foreign"}


def flip(path):
    """Flip a bit in a value of the last region's features."""
    data = bytearray(path.read_bytes())
    features = next(row.features for row in read_part(path) if len(row.boxes))
    data[data.index(features.tobytes())] ^= 4
    path.write_bytes(data)


def test_a_bit_that_flipped_before_the_manifest_is_found_by_its_page(folder):
    whole = contents(folder)
    path = folder / "part-00001.parquet"
    flip(path)
    manifest = Manifest.read(folder)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    parts = [
        replace(part, sha256=digest) if part.file == path.name else part for part in manifest.parts
    ]
    replace(manifest, parts=tuple(parts)).write(folder)
    assert verify(folder, quick=True) == []
    (fault,) = verify(folder)
    assert (fault.path, fault.kind) == (path, "altered")
    assert "column features" in fault.what
    path.unlink()
    (folder / MANIFEST).unlink()
    remake(folder)
    assert contents(folder) == whole


def test_an_unfinished_folder_is_told(folder):
    (folder / MANIFEST).unlink()
    (folder / "part-00002.parquet").unlink()
    assert kinds(verify(folder)) == {MANIFEST: "unfinished", "part-00002.parquet": "missing"}


# Whole workspaces.


def test_every_folder_of_a_workspace_is_looked_at(workspace, folder):
    run_plan(plan(IDS), workspace.regions("frcnn"), DummyStage, progress=False)
    report = verify_path(workspace.root)
    assert report.faults == ()
    assert str(report) == "whole: 6 parts in 2 folders, by checksums"
    (workspace.regions("frcnn") / "part-00000.parquet").unlink()
    flip(folder / "part-00002.parquet")
    (workspace.root / "features" / "notes.txt").write_text("mine")
    workspace.features("frcnn", "begun").mkdir()
    assert kinds(verify_path(workspace.root).faults) == {
        "notes.txt": "surplus",
        "part-00000.parquet": "missing",
        "begun": "missing",
        "part-00002.parquet": "altered",
    }
    quick = kinds(verify_path(workspace.root, quick=True).faults)
    assert quick.keys() == {"notes.txt", "part-00000.parquet", "begun"}
    assert verify_path(workspace.root / "features").folders == (folder,)


def test_damaged_tables_are_found(workspace):
    write_tables(workspace, [ImageRecord("1", "1.png", 1, 1, "train")], [])
    assert verify_path(workspace.root).faults == ()
    data = workspace.images.read_bytes()
    workspace.images.write_bytes(data[:-1])
    (fault,) = verify_path(workspace.root).faults
    assert (fault.path, fault.kind) == (workspace.images, "torn")
    assert "prep splits" in fault.mend
    workspace.images.write_bytes(data)
    write_tables(workspace, [ImageRecord("2", "2.png", 1, 1, "train")], None)
    other = workspace.images.read_bytes()
    write_tables(workspace, [ImageRecord("1", "1.png", 1, 1, "train")], [])
    workspace.images.write_bytes(other)
    (fault,) = verify_path(workspace.root).faults
    assert (fault.path, "other images" in fault.what) == (workspace.captions, True)


def test_what_holds_no_shards_is_refused(tmp_path):
    with pytest.raises(MissingError, match="no such folder"):
        verify_path(tmp_path / "nowhere")
    with pytest.raises(InputError, match="neither regions nor features"):
        verify_path(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        verify_path(tmp_path / "file")


def prep(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["prep", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_command_exits_with_1_on_findings_and_2_on_a_wrong_path(
    workspace, folder, monkeypatch, capsys
):
    monkeypatch.chdir(workspace.root)
    assert prep(monkeypatch, "verify", "--quick") == 0
    assert capsys.readouterr().out == "whole: 3 parts in 1 folder, by footers and sizes\n"
    flip(folder / "part-00000.parquet")
    assert prep(monkeypatch, "verify", "--quick") == 0
    assert prep(monkeypatch, "verify") == 1
    assert PREP in capsys.readouterr().out
    assert prep(monkeypatch, "verify", folder) == 1
    assert prep(monkeypatch, "verify", folder / "nothing") == 2


@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_bit_of_any_file_is_found(folder, seed):
    rng = np.random.default_rng(seed)
    for name, data in contents(folder).items():
        flipped = bytearray(data)
        flipped[rng.integers(len(data) - 1)] ^= 1 << rng.integers(8)
        (folder / name).write_bytes(flipped)
        assert verify(folder), name
        (folder / name).write_bytes(data)
    assert verify(folder) == []
