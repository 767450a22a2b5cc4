"""Features go to other projects' formats and come back as they were, both ways."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import tarfile
import tempfile
import weakref
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dummy_stage import DummyStage, contents, plan, same_rows
from exchange_data import IDS, READERS, WIDTH, WRITERS, made, tsv_line, write_folders, write_tsv
from hypothesis import given
from hypothesis import strategies as st

from regionprep import cli
from regionprep.errors import InputError, MismatchError, MissingError, StorageError
from regionprep.job import steps
from regionprep.pipeline.exchange import FORMATS, record, run_export, run_import, tsv
from regionprep.pipeline.exchange.databases import database_source
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.extract import FeaturePipeline
from regionprep.pipeline.shards import Columns
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.verify import verify
from regionprep.training.batches import pad_regions, require_own_boxes

HERE = Path(__file__).parent


def same_as_made(store, ids=IDS, fields=("features", "boxes")):
    for name in ids:
        for field in fields:
            np.testing.assert_array_equal(getattr(store[name], field), made(name)[field])
    assert store.dtype == np.float32


@pytest.mark.parametrize("form", WRITERS)
def test_their_features_come_in_and_go_out_as_they_were(form, imported, workspace_of, tmp_path):
    workspace = workspace_of()
    store, outcome = imported(form, WRITERS[form](tmp_path / f"in.{form}"), workspace=workspace)
    same_as_made(store)
    assert outcome.failed == 0
    assert store.metadata["boxes"] == FeatureStore(workspace.regions("found")).fingerprint
    run_export(workspace, form, tmp_path / f"out.{form}", progress=False)
    there = READERS[form](tmp_path / f"out.{form}")
    assert sorted(there) == sorted(IDS)
    for name, arrays in there.items():
        for field, array in arrays.items():
            np.testing.assert_array_equal(array, made(name)[field])
            assert field == "size" or array.dtype == np.float32


# What a way through a format does not keep of a row.
LOST = {"tsv": {"scores", "classes"}}
WRITABLE = [name for name, form in FORMATS.items() if form.sink]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("form", WRITABLE)
def test_our_features_go_out_and_come_in_as_they_were(
    form, dtype, imported, workspace_of, tmp_path
):
    names = [f"image-{number}" for number in range(9)]
    workspace = workspace_of(names)
    stage = DummyStage(Columns(WIDTH, dtype))
    run_plan(plan(names), workspace.features("own", "rows"), lambda: stage, progress=False)
    before = FeatureStore(workspace.features("own", "rows"))
    told = str(run_export(workspace, form, tmp_path / "out", progress=False))
    assert ("written as float32" in told) == (form.startswith("tsv") and dtype == "float16")
    assert "grid" not in told
    after, _ = imported(form, tmp_path / "out", workspace=workspace)
    for name in names:
        one, two = before[name], after[name]
        if form.startswith("tsv"):
            one.features = one.features.astype(np.float32)
        for field in LOST.get(form, ()):
            setattr(two, field, getattr(one, field))
        # 36 bytes of boxes tell no size: images.parquet does.
        same_rows(one, two)


def test_a_six_field_file_has_the_confidence_of_its_regions_unknown(imported, tmp_path):
    store, _ = imported("tsv", write_tsv(tmp_path / "in.tsv"))
    assert (store["139"].scores == 1).all()
    assert (store["139"].width, store["139"].height) == (643, 480)


def test_a_ten_field_file_keeps_classes_and_scores(imported, tmp_path):
    store, outcome = imported("tsv", write_tsv(tmp_path / "in.tsv", fields=10))
    same_as_made(store, fields=("features", "boxes", "scores", "classes"))
    assert "left out, for no column holds it: attributes" in str(outcome)


def test_the_detector_s_own_output_comes_in_and_goes_out(
    shared_data, imported, workspace_of, tmp_path
):
    lines = (shared_data / "bottom_up" / "train2014_obj36.tsv").read_text().splitlines()
    theirs = {line.split("\t")[0]: line.split("\t") for line in lines}
    numbers = {str(int(name.rpartition("_")[2])): line for name, line in theirs.items()}
    path = shared_data / "bottom_up" / "train2014_obj36.tsv"
    workspace = workspace_of(numbers)
    store, _ = imported("tsv", path, rule="number", workspace=workspace)
    assert store.feature_width == 2048
    run_export(workspace, "tsv10", tmp_path / "out.tsv", progress=False)
    for line in (tmp_path / "out.tsv").read_text().splitlines():
        name, *fields = line.split("\t")
        kept = [1, 2, 3, 4, 7, 8, 9]
        assert [fields[i - 1] for i in kept] == [numbers[name][i] for i in kept]
        assert store[name].boxes.max() <= max(store[name].width, store[name].height)


def write_bottom_up_npz(folder):
    folder.mkdir()
    for name in IDS:
        entry = made(name)
        width, height = entry["size"]
        np.savez_compressed(
            folder / f"{name}.npz",
            x=entry["features"],
            bbox=entry["boxes"],
            num_bbox=len(entry["boxes"]),
            image_h=height,
            image_w=width,
            info=np.array({"objects_id": entry["classes"]}),
        )
    return folder


def test_an_npz_with_a_pickled_array_is_read_without_it(imported, tmp_path):
    store, outcome = imported("numpy", write_bottom_up_npz(tmp_path / "npz"))
    assert "left out, for no column holds it: info" in str(outcome)
    same_as_made(store)
    assert (store["9"].width, store["9"].height) == (641, 480)


def write_tar(path):
    with tarfile.open(path, "w") as archive:
        for name in IDS:
            for field in ("features", "boxes", "scores", "classes"):
                sink = io.BytesIO()
                np.save(sink, made(name)[field])
                member = tarfile.TarInfo(f"./{name}.{field}.npy")
                member.size = sink.tell()
                archive.addfile(member, io.BytesIO(sink.getvalue()))
    return path


def test_a_webdataset_tar_comes_in(imported, tmp_path):
    store, _ = imported("tar", write_tar(tmp_path / "in.tar"))
    same_as_made(store, fields=("features", "boxes", "scores", "classes"))


def test_a_tar_that_is_cut_gives_what_is_whole(imported, tmp_path):
    path = write_tar(tmp_path / "in.tar")
    with tarfile.open(path) as archive:
        cut = archive.getmember("./abc.features.npy").offset_data + 130
    path.write_bytes(path.read_bytes()[:cut])
    store, _ = imported("tar", path, skip_missing=True)
    assert store.statuses == {"ok": 4, "damaged": 1}


def test_a_compressed_tar_is_refused_with_what_to_do(imported, tmp_path):
    import gzip

    (tmp_path / "in.tar").write_bytes(gzip.compress(write_tar(tmp_path / "own.tar").read_bytes()))
    with pytest.raises(InputError, match=r"(?s)compressed.*Decompress"):
        imported("tar", tmp_path / "in.tar")


def write_parquet(path, ids=IDS, column="embedding"):
    vectors = pa.array([made(name)["features"].tolist() for name in ids], NESTED)
    pq.write_table(pa.table({"image_id": list(ids), column: vectors}), path, row_group_size=2)
    return path


NESTED = pa.list_(pa.list_(pa.float32()))


def test_any_parquet_with_a_column_of_vectors_comes_in(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    store, outcome = imported("parquet", write_parquet(tmp_path / "a.parquet"), workspace=workspace)
    same_as_made(store, fields=("features",))
    np.testing.assert_array_equal(store["9"].boxes[0], [0, 0, 320, 240])
    assert outcome.regions is None
    assert not workspace.regions("found").exists()
    assert "no boxes" in str(outcome)


def test_a_vector_an_image_is_one_region(imported, tmp_path):
    vectors = np.arange(10, dtype=np.float32).reshape(5, 2)
    for kind in (pa.list_(pa.float32()), pa.list_(pa.float32(), 2), pa.large_list(pa.float64())):
        table = pa.table({"id": list(IDS), "clip": pa.array(vectors.tolist(), kind)})
        pq.write_table(table, tmp_path / "in.parquet")
        name = f"clip-{kind}".replace("<", "-").split("-")[1] + str(kind.value_type)
        name += "2" if pa.types.is_fixed_size_list(kind) else ""
        store, _ = imported("parquet", tmp_path / "in.parquet", backbone=name)
        np.testing.assert_array_equal(store["285"].features, vectors[1:2])


def test_parquet_that_leaves_a_choice_is_told_the_option(imported, tmp_path):
    vectors = pa.array([made(name)["features"].tolist() for name in IDS], NESTED)
    table = pa.table({"who": list(IDS), "one": vectors, "two": vectors})
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"who, one, two\n.*--id-column"):
        imported("parquet", tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"one, two\n.*--column"):
        imported("parquet", tmp_path / "in.parquet", id_column="who")
    store, _ = imported("parquet", tmp_path / "in.parquet", id_column="who", column="two")
    same_as_made(store, fields=("features",))


def test_parquet_rows_that_are_null_or_ragged_are_rows_with_a_reason(imported, tmp_path):
    vectors = pa.array([None, [[1.0, 2]], [[1.0], [1, 2]], [[1.0, None]], [[3.0, 4]]], NESTED)
    pq.write_table(pa.table({"id": list(IDS), "v": vectors}), tmp_path / "in.parquet")
    store, _ = imported("parquet", tmp_path / "in.parquet")
    assert [store[name].status for name in IDS] == ["damaged", "ok", "damaged", "damaged", "ok"]
    assert store["785"].error == "its vectors have 2 lengths"


def test_the_features_of_another_workspace_come_in(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    first, outcome = imported("tsv", write_tsv(tmp_path / "in.tsv", fields=10), workspace=workspace)
    parts = outcome.features.folder
    again = run_import(
        workspace, "parquet", [parts], detector="again", backbone="b", progress=False
    )
    for name in IDS:
        same_rows(first[name], FeatureStore(again.features.folder)[name])


def test_video_features_are_rows_without_boxes(imported, tmp_path):
    (tmp_path / "clips").mkdir()
    for number, name in enumerate(IDS):
        np.save(tmp_path / "clips" / f"{name}.npy", np.full((number, 3), number, np.float16))
    store, _ = imported("numpy", tmp_path / "clips")
    assert [len(store[name].features) for name in IDS] == [0, 1, 2, 3, 4]
    assert store.dtype == np.float16
    assert store.metadata["boxes"] == ""


def test_grids_come_in_and_go_out_as_grids(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    path = WRITERS["hdf5"](tmp_path / "in.hdf5")
    store, _ = imported("hdf5", path, grid=True, workspace=workspace)
    assert store.grid == (2, 2)
    np.testing.assert_array_equal(store["9"].boxes[1], [160, 0, 320, 120])
    for form in ("hdf5", "numpy", "lmdb"):
        out = tmp_path / f"out-{form}"
        run_export(workspace, form, out, detector="found", backbone="theirs", progress=False)
        again, _ = imported(form, out, workspace=workspace, backbone=form)
        assert again.grid == (2, 2)
        same_rows(again["abc"], store["abc"])
    np.testing.assert_array_equal(
        np.load(tmp_path / "out-numpy" / "cocobu_att" / "9.npz")["feat"],
        store["9"].features.reshape(2, 2, WIDTH),
    )


def test_float64_is_stored_as_float32_and_said(imported, tmp_path):
    (tmp_path / "in").mkdir()
    for name in IDS:
        np.save(tmp_path / "in" / f"{name}.npy", np.full((1, 2), 1 / 3))
    store, outcome = imported("numpy", tmp_path / "in")
    assert store["9"].features[0, 0] == np.float32(1 / 3)
    assert "features were float64 and are stored as float32" in outcome.notes


def test_float16_is_stored_when_told_and_overflow_is_a_row(imported, tmp_path):
    path = write_tsv(tmp_path / "in.tsv")
    entry = made("9") | {"features": np.full((len(made("9")["boxes"]), WIDTH), 1e6, np.float32)}
    lines = [line for line in path.read_text().splitlines() if not line.startswith("9\t")]
    path.write_text("\n".join([*lines, tsv_line("9", entry)]))
    store, outcome = imported("tsv", path, dtype="float16")
    assert store.dtype == np.float16
    assert store["9"].status == "not_finite"
    assert "features were float32 and are stored as float16" in outcome.notes


def broken_lines(entry):
    """Return lines of image 9, each damaged in its way, and what is said of it."""
    line = tsv_line("9", entry).split("\t")
    return {
        "3 fields in place of 6 or 10": line[:3],
        "boxes are 12 numbers of float32 in place of": [*line[:4], text(12), line[5]],
        "are no base64": [*line[:5], line[5][:-1] + "!"],
        "which 4 does not divide": [*line[:5], "AAAA"],
        "no number": [line[0], "wide", *line[2:]],
        "wide, those of others 6": [line[0], "9", "9", "1", text(4), text(12)],
        "are 7 numbers, for 2 boxes": [line[0], "9", "9", "2", text(8), text(7)],
    }


def text(count):
    from base64 import b64encode

    return b64encode(np.zeros(count, np.float32).tobytes()).decode()


@pytest.mark.parametrize("said", broken_lines(made("9")))
def test_a_damaged_line_is_a_row_with_its_reason(said, imported, tmp_path):
    path = write_tsv(tmp_path / "in.tsv", ids=[name for name in IDS if name != "9"])
    with path.open("a") as file:
        file.write("\t".join(broken_lines(made("9"))[said]))
    store, outcome = imported("tsv", path)
    assert store.statuses == {"ok": 4, "damaged": 1}
    assert said in store["9"].error
    assert (store["9"].width, store["9"].height) == (320, 240)
    assert outcome.failed == 1
    same_as_made(store, ids=["139", "abc"])


@given(content=st.binary(max_size=60), chunk=st.integers(1, 20))
def test_lines_are_found_wherever_a_read_ends(content, chunk):
    content = content.replace(b"a", b"\n").replace(b"b", b"\t")
    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patched:
        patched.setattr(tsv, "CHUNK", chunk)
        file.write(content)
        file.flush()
        found = list(tsv._lines(file.fileno()))
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    assert [content[start : start + length] for _, start, length in found] == lines
    names = [line.split(b"\t")[0].decode(errors="backslashreplace").strip() for line in lines]
    assert [name for name, _, _ in found] == names


def test_a_field_of_megabytes_is_read(imported, tmp_path):
    entry = made("9", width=300_000)
    (tmp_path / "in.tsv").write_text(tsv_line("9", entry) + "\n")
    store, _ = imported("tsv", tmp_path / "in.tsv", ids=["9"])
    np.testing.assert_array_equal(store["9"].features, entry["features"])


class Bomb:
    def __reduce__(self):
        return (Path("exploded").touch, ())


def pickled_npy():
    sink = io.BytesIO()
    np.save(sink, np.array([Bomb()], object), allow_pickle=True)
    return sink.getvalue()


def claiming_npy():
    sink = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        sink, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**9)}
    )
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickled_npy, "never loaded"),
        (lambda: pickle.dumps(Bomb()), "never loaded"),
        (claiming_npy, "bytes long"),
        (lambda: b"", "neither npy nor npz"),
        (lambda: b"PK\x03\x04 cut", "cannot be read"),
        (lambda: b"\x93NUMPY\x01\x00", "header cannot be read"),
    ],
)
def test_a_hostile_or_torn_array_is_a_row_and_never_run(data, said, imported, tmp_path):
    folder = write_folders(tmp_path / "in")
    (folder / "cocobu_att" / "9.npz").write_bytes(data())
    store, _ = imported("numpy", folder)
    assert store.statuses == {"ok": 4, "damaged": 1}
    assert said in store["9"].error
    assert not Path("exploded").exists()


def test_a_flipped_bit_in_an_npz_is_found(imported, tmp_path):
    folder = write_folders(tmp_path / "in")
    path = folder / "cocobu_att" / "9.npz"
    np.savez(path, feat=made("9")["features"])
    data = bytearray(path.read_bytes())
    data[data.index(made("9")["features"].tobytes())] ^= 1
    path.write_bytes(data)
    assert imported("numpy", folder)[0].statuses == {"ok": 4, "damaged": 1}


def test_a_damaged_hdf5_dataset_is_a_row(imported, tmp_path):
    path = WRITERS["hdf5"](tmp_path / "in.hdf5")
    with h5py.File(path, "a") as file:
        del file["9_features"], file["abc_boxes"]
        file["9_features"] = np.zeros((2, 2), np.int64)
        file["abc_boxes"] = np.zeros((2, 2), np.float32)
    store, _ = imported("hdf5", path)
    assert store.statuses == {"ok": 3, "damaged": 2}
    assert "no floats" in store["9"].error
    assert "boxes have shape" in store["abc"].error


@pytest.mark.parametrize("form", ["hdf5", "lmdb", "tar", "parquet"])
def test_a_file_of_something_else_is_refused(form, imported, tmp_path):
    path = tmp_path / f"in.{form}"
    path.write_bytes(b"something else entirely" * 1000)
    with pytest.raises(InputError, match="is no "):
        imported(form, path)


def test_a_source_without_one_usable_record_is_refused(imported, workspace_of, tmp_path):
    (tmp_path / "in.tsv").write_text("".join(f"{name}\t1\t2\n" for name in IDS))
    with pytest.raises(InputError, match="not one record can be used; the last: abc: its line"):
        imported("tsv", tmp_path / "in.tsv")
    assert not (tmp_path / "workspace" / "features").exists()


def coco(name):
    return f"COCO_val2014_{int(name):012d}"


def test_ids_that_do_not_match_are_told_on_both_sides_with_a_rule_that_does(imported, tmp_path):
    ids = ["139", "285", "785"]
    path = write_tsv(tmp_path / "in.tsv", ids, called=coco)
    with pytest.raises(MissingError) as refused:
        imported("tsv", path, ids=ids)
    said = str(refused.value)
    assert "3 of the 3 images have no features there: 0 ids match by the rule 'exact'" in said
    assert "'139', '285', '785'" in said
    assert "'COCO_val2014_000000000139'" in said
    assert "`--ids number` matches 3." in said
    same_as_made(imported("tsv", path, ids=ids, rule="number")[0], ids)


def test_ids_may_be_the_names_of_the_files(imported, workspace_of, tmp_path):
    workspace = workspace_of(["0", "1"], paths="deep/photo-{}.v2.jpg")
    lines = [tsv_line(f"photo-{name}.v2.jpg", made("9")) for name in "01"]
    (tmp_path / "in.tsv").write_text("\n".join(lines))
    store, _ = imported("tsv", tmp_path / "in.tsv", workspace=workspace, rule="stem")
    np.testing.assert_array_equal(store["1"].features, made("9")["features"])


def test_ids_that_come_to_the_same_are_refused(imported, tmp_path):
    lines = [tsv_line(name, made("9")) for name in ("train_7", "val_7")]
    (tmp_path / "in.tsv").write_text("\n".join(lines))
    with pytest.raises(InputError, match="both '7' by the rule 'number': 'train_7' and 'val_7'"):
        imported("tsv", tmp_path / "in.tsv", ids=["7"], rule="number")
    with pytest.raises(InputError, match="2 ids occur more than once: train_7, val_7"):
        imported("tsv", tmp_path / "in.tsv", tmp_path / "in.tsv", ids=["7"], rule="number")


def test_images_without_features_are_refused_with_their_count_or_marked(imported, tmp_path):
    path = write_tsv(tmp_path / "in.tsv", ids=["9", "139"])
    with pytest.raises(MissingError, match=r"3 of the 5 images(?s:.*)--skip-missing"):
        imported("tsv", path)
    store, outcome = imported("tsv", path, skip_missing=True)
    assert store.statuses == {"ok": 2, "missing": 3}
    assert outcome.failed == 3
    same_as_made(store, ["9", "139"])


def test_records_of_other_images_are_counted(imported, tmp_path):
    _, outcome = imported("tsv", write_tsv(tmp_path / "in.tsv"), ids=["9"])
    assert "4 records of the source belong to no image here" in str(outcome)


def test_an_import_again_does_nothing_and_another_source_is_refused(
    imported, workspace_of, tmp_path
):
    workspace = workspace_of()
    path = write_tsv(tmp_path / "in.tsv")
    imported("tsv", path, workspace=workspace)
    _, again = imported("tsv", path.rename(tmp_path / "moved.tsv"), workspace=workspace)
    assert again.features.shards_made == again.regions.shards_made == 0
    path = write_tsv(tmp_path / "other.tsv", fields=10)
    with pytest.raises(MismatchError, match="source"):
        imported("tsv", path, workspace=workspace)
    store, _ = imported("tsv", path, workspace=workspace, force=True)
    same_as_made(store, fields=("classes",))
    assert verify(workspace.regions("found")) == verify(store.folder) == []


def test_training_takes_what_was_imported(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    store, outcome = imported("tsv", write_tsv(tmp_path / "in.tsv"), workspace=workspace)
    boxes = FeatureStore(outcome.regions.folder).fingerprint
    assert require_own_boxes(workspace, store, "found") == boxes
    regions = pad_regions([store["9"], store["785"]])
    assert regions.mask.sum() == len(made("9")["boxes"])
    assert [step.done for step in steps(workspace)] == [True] * 3


def test_features_without_boxes_leave_no_stage_to_do(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    path = write_parquet(tmp_path / "in.parquet")
    store, _ = imported("parquet", path, workspace=workspace)
    assert require_own_boxes(workspace, store, "found") == ""
    commands = [step.command for step in steps(workspace) if not step.done]
    assert commands == []


def test_the_commands_import_and_export(workspace_of, tmp_path, capsys):
    root = str(workspace_of().root)
    line = ["-w", root, "import", "tsv", str(write_tsv(tmp_path / "in.tsv", IDS[:4]))]
    line += ["--detector", "found", "--backbone", "theirs", "--skip-missing"]
    for command, code in ((line, 0), ([*line, "--strict"], 1)):
        with pytest.raises(SystemExit) as ended:
            cli.app(command)
        assert ended.value.code == code
    assert "1 images could not be used: 1 missing" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.app(["-w", root, "export", "hdf5", str(tmp_path / "out.hdf5")])
    assert ended.value.code == 0
    assert "4 images in" in capsys.readouterr().out


def test_photographs_are_not_captioned_by_what_nobody_here_knows(imported, tmp_path):
    store, _ = imported("tsv", write_tsv(tmp_path / "in.tsv"))
    with pytest.raises(InputError, match="imported"):
        FeaturePipeline(store)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": "tvs"}, "Did you mean 'tsv'"),
        ({"column": "x"}, "no use for --column"),
        ({"backbone": "../out"}, "no name for a folder"),
    ],
)
def test_what_does_not_go_together_is_refused(change, said, imported, tmp_path):
    options = {"form": "tsv"} | change
    with pytest.raises(InputError, match=said):
        imported(options.pop("form"), write_tsv(tmp_path / "in.tsv"), **options)


def test_a_missing_library_names_its_command(imported, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingError, match=r"pip install 'regionprep\[exchange\]'"):
        imported("hdf5", tmp_path)


def test_an_export_is_whole_or_not_there(imported, workspace_of, tmp_path, monkeypatch):
    workspace = workspace_of()
    imported("tsv", write_tsv(tmp_path / "in.tsv"), workspace=workspace)
    (tmp_path / ".out.tmp").mkdir()
    with pytest.raises(InputError, match="can only be imported"):
        run_export(workspace, "parquet", tmp_path / "out", progress=False)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(StorageError, match="bytes are free"):
            run_export(workspace, "numpy", tmp_path / "out", progress=False)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    run_export(workspace, "numpy", tmp_path / "out", progress=False)
    with pytest.raises(InputError, match="is there already"):
        run_export(workspace, "numpy", tmp_path / "out", progress=False)


def test_images_that_failed_are_left_out_of_an_export(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    path = write_tsv(tmp_path / "in.tsv", ids=["9"])
    imported("tsv", path, workspace=workspace, skip_missing=True)
    done = run_export(workspace, "tsv", tmp_path / "out.tsv", progress=False)
    assert (done.images, done.left_out) == (1, 4)
    assert (tmp_path / "out.tsv").read_text() == path.read_text()
    assert "left out: 4" in str(done)


def test_boxes_that_were_made_up_are_not_given_on(imported, workspace_of, tmp_path):
    workspace = workspace_of()
    imported("parquet", write_parquet(tmp_path / "in.parquet"), workspace=workspace)
    run_export(workspace, "numpy", tmp_path / "out", progress=False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["cocobu_att", "cocobu_fc"]


def test_an_id_with_a_slash_is_a_path_and_one_that_leads_out_is_refused(
    imported, workspace_of, tmp_path
):
    workspace = workspace_of(["a/b", "../c"])
    lines = [tsv_line(name, made("9")) for name in ("a/b", "../c")]
    (tmp_path / "in.tsv").write_text("\n".join(lines))
    imported("tsv", tmp_path / "in.tsv", workspace=workspace)
    with pytest.raises(InputError, match="no file name"):
        run_export(workspace, "numpy", tmp_path / "out", progress=False)
    store, _ = imported("tsv", tmp_path / "in.tsv", workspace=workspace_of(["a/b"]), force=True)
    for form in ("numpy", "hdf5"):
        names = {"detector": "found", "backbone": "theirs", "progress": False}
        run_export(workspace, form, tmp_path / form, **names)
        again, _ = imported(form, tmp_path / form, workspace=workspace, backbone=form, force=True)
        np.testing.assert_array_equal(again["a/b"].features, store["a/b"].features)


def test_databases_are_let_go_of(tmp_path):
    path = WRITERS["lmdb"](tmp_path / "in.lmdb")
    for _ in range(2):  # the library refuses to open one twice at a time
        database_source([path]).close()


def run_script(name, *arguments):
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_an_import_killed_at_any_moment_ends_as_an_undisturbed_one(
    imported, workspace_of, tmp_path
):
    names = [f"{number:03d}" for number in range(60)]
    entry = made("9")
    lines = "".join(tsv_line(name, entry) + "\n" for name in names)
    (tmp_path / "in.tsv").write_text(lines[:-1])
    workspace = workspace_of(names)
    store, outcome = imported("tsv", tmp_path / "in.tsv", workspace=workspace, shard_size=10)
    undisturbed = [contents(outcome.regions.folder), contents(store.folder)]
    after = Counter(run_script("kill_import.py", workspace.root, tmp_path / "in.tsv", 12, 1))
    assert after.total() == 12
    imported("tsv", tmp_path / "in.tsv", workspace=workspace, shard_size=10)
    assert [contents(outcome.regions.folder), contents(store.folder)] == undisturbed


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path, workspace_of):
    workspace_of(["0"])
    grown = run_script("memory_of_exchange.py", tmp_path)
    assert sorted(grown) == sorted([*FORMATS, *(f"to {form}" for form in WRITABLE)])
    assert max(grown.values()) < 14, f"MB more for 30 MB more of features: {grown}"


def test_few_records_are_held_at_a_time(monkeypatch, imported, tmp_path):
    held, most = weakref.WeakSet(), []
    original = record.Record.__post_init__

    def counted(self):
        original(self)
        held.add(self)
        most.append(len(held))

    monkeypatch.setattr(record.Record, "__post_init__", counted)
    names = [f"{number:03d}" for number in range(120)]
    lines = "".join(tsv_line(name, made("9")) + "\n" for name in names)
    (tmp_path / "in.tsv").write_text(lines)
    imported("tsv", tmp_path / "in.tsv", ids=names)
    assert len(most) == 1 + 2 * 120
    assert max(most) < 16
