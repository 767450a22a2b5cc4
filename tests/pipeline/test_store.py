from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dummy_stage import (
    COLUMNS,
    DummyStage,
    collate_views,
    contents,
    plan,
    read_features,
    row,
    same_rows,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from regionprep import FeatureStore
from regionprep.errors import InputError, MismatchError, MissingError, StorageError
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.parts import Manifest, PartRecord
from regionprep.pipeline.shards import MANIFEST, PLAN, Columns, ImageRow
from regionprep.pipeline.store import read_part
from regionprep.pipeline.tables import read_images, write_tables
from regionprep.pipeline.verify import verify

IDS = [f"image-{number:02d}" for number in range(24)] + ["image-bad"]


@pytest.fixture
def folder(tmp_path):
    """Return a finished folder of 3 parts, its last image failed."""
    folder = tmp_path / "features" / "frcnn" / "clip"
    run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, progress=False)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regionprep" / "decoded"


def expected(name):
    if name == "image-bad":
        return ImageRow.failed(
            name, "truncated", "image-bad ends early", width=3, height=4, feature_width=8
        )
    return row(name, COLUMNS)


def read_by_pyarrow(path):
    return pq.read_table(path).to_pylist()


def read_by_pandas(path):
    return pd.read_parquet(path).to_dict("records")


def read_by_polars(path):
    return pl.read_parquet(path).to_dicts()


def read_by_duckdb(path):
    return duckdb.sql(f"select * from '{path}'").to_arrow_table().to_pylist()


def read_by_datasets(path):
    import datasets

    datasets.disable_progress_bars()
    cache = str(path.parent.parent / "datasets")
    return list(datasets.Dataset.from_parquet(str(path), cache_dir=cache))


READERS = [read_by_pyarrow, read_by_pandas, read_by_polars, read_by_duckdb, read_by_datasets]


@pytest.mark.parametrize("columns", [COLUMNS, Columns(8, "float32"), Columns()], ids=str)
@pytest.mark.parametrize("read", READERS)
def test_other_readers_read_the_same(tmp_path, monkeypatch, read, columns):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "folder"
    run_plan(plan(IDS), folder, lambda: DummyStage(columns), progress=False)
    store = FeatureStore(folder)
    read_ids = []
    for path in sorted(folder.glob("part-*")):
        for entry in read(path):
            ours = store[entry["image_id"]]
            read_ids.append(entry["image_id"])
            for name in ("width", "height", "status", "error", "grid_height", "grid_width"):
                assert entry[name] == getattr(ours, name)
            for name in ("boxes", "scores", "classes", "features"):
                wanted = getattr(ours, name)
                if wanted is None:
                    assert name not in entry
                    continue
                found = np.array(
                    [list(value) for value in entry[name]]
                    if wanted.ndim > 1
                    else list(entry[name]),
                    dtype=wanted.dtype,
                )
                np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
    assert read_ids == store.ids


def test_a_store_gives_the_rows_that_were_made(folder):
    store = FeatureStore(folder)
    assert (len(store), store.ids) == (25, IDS)
    assert list(store) == IDS
    assert "image-03" in store
    assert "image-99" not in store
    for name in IDS:
        same_rows(store[name], expected(name))
    assert [found.image_id for found in store.rows()] == IDS
    assert store["image-bad"].ok is False
    assert store.statuses == {"ok": 24, "truncated": 1}


def test_a_store_tells_what_it_holds(folder):
    store = FeatureStore(folder)
    assert store.feature_width == 8
    assert store.dtype == np.float16
    assert store.metadata["weights"] == "sha256:1"
    assert store.metadata["stage"] == "features"
    assert store.fingerprint == plan(IDS, weights="sha256:1").fingerprint
    assert store.grid is None
    assert "25 images" in repr(store)


def test_regions_alone_have_no_features(tmp_path):
    run_plan(plan(5), tmp_path, lambda: DummyStage(Columns()), progress=False)
    store = FeatureStore(tmp_path)
    assert store.feature_width is store.dtype is store["image-0001"].features is None
    assert store.get_batch(store.ids).features is None


