"""Measure memory by the number of images: `python memory_of_exchange.py FOLDER`.

Prints as JSON how many MB more an import or an export of each format takes, at its most, for 500
images than for 100; the features are 30 MB larger. What is mapped from files does not count: the
system takes it back when it needs the room.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from regionprep.memory import keep_freed_memory
from regionprep.pipeline import writer
from regionprep.pipeline.exchange import FORMATS, run_export, run_import
from regionprep.pipeline.tables import ImageRecord, write_tables
from regionprep.workspace import Workspace

SHAPE = (36, 512)
FEW, MANY = 100, 500


def now():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon"))


def most(work):
    """Return the most MB held during `work` above those before it."""
    before, peak, done = now(), [0.0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], now())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return peak[0] - before


def features(number):
    return np.random.default_rng(number).normal(size=SHAPE).astype(np.float32)


def first_source(folder, names):
    """Write the tar that all else is made of, image by image."""
    with tarfile.open(folder / "source.tar", "w") as archive:
        for number, name in enumerate(names):
            for role, array in (
                ("features", features(number)),
                ("boxes", np.ones((36, 4), np.float32)),
            ):
                sink = io.BytesIO()
                np.save(sink, array)
                member = tarfile.TarInfo(f"{name}.{role}.npy")
                member.size = sink.tell()
                archive.addfile(member, io.BytesIO(sink.getvalue()))
    return folder / "source.tar"


def parquet_source(folder, names):
    kind = pa.list_(pa.list_(pa.float32(), SHAPE[1]))
    schema = pa.schema({"id": pa.string(), "v": kind})
    with pq.ParquetWriter(folder / "source.parquet", schema) as target:
        for start in range(0, len(names), 50):
            some = names[start : start + 50]
            arrays = [list(features(start + place)) for place in range(len(some))]
            table = pa.table({"id": some, "v": pa.array(arrays, kind)}, schema=schema)
            target.write_table(table)
    return folder / "source.parquet"


def measure(root, folder, count):
    names = [f"{number:04d}" for number in range(count)]
    folder.mkdir()
    workspace = Workspace.open(root)
    write_tables(workspace, [ImageRecord(name, name, 9, 9, "train") for name in names], None)
    told = {}

    def bring(form, path):
        shutil.rmtree(root / "regions", ignore_errors=True)
        shutil.rmtree(root / "features", ignore_errors=True)
        names = {"detector": "d", "backbone": "b", "progress": False}
        told[form] = most(lambda: run_import(workspace, form, [path], **names))

    bring("parquet", parquet_source(folder, names))
    bring("tar", first_source(folder, names))
    targets = {form: folder / f"out.{form}" for form in FORMATS if FORMATS[form].sink}
    for form, path in targets.items():
        told[f"to {form}"] = most(
            lambda form=form, path=path: run_export(workspace, form, path, progress=False)
        )
    for form, path in targets.items():
        bring(form, path)
    shutil.rmtree(folder)
    return told


def main(folder):
    keep_freed_memory()
    # A row group of its usual size would hold most of what is measured here.
    writer.GROUP_BYTES = 2**20
    root = folder / "workspace"
    measure(root, folder / "warm", FEW)
    few, many = measure(root, folder / "few", FEW), measure(root, folder / "many", MANY)
    print(json.dumps({form: round(many[form] - few[form], 1) for form in many}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
