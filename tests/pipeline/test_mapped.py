from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dummy_stage import COLUMNS, plan, row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_store import REWRITES

from regionprep.pipeline.mapped import BOXES, CLASSES, SCORES, Leaf, features_leaf, map_values
from regionprep.pipeline.writer import PartWriter

FEATURES = features_leaf(8, "float16")
LEAVES = {"boxes": BOXES, "scores": SCORES, "classes": CLASSES, "features": FEATURES}
ROWS = [row(name, COLUMNS) for name in plan(10).image_ids]
LENGTHS = np.array([len(entry.boxes) for entry in ROWS], np.int64)


@pytest.fixture
def path(tmp_path):
    with PartWriter(tmp_path, plan(10), 0, COLUMNS) as writer:
        for entry in ROWS:
            writer.add(entry)
        writer.commit()
    return tmp_path / "part-00000.parquet"


def mapped(path, name, lengths=LENGTHS, leaf=None):
    buffer = pa.py_buffer(path.read_bytes())
    return map_values(buffer, pq.read_metadata(path), 0, leaf or LEAVES[name], lengths)


def true_values(name):
    return np.concatenate([getattr(entry, name) for entry in ROWS])


@pytest.mark.parametrize("name", LEAVES)
def test_our_own_values_are_mapped(path, name):
    np.testing.assert_array_equal(mapped(path, name), true_values(name), strict=True)


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("rewrite", REWRITES)
def test_rewritten_values_are_mapped_rightly_or_not_at_all(path, rewrite, name):
    rewrite(path)
    found = mapped(path, name)
    if found is not None:
        np.testing.assert_array_equal(found, true_values(name), strict=True)


@pytest.mark.parametrize("name", LEAVES)
def test_other_lengths_than_the_files_are_refused(path, name):
    for lengths in (LENGTHS[:-1], LENGTHS + 1, LENGTHS * 0):
        assert mapped(path, name, lengths) is None


@pytest.mark.parametrize(
    "leaf",
    [
        features_leaf(8, "float32"),
        features_leaf(4, "float16"),
        features_leaf(16, "float16"),
        Leaf(FEATURES.path, "<f2", 8, 1),
        Leaf("features", "<f2", 8, 2),
        Leaf(BOXES.path, "<i4", 4, 2),
        Leaf(SCORES.path, "<i4", 1, 1),
    ],
)
def test_another_type_or_width_is_refused(path, leaf):
    assert mapped(path, "", leaf=leaf) is None


def test_two_float32_in_the_place_of_four_float16_are_refused(path):
    """Half as many values, twice as wide: the bytes add up, the type does not."""
    table = pq.read_table(path)
    features = [[v[:4] for v in vectors] for vectors in table["features"].to_pylist()]
    field = pa.field("element", pa.float32(), nullable=False)
    inner = pa.field("element", pa.list_(field, 4), nullable=False)
    place = table.schema.get_field_index("features")
    wide = pa.field("features", pa.list_(inner), nullable=False)
    table = table.set_column(place, wide, pa.array(features, wide.type))
    pq.write_table(table, path, compression="none", use_dictionary=False)
    assert mapped(path, "features", leaf=features_leaf(4, "float32")) is not None
    assert mapped(path, "features") is None


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), name=st.sampled_from(sorted(LEAVES)))
def test_an_altered_page_header_never_misplaces_values(path, data, name):
    """Whatever stands in the header and the levels' lengths: the right values, or none."""
    metadata = pq.read_metadata(path)
    leaf = LEAVES[name]
    group = metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    start = next(c.data_page_offset for c in columns if c.path_in_schema == leaf.path)
    content = bytearray(path.read_bytes())
    content[start + data.draw(st.integers(0, 40))] = data.draw(st.integers(0, 255))
    found = map_values(pa.py_buffer(bytes(content)), metadata, 0, leaf, LENGTHS)
    if found is not None:
        np.testing.assert_array_equal(found, true_values(name), strict=True)