class Grids(DummyStage):
    def __init__(self, sizes):
        super().__init__(COLUMNS)
        self.sizes = sizes

    def __call__(self, items):
        return [self.grid(name, *self.sizes[int(name[-1]) % len(self.sizes)]) for name in items]

    def grid(self, name, high, wide):
        cells = high * wide
        return ImageRow(
            name,
            10,
            10,
            np.zeros((cells, 4), np.float32),
            np.zeros(cells, np.float32),
            np.zeros(cells, np.int32),
            np.ones((cells, 8), np.float16),
            grid_height=high,
            grid_width=wide,
        )


@pytest.mark.parametrize(("sizes", "grid"), [([(2, 3)], (2, 3)), ([(2, 3), (3, 2)], None)])
def test_a_grid_is_told_where_all_images_have_it(tmp_path, sizes, grid):
    run_plan(plan(12), tmp_path, lambda: Grids(sizes), progress=False)
    store = FeatureStore(tmp_path)
    assert store.grid == grid
    assert (store["image-0001"].grid_height, store["image-0001"].grid_width) == sizes[-1]


def test_values_are_views_of_the_file_and_cannot_be_changed(folder):
    store = FeatureStore(folder)
    for array in (store["image-01"].features, store["image-01"].boxes):
        assert not array.flags.owndata
        assert not array.flags.writeable
    assert all(part is None or part.mapped for part in store._parts)


def test_a_batch_is_padded_and_masked(folder):
    store = FeatureStore(folder)
    names = ["image-05", "image-bad", "image-01", "image-05"]
    batch = store.get_batch(names)
    assert batch.image_ids == tuple(names)
    assert batch.features.dtype == np.float16
    for place, name in enumerate(names):
        wanted = expected(name)
        regions = len(wanted.boxes)
        assert batch.mask[place].sum() == batch.mask[place, :regions].sum() == regions
        np.testing.assert_array_equal(batch.sizes[place], (wanted.width, wanted.height))
        for key in ("boxes", "scores", "classes", "features"):
            found = getattr(batch, key)[place]
            np.testing.assert_array_equal(found[:regions], getattr(wanted, key))
            assert not found[regions:].any()
    assert store.get_batch(["image-bad"]).features.shape == (1, 0, 8)
    with pytest.raises(InputError):
        store.get_batch([])


def test_an_unknown_id_is_a_key_error_that_names_it(folder):
    with pytest.raises(KeyError, match=r"no image 'image-99' among its 25"):
        FeatureStore(folder)["image-99"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_store_works_in_child_processes(folder, method):
    store = FeatureStore(folder)
    wanted = [np.array(store[name].features) for name in IDS]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=read_features, args=(store, IDS, queue))
    child.start()
    found = queue.get(timeout=60)
    child.join()
    assert child.exitcode == 0
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_pickled_store_carries_no_values(folder):
    store = FeatureStore(folder)
    store["image-01"]
    data = pickle.dumps(store)
    assert len(data) < 1000
    same_rows(pickle.loads(data)["image-01"], store["image-01"])


def test_threads_may_share_a_store(folder):
    store, found = FeatureStore(folder), []

    def read():
        found.extend(np.array_equal(store[name].features, expected(name).features) for name in IDS)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8 * len(IDS)


def open_files():
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("open files are counted in /proc")
    return len(list(folder.iterdir()))


def test_many_parts_need_few_open_files(tmp_path):
    run_plan(plan(60, shard_size=1), tmp_path, DummyStage, progress=False)
    store = FeatureStore(tmp_path)
    before = open_files()
    assert sum(1 for _ in store.rows()) == 60
    assert open_files() == before


def test_a_reader_keeps_its_values_while_parts_are_replaced(folder):
    store = FeatureStore(folder)
    before = store["image-01"]
    copy = np.array(before.features)
    run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, force=True, progress=False)
    np.testing.assert_array_equal(before.features, copy)


