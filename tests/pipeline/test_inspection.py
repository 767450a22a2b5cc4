"""What `prep inspect` tells of a folder, and of a part alone."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from dummy_stage import COLUMNS, DummyStage, plan

from regionprep import FeatureStore, cli
from regionprep.errors import MissingError, StorageError
from regionprep.pipeline import inspection
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.inspection import inspect_path
from regionprep.pipeline.shards import Columns

IDS = [f"image-{number:02d}" for number in range(24)] + ["a bad\nname " + "x" * 90]
SETTINGS = {"weights": {"sha256": "ab12" * 16}, "classes": [f"class {n}" for n in range(90)]}


def made(folder, columns=COLUMNS, ids=IDS):
    run_plan(plan(ids, **SETTINGS), folder, lambda: DummyStage(columns), progress=False)
    return folder


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "features" / "frcnn" / "clip")


def test_counts_and_histograms_are_those_of_the_rows(folder):
    found, rows = inspect_path(folder), list(FeatureStore(folder).rows())
    assert (found.images, found.parts, found.stage) == (25, 3, "features")
    assert found.regions == sum(len(row.boxes) for row in rows)
    assert found.statuses == {"ok": 24, "truncated": 1}
    boxes, areas, norms = found.histograms
    assert (boxes.values, sum(boxes.counts)) == (24, 24)
    assert areas.values == sum(areas.counts) == norms.values == sum(norms.counts) == found.regions
    ok = [len(row.boxes) for row in rows if row.ok]
    assert (boxes.low, boxes.high, boxes.mean) == (min(ok), max(ok), np.mean(ok))
    for place, count in enumerate(boxes.counts):
        assert count == sum(boxes.edges[place] <= n < boxes.edges[place + 1] for n in ok)
    lengths = [np.linalg.norm(v) for row in rows for v in row.features.astype(np.float64)]
    np.testing.assert_allclose(norms.mean, np.mean(lengths), rtol=1e-5)
    np.testing.assert_allclose(norms.high, np.max(lengths), rtol=1e-5)


def test_the_area_of_a_box_is_its_share_of_the_image(tmp_path):
    found = inspect_path(made(tmp_path))
    shares = [
        100 * float((box[2] - box[0]) * (box[3] - box[1])) / (row.width * row.height)
        for row in FeatureStore(tmp_path).rows()
        for box in row.boxes
        if box[2] > box[0] and box[3] > box[1]
    ]
    np.testing.assert_allclose(found.histograms[1].high, max(shares), rtol=1e-4)


def test_a_person_reads_it_in_80_columns(folder):
    text = str(inspect_path(folder))
    assert max(len(line) for line in text.splitlines()[1:]) <= 80
    for said in (
        "25 images",
        "parts: 3",
        "truncated  1",
        "list of 8 x float16",
        "weights.sha256",
        "[90 values: class 0, class 1, ...]",
        "image-00",
        "boxes an image: 0 to 6",
        "feature norms: ",
        "####",
    ):
        assert said in text, said
    assert all(line.isprintable() for line in text.splitlines())


def test_a_part_alone_is_told_like_a_folder(folder, tmp_path):
    copy = tmp_path / "copy.parquet"
    copy.write_bytes((folder / "part-00002.parquet").read_bytes())
    found = inspect_path(copy)
    assert (found.images, found.parts, found.fingerprint) == (
        5,
        1,
        FeatureStore(folder).fingerprint,
    )
    assert found.settings == FeatureStore(folder).plan.settings
    assert "image-19" in str(found)
    copy.write_bytes(b"nothing")
    with pytest.raises(StorageError, match="no whole part"):
        inspect_path(copy)


def test_many_images_are_sampled_evenly(folder, monkeypatch):
    monkeypatch.setattr(inspection, "SAMPLE", 10)
    found = inspect_path(folder)
    assert found.sampled == 10
    assert "histograms of 25 images, 10 of them taken evenly" in str(found)
    assert inspection._evenly(25) == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]


def test_regions_have_no_norms_and_failures_no_histogram(tmp_path):
    found = inspect_path(made(tmp_path / "regions", Columns()))
    assert [one.name for one in found.histograms] == ["boxes an image", "box area, % of the image"]
    assert "features" not in found.columns
    nothing = inspect_path(made(tmp_path / "bad", ids=["bad-1", "bad-2"]))
    assert (nothing.histograms, nothing.statuses) == ([], {"truncated": 2})
    assert "histogram" not in str(nothing)
    assert "bad-1 ends early" in str(nothing)


def test_json_holds_all_of_it(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prep", "inspect", str(folder), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["statuses"] == {"ok": 24, "truncated": 1}
    assert told["settings"]["classes"] == SETTINGS["classes"]
    assert [row["image_id"] for row in told["rows"]][1] == IDS[0]
    assert len(told["histograms"]) == 3


def test_what_is_not_there_is_told(folder, tmp_path):
    with pytest.raises(MissingError, match="no such folder or part"):
        inspect_path(tmp_path / "nothing")
    (folder / "manifest.json").unlink()
    with pytest.raises(MissingError, match="prep extract --detector frcnn"):
        inspect_path(folder)
