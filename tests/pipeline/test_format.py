"""`docs/format.md` is enough to read a folder: its reader runs as printed, its keys are all."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from dummy_stage import COLUMNS, DummyStage, plan

from regionprep import FeatureStore
from regionprep.pipeline.detect import run_detect
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.extract import run_extract
from regionprep.pipeline.images import STATUSES
from regionprep.pipeline.shards import Columns, schema

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
IDS = [*(f"image-{number:03d}" for number in range(600)), "bad", "ähnlich", "図"]


def printed_reader():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    scope = {}
    exec(code, scope)
    return scope["rows"], code


@pytest.fixture(params=[COLUMNS, Columns(5, "float32"), Columns()], ids=str)
def folder(request, tmp_path):
    """Return a folder of 2 parts, the first of 2 row groups."""
    run_plan(plan(IDS, 500), tmp_path, lambda: DummyStage(request.param), progress=False)
    return tmp_path


def equals_the_store(folder):
    store, read = FeatureStore(folder), []
    for found in printed_reader()[0](folder):
        wanted = store[found["image_id"]]
        read.append(found["image_id"])
        for name in schema(store.manifest.columns).names:
            value = getattr(wanted, name)
            if isinstance(value, np.ndarray):
                assert found[name].dtype == value.dtype
                np.testing.assert_array_equal(found[name].reshape(value.shape), value)
            else:
                assert found[name] == value, name
    assert read == store.ids


def test_the_printed_reader_reads_what_the_store_reads(folder):
    equals_the_store(folder)


def test_the_printed_reader_reads_photographs(workspace, timm_weights):
    run_detect(workspace, "grid", max_boxes=6, progress=False)
    options = {"weights": timm_weights("test_resnet", 0), "device": "cpu", "progress": False}
    equals_the_store(run_extract(workspace, "grid", "timm:test_resnet", **options).folder)


def test_the_printed_reader_is_short_and_independent():
    code = printed_reader()[1]
    assert "regionprep" not in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 43


def test_the_places_of_rows_and_the_fingerprint_are_as_the_page_says(folder):
    told = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert told["image_ids"] == sorted(told["image_ids"], key=str.encode)
    settings = {k: v for k, v in told["settings"].items() if k not in ("versions", "notes")}
    content = [1, told["stage"], settings, told["shard_size"], told["image_ids"]]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert told["fingerprint"] == hashlib.sha256(text.encode()).hexdigest()
    for number in range(2):
        part = pq.read_table(folder / f"part-{number:05d}.parquet", columns=["image_id"])
        assert part["image_id"].to_pylist() == told["image_ids"][number * 500 : (number + 1) * 500]


def test_every_key_and_column_stands_on_the_page(folder):
    described = set(re.findall(r"`([^`\n]+)`", PAGE))
    written = set(schema(COLUMNS).names) | set(STATUSES) | {"not_finite", "ok"}
    metadata = pq.read_metadata(folder / "part-00000.parquet").metadata
    for name, text in metadata.items():
        written.add(name.decode())
        if name.startswith(b"regionprep"):
            written |= set(json.loads(text))
    for name in ("plan.json", "manifest.json"):
        written |= set(json.loads((folder / name).read_text(encoding="utf-8")))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    written |= manifest["columns"].keys() | manifest["parts"][0].keys()
    assert written <= described


def test_values_lie_as_the_page_says(folder):
    metadata = pq.read_metadata(folder / "part-00000.parquet")
    data = (folder / "part-00000.parquet").read_bytes()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            start = column.data_page_offset
            assert data[start : start + 3] == b"\x15\x00\x15"
            assert column.compression == "UNCOMPRESSED"
            assert set(column.encodings) - {"RLE"} == {"PLAIN"}
            if column.path_in_schema in ("width", "height", "grid_height", "grid_width"):
                end = start + column.total_compressed_size
                assert (end - 4 * group.num_rows) % 64 == 0