def test_reading_imports_neither_torch_nor_pandas(folder):
    code = (
        "import sys, regionprep; store = regionprep.FeatureStore(sys.argv[1]);"
        "store[store.ids[0]]; print({'torch', 'pandas', 'PIL', 'rich'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Orders, parts of a store, and batches for torch.


def test_an_order_is_that_of_the_shards_or_of_a_seed(folder):
    store = FeatureStore(folder)
    assert store.order() == IDS
    assert store.order(seed=1) == store.order(seed=1) != store.order(seed=2)
    assert sorted(store.order(seed=1)) == IDS
    assert [found.image_id for found in store.rows(seed=1)] == store.order(seed=1)


def test_a_subset_keeps_the_order_of_the_shards_and_shares_what_is_mapped(folder):
    store = FeatureStore(folder)
    part = store.subset(["image-bad", "image-15", "image-03", "image-15"])
    assert part.ids == ["image-03", "image-15", "image-bad"]
    assert (len(part), len(store)) == (3, 25)
    assert part.statuses == {"ok": 2, "truncated": 1}
    assert "image-04" not in part
    same_rows(part["image-15"], expected("image-15"))
    assert store._parts is part._parts
    with pytest.raises(KeyError, match=r"no image 'image-04' among its 3"):
        part["image-04"]
    with pytest.raises(KeyError, match=r"no image 'x' among its 25, nor 1 more"):
        store.subset(["x", "y", "image-01"])


def test_a_pickled_subset_stays_one(folder):
    part = pickle.loads(pickle.dumps(FeatureStore(folder).subset(["image-07", "image-20"])))
    assert part.ids == ["image-07", "image-20"]


def test_a_split_is_that_of_the_workspace(workspace):
    images = read_images(workspace)
    rows = [replace(image, split="val" if image.image_id < "2" else "train") for image in images]
    write_tables(workspace, rows, None)
    folder = workspace.features("grid", "dummy")
    run_plan(plan([image.image_id for image in images]), folder, DummyStage, progress=False)
    store = FeatureStore(folder)
    assert store.split("val").ids == ["0", "1"]
    assert store.split("train").ids == ["2", "3", "4", "9-broken"]
    with pytest.raises(InputError, match=r"unknown split 'trian'\. Did you mean 'train'"):
        store.split("trian")
    with pytest.raises(MissingError, match="1 of the 2 images of val are not here: 1"):
        store.subset(["0", "2"]).split("val")


def test_a_split_outside_a_workspace_is_refused(folder):
    with pytest.raises(MissingError, match=r"no workspace\.yaml"):
        FeatureStore(folder).split("train")


def test_a_batch_of_tensors_is_the_batch(folder):
    batch = FeatureStore(folder).get_batch(["image-05", "image-bad", "image-01"])
    tensors = batch.to_torch()
    assert tensors.image_ids == batch.image_ids
    for name in ("mask", "boxes", "scores", "classes", "features", "sizes"):
        array, tensor = getattr(batch, name), getattr(tensors, name)
        assert tensor.data_ptr() == array.ctypes.data
        np.testing.assert_array_equal(tensor.numpy(), array)
    wide = batch.to_torch(dtype=torch.float32)
    assert wide.features.dtype == wide.boxes.dtype == torch.float32
    assert torch.equal(wide.to("cpu").features, wide.features)


def test_a_batch_of_regions_has_no_tensor_of_features(tmp_path):
    run_plan(plan(5), tmp_path, lambda: DummyStage(Columns()), progress=False)
    tensors = FeatureStore(tmp_path).get_batch(["image-0001"]).to_torch().to("cpu")
    assert tensors.features is None


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_workers_of_a_loader_read_the_mapped_file(folder, method):
    store = FeatureStore(folder).subset(IDS[:20])
    loader = DataLoader(
        store,
        batch_size=8,
        sampler=store.order(seed=3),
        collate_fn=collate_views,
        num_workers=2,
        multiprocessing_context=method,
    )
    found = []
    for batch, are_views in loader:
        assert are_views
        found += batch.image_ids
        wanted = store.get_batch(batch.image_ids)
        np.testing.assert_array_equal(batch.features.numpy(), wanted.features)
        np.testing.assert_array_equal(batch.mask.numpy(), wanted.mask)
    assert found == store.order(seed=3)


def test_a_part_alone_is_read_wherever_it_lies(folder, tmp_path):
    path = tmp_path / "elsewhere.parquet"
    path.write_bytes((folder / "part-00002.parquet").read_bytes())
    rows = read_part(path)
    assert [found.image_id for found in rows] == IDS[20:]
    for found in rows:
        same_rows(found, expected(found.image_id))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="no whole part"):
        read_part(path)


