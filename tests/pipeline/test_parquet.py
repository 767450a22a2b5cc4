from __future__ import annotations

import io
import mmap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dummy_stage import DummyStage, plan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import READERS

from regionprep import FeatureStore
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.mapped import BOXES, CLASSES, SCORES, features_leaf, map_values
from regionprep.pipeline.parquet import ALIGNMENT, Page, Writer
from regionprep.pipeline.shards import Columns, schema

TEXT = st.text(st.characters(codec="utf-8"), max_size=6)


def group(rng, texts, lengths, columns):
    rows, regions = len(lengths), sum(lengths)
    integers = rng.integers(-(2**31), 2**31, (4, rows)).astype(np.int32)
    names = ("width", "height", "grid_height", "grid_width")
    return {
        "image_id": sorted(texts),
        "status": texts,
        "error": texts[::-1],
        **dict(zip(names, integers, strict=True)),
        "boxes": rng.normal(size=(regions, 4)).astype(np.float32),
        "scores": rng.normal(size=regions).astype(np.float32),
        "classes": rng.integers(-(2**31), 2**31, regions).astype(np.int32),
        "features": rng.normal(size=(regions, columns.feature_width)).astype(columns.dtype),
    }


def written(columns, groups):
    file = io.BytesIO()
    writer = Writer(file.write, schema(columns))
    for values, lengths in groups:
        writer.write_group(values, np.array(lengths, np.int64))
    writer.finish({"key": "välue"})
    return file.getvalue()


def in_rows(values, lengths):
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])]


@st.composite
def tables(draw):
    columns = Columns(
        draw(st.sampled_from([1, 2, 5, 64, 200])), draw(st.sampled_from(["float16", "float32"]))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        lengths = draw(st.lists(st.integers(0, 9) | st.just(0) | st.just(70), min_size=1))
        texts = [draw(TEXT) for _ in lengths]
        groups.append((group(rng, texts, lengths, columns), lengths))
    return columns, groups


@settings(max_examples=80, deadline=None)
@given(tables())
def test_pyarrow_reads_what_was_written(table):
    columns, groups = table
    data = written(columns, groups)
    with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
        assert file.schema_arrow.equals(schema(columns))
        assert file.metadata.metadata[b"key"] == "välue".encode()
        assert file.metadata.num_rows == sum(len(lengths) for _, lengths in groups)
        for number, (values, lengths) in enumerate(groups):
            found = file.read_row_group(number, use_threads=False)
            found.validate(full=True)
            for name in found.column_names:
                wanted = values[name]
                if name in ("boxes", "scores", "classes", "features"):
                    wanted = in_rows(wanted, lengths)
                assert found[name].to_pylist() == list(wanted), name


@settings(max_examples=30, deadline=None)
@given(tables())
def test_every_value_can_be_mapped_and_is_aligned(table):
    columns, groups = table
    data = pa.py_buffer(written(columns, groups))
    metadata = pq.read_metadata(pa.BufferReader(data))
    leaves = {
        "boxes": BOXES,
        "scores": SCORES,
        "classes": CLASSES,
        "features": features_leaf(columns.feature_width, columns.dtype),
    }
    for number, (values, lengths) in enumerate(groups):
        for name, leaf in leaves.items():
            view = map_values(data, metadata, number, leaf, np.array(lengths, np.int64))
            np.testing.assert_array_equal(view, values[name], strict=True)
            if view.size:
                assert (view.ctypes.data - data.address) % ALIGNMENT == 0


def test_only_image_ids_have_statistics():
    rng = np.random.default_rng(0)
    data = written(Columns(4), [(group(rng, ["ü", "a", "z"], [1, 2, 0], Columns(4)), [1, 2, 0])])
    found = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    statistics = found.column(0).statistics
    assert (statistics.min, statistics.max, statistics.null_count) == ("a", "ü", 0)
    assert not any(found.column(index).is_stats_set for index in range(1, found.num_columns))


def test_values_that_do_not_fit_the_lengths_are_refused():
    rng = np.random.default_rng(0)
    values = group(rng, ["a"], [2], Columns(4))
    with pytest.raises(ValueError, match="8 values of boxes for 3 regions"):
        written(Columns(4), [(values, [3])])


def test_a_page_of_two_gibibytes_is_refused():
    writer = Writer(lambda data: None, schema(Columns()))
    # Never touched, so it takes no memory.
    with mmap.mmap(-1, 2**31) as data, memoryview(data) as view:
        with pytest.raises(ValueError, match="less than 2 GiB") as caught:
            writer._write_page(Page(b"", view, 1))
        caught.value.__traceback__ = None


@pytest.mark.parametrize("read", READERS)
def test_other_readers_read_several_row_groups(tmp_path, monkeypatch, read):
    """Rows of up to 60 regions, in 2 row groups and 1 part, with what a row lists in its place."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "folder"
    columns = Columns(24, "float16")
    run_plan(plan(300, 300), folder, lambda: DummyStage(columns, longest=60), progress=False)
    store = FeatureStore(folder)
    entries = read(folder / "part-00000.parquet")
    assert pq.read_metadata(folder / "part-00000.parquet").num_row_groups == 2
    assert [entry["image_id"] for entry in entries] == store.ids
    for entry in entries[::7]:
        ours = store[entry["image_id"]]
        np.testing.assert_array_equal(list(entry["scores"]), ours.scores)
        found = [list(vector) for vector in entry["features"]]
        np.testing.assert_array_equal(
            np.array(found, np.float16).reshape(-1, 24), ours.features, strict=True
        )


def test_duckdb_finds_an_image_by_its_id(tmp_path):
    import duckdb

    run_plan(plan(600, 300), tmp_path, lambda: DummyStage(Columns(4)), progress=False)
    query = f"select width from '{tmp_path}/part-*.parquet' where image_id = 'image-0577'"
    assert duckdb.sql(query).fetchall() == [(FeatureStore(tmp_path)["image-0577"].width,)]
