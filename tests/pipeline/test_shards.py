from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dummy_stage import DummyStage, image_ids, plan, row, same_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regionprep.errors import InputError, MismatchError, StorageError
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.parts import Footer
from regionprep.pipeline.shards import PLAN, Columns, ImageRow, Plan, columns_of, command, schema
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.writer import PartWriter

ids = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, unique=True)


@given(ids, st.integers(1, 7))
def test_a_plan_holds_every_image_once_and_in_order(names, shard_size):
    made = Plan.make(names, stage="regions", settings={}, shard_size=shard_size)
    shards = [made.shard(number) for number in range(made.shard_count)]
    assert [name for shard in shards for name in shard] == sorted(names)
    assert all(len(shard) == shard_size for shard in shards[:-1])
    assert made.shard(made.shard_count) == ()


@given(ids, st.randoms())
def test_a_plan_does_not_depend_on_the_order_of_its_images(names, random):
    shuffled = random.sample(names, len(names))
    made, other = (
        Plan.make(order, stage="regions", settings={"a": 1}) for order in (names, shuffled)
    )
    assert made == other
    assert made.fingerprint == other.fingerprint


def test_a_plan_survives_its_file(tmp_path):
    made = plan(["ü", 'quote"', "line\nfeed", ""], weights={"file": "a.pt", "sizes": (1, 2)})
    made.write(tmp_path)
    assert Plan.read(tmp_path) == made
    assert Plan.read(tmp_path).fingerprint == made.fingerprint
    assert Plan.read(tmp_path / "elsewhere") is None


def test_duplicate_ids_are_refused_by_name():
    with pytest.raises(InputError, match=r"1 image ids occur more than once: b"):
        plan(["b", "a", "b", "b"])


@pytest.mark.parametrize(
    ("names", "size", "message"),
    [
        ([], 1, "no images"),
        (["a"], 0, "at least 1 image, not 0"),
        (["\udcff"], 1, "no valid text: '\\\\udcff'"),
    ],
)
def test_plans_that_cannot_be_are_refused(names, size, message):
    with pytest.raises(InputError, match=message):
        plan(names, shard_size=size)


def test_library_versions_do_not_bind_a_plan():
    old, new = plan(3, versions={"torch": "2.6"}), plan(3, versions={"torch": "2.15"})
    assert old.fingerprint == new.fingerprint
    assert new.settings["versions"]["torch"] == "2.15"
    assert new.settings["versions"]["pyarrow"] == pa.__version__


def test_notes_are_recorded_and_do_not_bind_a_plan():
    here, there = plan(3, notes={"device": "cpu"}), plan(3, notes={"device": "cuda"})
    assert here.fingerprint == there.fingerprint
    assert there.settings["notes"] == {"device": "cuda"}


def test_what_differs_between_plans_is_named(tmp_path):
    old = plan(["a", "b"], detector={"weights": "1", "threshold": 0.2})
    new = plan(["b", "c", "d"], 20, detector={"weights": "2", "threshold": 0.2}, grid=True)
    with pytest.raises(MismatchError) as caught:
        new.require_same(old, tmp_path)
    message = str(caught.value)
    for told in (
        "detector.weights was 1, is 2",
        "grid was not set, is True",
        "shard_size was 10, is 20",
        "1 images are gone (a)",
        "2 images are new (c, d)",
        str(tmp_path),
        "--force",
    ):
        assert told in message
    assert "threshold" not in message


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"schema_version": 1}'])
def test_a_damaged_plan_is_named(tmp_path, damage):
    (tmp_path / PLAN).write_text(damage)
    with pytest.raises(StorageError, match=PLAN):
        Plan.read(tmp_path)


def test_an_edited_plan_is_noticed(tmp_path):
    plan(3, threshold=0.2).write(tmp_path)
    file = tmp_path / PLAN
    file.write_text(file.read_text().replace("0.2", "0.3"))
    with pytest.raises(StorageError, match="altered"):
        Plan.read(tmp_path)


def test_a_plan_of_another_format_is_refused(tmp_path):
    plan(3).write(tmp_path)
    file = tmp_path / PLAN
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(MismatchError, match="format version 2"):
        Plan.read(tmp_path)


@pytest.mark.parametrize("columns", [Columns(), Columns(5, "float16"), Columns(7, "float32")])
def test_a_schema_tells_its_columns_and_requires_every_value(columns):
    made = schema(columns)
    assert columns_of(made) == columns
    assert not any(field.nullable for field in made)
    assert not made.field("boxes").type.value_field.nullable


def test_commands_follow_a_workspace(tmp_path):
    regions, features = tmp_path / "regions" / "frcnn", tmp_path / "features" / "frcnn" / "clip"
    assert command("regions", regions) == "prep detect --detector frcnn"
    assert command("features", features) == "prep extract --detector frcnn --backbone clip"
    assert command("features", tmp_path / "elsewhere") == "prep extract"