# What is not finished, or not whole.


def test_a_folder_that_is_not_there_names_the_command(tmp_path):
    with pytest.raises(MissingError, match="prep extract --detector a --backbone b"):
        FeatureStore(tmp_path / "features" / "a" / "b")
    with pytest.raises(MissingError, match="prep detect --detector a"):
        FeatureStore(tmp_path / "regions" / "a")
    with pytest.raises(MissingError, match=PLAN):
        FeatureStore(tmp_path)


@pytest.mark.parametrize("name", [MANIFEST, "part-00001.parquet"])
def test_an_unfinished_folder_names_the_command(folder, name):
    (folder / name).unlink()
    with pytest.raises(MissingError, match=name) as caught:
        FeatureStore(folder)
    assert "prep extract --detector frcnn --backbone clip" in str(caught.value)


def test_the_manifest_of_another_plan_is_refused(folder, tmp_path):
    run_plan(plan(IDS, weights="sha256:2"), tmp_path / "other", DummyStage, progress=False)
    (folder / MANIFEST).write_bytes((tmp_path / "other" / MANIFEST).read_bytes())
    with pytest.raises(MismatchError, match="do not belong together"):
        FeatureStore(folder)


def cuts(size):
    return {0, 7, 100, size // 2, size - 9, size - 8, size - 1}


def test_a_cut_part_is_refused_at_opening_found_and_mended(folder):
    whole = contents(folder)
    path = folder / "part-00001.parquet"
    for cut in sorted(cuts(path.stat().st_size)):
        path.write_bytes(whole[path.name][:cut])
        with pytest.raises(StorageError, match=r"part-00001\.parquet: has .* bytes in place of"):
            FeatureStore(folder)
        assert [fault.path for fault in verify(folder, quick=True)] == [path]
        outcome = run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, progress=False)
        assert (outcome.shards_made, outcome.shards_kept) == (1, 2)
        assert contents(folder) == whole


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_part_cut_anywhere_without_a_manifest_is_not_taken_for_done(folder, data):
    path = folder / "part-00001.parquet"
    whole = contents(folder)
    (folder / MANIFEST).unlink()
    path.write_bytes(whole[path.name][: data.draw(st.integers(0, path.stat().st_size - 1))])
    outcome = run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, progress=False)
    assert outcome.shards_made == 1
    assert contents(folder) == whole


def test_a_part_shortened_after_opening_is_refused(folder):
    store = FeatureStore(folder)
    path = folder / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="is damaged"):
        store["image-15"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_flipped_bit_is_found_and_mended_as_verify_says(folder, data):
    path = folder / "part-00000.parquet"
    whole = contents(folder)
    flipped = bytearray(whole[path.name])
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(flipped)
    (fault,) = verify(folder)
    assert fault.path == path
    assert "prep extract --detector frcnn --backbone clip" in str(fault)
    if "Remove it" in fault.mend:
        path.unlink()
    run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, progress=False)
    assert contents(folder) == whole


def test_a_flipped_bit_in_a_value_is_found_by_its_checksum_alone(folder):
    path = folder / "part-00000.parquet"
    features = FeatureStore(folder)["image-00"].features.tobytes()
    assert features
    data = bytearray(path.read_bytes())
    data[data.index(features)] ^= 4
    path.write_bytes(data)
    assert verify(folder, quick=True) == []
    assert [(fault.path, fault.kind) for fault in verify(folder)] == [(path, "altered")]


def test_a_part_of_another_plan_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    run_plan(plan(IDS, weights="sha256:2"), other, DummyStage, progress=False)
    path = folder / "part-00001.parquet"
    path.write_bytes((other / path.name).read_bytes())
    assert path.stat().st_size == FeatureStore(folder).manifest.parts[1].bytes
    with pytest.raises(StorageError, match="is damaged: it is a part of another plan"):
        FeatureStore(folder)["image-15"]


def test_verify_finds_nothing_in_a_whole_folder(folder):
    assert verify(folder) == verify(folder, quick=True) == []


def test_verify_names_what_does_not_belong(folder, tmp_path):
    run_plan(plan(IDS, weights="sha256:2"), tmp_path / "other", DummyStage, progress=False)
    (folder / "notes.txt").write_text("mine")
    (folder / "part-00003.parquet").write_bytes((folder / "part-00000.parquet").read_bytes())
    (folder / ".part-00001.parquet.77.tmp").write_text("half")
    other = tmp_path / "other" / "part-00000.parquet"
    (folder / "part-00000.parquet").write_bytes(other.read_bytes())
    (folder / "part-00001.parquet").unlink()
    found = {fault.path.name: fault.kind for fault in verify(folder)}
    assert found == {
        "part-00000.parquet": "foreign",
        "part-00001.parquet": "missing",
        "notes.txt": "surplus",
        "part-00003.parquet": "surplus",
        ".part-00001.parquet.77.tmp": "leftover",
    }
    assert [fault.kind for fault in verify(tmp_path)] == ["missing"]


def test_surplus_files_do_not_disturb_a_reader(folder):
    (folder / "part-99999.parquet").write_bytes(b"nothing")
    (folder / "notes.txt").write_text("mine")
    assert len(list(FeatureStore(folder).rows())) == 25


# Parts that others have written: the same values, or refused; never mapped wrongly.


def rewrite_by_duckdb(path):
    target = path.with_suffix(".new")
    duckdb.sql(f"copy (select * from '{path}') to '{target}' (format parquet)")
    target.replace(path)


def rewrite_by_duckdb_uncompressed(path):
    target = path.with_suffix(".new")
    options = "format parquet, compression uncompressed, parquet_version v1"
    duckdb.sql(f"copy (select * from '{path}') to '{target}' ({options})")
    target.replace(path)


def rewrite_by_polars(path):
    pl.read_parquet(path).write_parquet(path, compression="uncompressed")


def rewrite_by_pandas(path):
    pd.read_parquet(path).to_parquet(path)


def rewrite_by_pyarrow(path):
    pq.write_table(pq.read_table(path), path)


def rewrite_in_two_groups(path):
    pq.write_table(pq.read_table(path), path, compression="none", row_group_size=4)


def rewrite_in_small_pages(path):
    options = {"data_page_size": 16, "write_batch_size": 1}
    pq.write_table(pq.read_table(path), path, compression="none", use_dictionary=False, **options)


def rewrite_as_v2_pages(path):
    options = {"data_page_version": "2.0", "use_dictionary": False}
    pq.write_table(pq.read_table(path), path, compression="none", **options)


REWRITES = [
    rewrite_by_duckdb,
    rewrite_by_duckdb_uncompressed,
    rewrite_by_polars,
    rewrite_by_pandas,
    rewrite_by_pyarrow,
    rewrite_in_two_groups,
    rewrite_in_small_pages,
    rewrite_as_v2_pages,
]