@st.composite
def image_rows(draw):
    columns = Columns(
        draw(st.sampled_from([None, 1, 3, 8])), draw(st.sampled_from(["float16", "float32"]))
    )
    names = sorted(draw(ids))
    regions = [draw(st.integers(0, 5)) for _ in names]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [
        ImageRow(
            name,
            width=draw(st.integers(0, 2**31 - 1)),
            height=draw(st.integers(0, 2**31 - 1)),
            boxes=rng.normal(size=(count, 4)).astype(np.float32),
            scores=rng.normal(size=count).astype(np.float32),
            classes=rng.integers(-(2**31), 2**31, count).astype(np.int32),
            features=columns.feature_width
            and rng.normal(size=(count, columns.feature_width)).astype(columns.dtype),
            error=draw(st.text(st.characters(codec="utf-8"), max_size=5)),
            grid_height=count,
            grid_width=1 if count else 0,
        )
        for name, count in zip(names, regions, strict=True)
    ]
    return columns, rows


class Given:
    """A stage that returns rows it was given."""

    batch_size = 3

    def __init__(self, columns, rows):
        self.schema, self.by_id = columns, {row.image_id: row for row in rows}

    def read(self, image_id):
        return self.by_id[image_id]

    def __call__(self, items):
        return items


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table=image_rows(), shard_size=st.integers(1, 4))
def test_rows_come_back_as_they_were_written(tmp_path_factory, table, shard_size):
    columns, rows = table
    folder = tmp_path_factory.mktemp("rows")
    made = plan([entry.image_id for entry in rows], shard_size)
    run_plan(made, folder, lambda: Given(columns, rows), progress=False)
    store = FeatureStore(folder)
    assert store.ids == [entry.image_id for entry in rows]
    for entry in rows:
        same_rows(store[entry.image_id], entry)
    assert all(part.mapped for part in store._parts)


def write(folder, made, columns, rows):
    with PartWriter(folder, made, 0, columns) as writer:
        for entry in rows:
            writer.add(entry)
        return writer.commit()


def test_a_row_group_holds_at_most_256_images_and_16_mib(tmp_path):
    columns = Columns(1024, "float32")
    made = plan(300, 300)
    empty = [ImageRow.failed(name, "missing", "", feature_width=1024) for name in made.image_ids]
    write(tmp_path, made, columns, empty)
    metadata = Footer.read(tmp_path / "part-00000.parquet").metadata
    assert [metadata.row_group(group).num_rows for group in range(2)] == [256, 44]

    wide = np.zeros((1024, 1024), np.float32)
    made = plan(6, 6)
    rows = [
        ImageRow(name, 1, 1, wide[:, :4], wide[:, 0], np.zeros(1024, np.int32), wide)
        for name in made.image_ids
    ]
    write(tmp_path, made, columns, rows)
    metadata = Footer.read(tmp_path / "part-00000.parquet").metadata
    assert [metadata.row_group(group).num_rows for group in range(2)] == [4, 2]


def test_values_are_one_plain_page_with_a_checksum(tmp_path):
    made, columns = plan(50, 50), Columns(8)
    write(tmp_path, made, columns, [row(name, columns) for name in made.image_ids])
    path = tmp_path / "part-00000.parquet"
    group = pq.read_metadata(path).row_group(0)
    for index in range(group.num_columns):
        column = group.column(index)
        assert column.compression == "UNCOMPRESSED"
        assert not column.has_dictionary_page
        assert column.is_stats_set == (column.path_in_schema == "image_id")
    # A flipped bit is noticed by whoever asks for page checksums.
    data = bytearray(path.read_bytes())
    features = group.column(group.num_columns - 1)
    data[features.data_page_offset + features.total_compressed_size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)


def test_the_footer_tells_where_the_rows_come_from(tmp_path):
    made = plan(4, 4, detector={"name": "frcnn", "weights": "sha256:1"})
    write(tmp_path, made, Columns(8), [row(name, Columns(8)) for name in made.image_ids])
    footer = Footer.read(tmp_path / "part-00000.parquet")
    assert footer.fingerprint == made.fingerprint
    assert b'"weights": "sha256:1"' in footer.metadata.metadata[b"regionprep"]


def test_a_part_that_is_not_committed_leaves_nothing(tmp_path):
    made, columns = plan(4, 4), Columns(8)
    with pytest.raises(RuntimeError), PartWriter(tmp_path, made, 0, columns) as writer:
        writer.add(row(made.image_ids[0], columns))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_id": "other"}, "returned 'other' in place of 'image-0000'"),
        ({"scores": np.zeros(3, np.float32)}, r"scores have shape \(3,\) in place of \(2,\)"),
        ({"features": np.zeros((2, 7), np.float16)}, r"features have shape \(2, 7\)"),
        ({"features": None}, r"features have shape \(\)"),
        ({"grid_height": 2, "grid_width": 2}, "a grid of 4 cells with 2 regions"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path, change, message):
    values = {
        "image_id": "image-0000",
        "width": 1,
        "height": 1,
        "boxes": np.zeros((2, 4), np.float32),
        "scores": np.zeros(2, np.float32),
        "classes": np.zeros(2, np.int32),
        "features": np.zeros((2, 8), np.float16),
    }
    with pytest.raises(ValueError, match=message):
        write(tmp_path, plan(1), Columns(8), [ImageRow(**{**values, **change})])


def test_a_part_with_rows_missing_is_not_committed(tmp_path):
    with pytest.raises(ValueError, match="0 rows of 2"):
        write(tmp_path, plan(2), Columns(8), [])
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_the_same_rows_writes_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        run_plan(plan(25), tmp_path / name, DummyStage, progress=False)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.*")}
        for name in ("one", "two")
    )
    assert one == two
    assert len(image_ids(25)) == 25