def adopt(folder, path):
    """Let the manifest vouch for a part as it is now."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for part in manifest["parts"]:
        if part["file"] == path.name:
            part["bytes"] = path.stat().st_size
            part["sha256"] = f"{path.stat().st_size:064x}"
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("rewrite", REWRITES)
def test_a_rewritten_part_is_refused(folder, rewrite):
    rewrite(folder / "part-00001.parquet")
    with pytest.raises(StorageError, match="cut, or rewritten"):
        FeatureStore(folder)


@pytest.mark.parametrize("rewrite", REWRITES)
def test_a_rewritten_part_is_made_again(folder, rewrite):
    whole = contents(folder)
    rewrite(folder / "part-00001.parquet")
    outcome = run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, progress=False)
    assert outcome.shards_made == 1
    assert contents(folder) == whole


@pytest.mark.parametrize("rewrite", REWRITES)
@pytest.mark.parametrize("columns", [COLUMNS, Columns(8, "float32"), Columns()], ids=str)
def test_a_rewritten_part_that_is_vouched_for_is_decoded(tmp_path, cache, rewrite, columns):
    folder = tmp_path / "folder"
    run_plan(plan(IDS), folder, lambda: DummyStage(columns), progress=False)
    wanted = {entry.image_id: copied(entry) for entry in FeatureStore(folder).rows()}
    rewrite(folder / "part-00001.parquet")
    adopt(folder, folder / "part-00001.parquet")
    for _ in range(2):
        store = FeatureStore(folder)
        for name in IDS:
            same_rows(store[name], wanted[name])
        assert [part.mapped for part in store._parts] == [True, False, True]
        assert len(list(cache.iterdir())) == 1


def test_without_room_for_a_cache_a_part_is_decoded_in_memory(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    rewrite_by_duckdb(folder / "part-00001.parquet")
    adopt(folder, folder / "part-00001.parquet")
    store = FeatureStore(folder)
    for name in IDS:
        same_rows(store[name], expected(name))


def copied(entry):
    return pickle.loads(pickle.dumps(entry))


def changed(path, **columns):
    table = pq.read_table(path)
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, values)
    pq.write_table(table, path)


def test_values_that_do_not_fit_the_type_are_refused(folder, cache):
    path = folder / "part-00001.parquet"
    features = [
        [[value + 1e-4 for value in vector] for vector in image]
        for image in pq.read_table(path)["features"].to_pylist()
    ]
    changed(path, features=pa.array(features, pa.list_(pa.list_(pa.float64()))))
    adopt(folder, path)
    with pytest.raises(StorageError, match=r"part-00001.*float16 does not hold"):
        FeatureStore(folder)["image-15"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda images: [vectors[:-1] for vectors in images], "numbers of regions"),
        (lambda images: [[v[:-1] for v in vectors] for vectors in images], "not 8 values each"),
        (lambda images: [[[None] * 8 for _ in vectors] for vectors in images], "nulls"),
        (lambda images: [None for _ in images], "numbers of regions"),
    ],
)
def test_lists_that_do_not_fit_are_refused(folder, cache, edit, message):
    path = folder / "part-00001.parquet"
    images = edit(pq.read_table(path)["features"].to_pylist())
    changed(path, features=pa.array(images, pa.list_(pa.list_(pa.float32()))))
    adopt(folder, path)
    with pytest.raises(StorageError, match=message):
        FeatureStore(folder)["image-15"]


def test_rows_in_another_order_are_refused(folder):
    path = folder / "part-00001.parquet"
    pq.write_table(pq.read_table(path).sort_by([("image_id", "descending")]), path)
    adopt(folder, path)
    with pytest.raises(StorageError, match="its image ids are not the plan's"):
        FeatureStore(folder)["image-15"]


@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 1, "columns": {"a": 1}}']
)
def test_a_damaged_manifest_is_named_and_made_again(folder, damage):
    whole = contents(folder)
    (folder / MANIFEST).write_text(damage)
    with pytest.raises(StorageError, match=MANIFEST):
        FeatureStore(folder)
    assert [fault.path for fault in verify(folder)] == [folder / MANIFEST]
    outcome = run_plan(plan(IDS, weights="sha256:1"), folder, DummyStage, progress=False)
    assert outcome.shards_made == 0
    assert contents(folder) == whole
    assert isinstance(Manifest.read(folder).parts[0], PartRecord)
