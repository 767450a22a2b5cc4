"""Made-up features, written and read in every format's own layout without our code."""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from pathlib import Path

import h5py
import lmdb
import numpy as np
from numpy.lib.npyio import NpzFile

IDS = ("139", "285", "785", "9", "abc")
WIDTH = 6


def made(name, width=WIDTH):
    """Return the arrays of an image as a detector would give them: 0 regions for one."""
    rng = np.random.default_rng(len(name) * 1000 + ord(name[0]))
    regions = 0 if name == "785" else int(rng.integers(1, 5))
    return {
        "features": rng.normal(size=(regions, width)).astype(np.float32),
        "boxes": (rng.random((regions, 4)) * 100).astype(np.float32),
        "scores": rng.random(regions).astype(np.float32),
        "classes": rng.integers(0, 1600, regions),
        "size": (640 + len(name), 480),
    }


def text(array):
    return b64encode(array.tobytes()).decode()


def tsv_line(name, entry, fields=6):
    width, height = map(str, entry["size"])
    end = [str(len(entry["boxes"])), text(entry["boxes"]), text(entry["features"])]
    if fields == 6:
        return "\t".join([name, width, height, *end])
    objects = [text(entry["classes"]), text(entry["scores"])]
    return "\t".join([name, height, width, *objects, *objects, *end])


def write_tsv(path, ids=IDS, fields=6, called=str):
    path.write_text("".join(tsv_line(called(name), made(name), fields) + "\n" for name in ids))
    return path


def write_hdf5(path, ids=IDS):
    with h5py.File(path, "w") as file:
        for name in ids:
            file[f"{name}_features"] = made(name)["features"]
            file[f"{name}_boxes"] = made(name)["boxes"]
            file[f"{name}_grids"] = np.arange(4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
    return path


def write_folders(path, ids=IDS):
    for kind in ("att", "box", "fc"):
        (path / f"cocobu_{kind}").mkdir(parents=True)
    for name in ids:
        np.savez_compressed(path / "cocobu_att" / f"{name}.npz", feat=made(name)["features"])
        np.save(path / "cocobu_box" / f"{name}.npy", made(name)["boxes"])
        np.save(path / "cocobu_fc" / f"{name}.npy", made(name)["features"].sum(0))
    return path


def write_lmdb(path, ids=IDS):
    folders = write_folders(path.with_name("to-lmdb"), ids)
    path.mkdir()
    for kind, ending in (("att", "npz"), ("box", "npy")):
        target = str(path / f"cocobu_{kind}.lmdb")
        with lmdb.open(target, map_size=2**24) as database, database.begin(write=True) as writing:
            for name in ids:
                file = folders / f"cocobu_{kind}" / f"{name}.{ending}"
                writing.put(name.encode(), file.read_bytes())
    return path


def read_tsv(path):
    found = {}
    for line in path.read_text().splitlines():
        name, width, height, count, *arrays = line.split("\t")
        boxes, features = (np.frombuffer(b64decode(array), np.float32) for array in arrays)
        size, count = (int(width), int(height)), int(count)
        features = features.reshape(count, -1 if count else WIDTH)
        found[name] = {"boxes": boxes.reshape(count, 4), "features": features, "size": size}
    return found


def read_hdf5(path):
    with h5py.File(path) as file:
        names = [key.removesuffix("_features") for key in file if key.endswith("_features")]
        return {
            name: {"features": file[f"{name}_features"][()], "boxes": file[f"{name}_boxes"][()]}
            for name in names
        }


def read_folders(path):
    return {
        file.stem: {
            "features": np.load(file)["feat"],
            "boxes": np.load(path / "cocobu_box" / f"{file.stem}.npy"),
        }
        for file in (path / "cocobu_att").iterdir()
    }


def read_lmdb(path):
    found = {}
    for kind, field in (("att", "features"), ("box", "boxes")):
        target = str(path / f"cocobu_{kind}.lmdb")
        subdir = Path(target).is_dir()
        database = lmdb.open(target, subdir=subdir, readonly=True, lock=False)
        with database, database.begin() as reading:
            for key, value in reading.cursor():
                found.setdefault(key.decode(), {})[field] = _loaded(value)
    return found


def _loaded(data):
    array = np.load(io.BytesIO(data))
    return array["feat"] if isinstance(array, NpzFile) else array


WRITERS = {"tsv": write_tsv, "hdf5": write_hdf5, "numpy": write_folders, "lmdb": write_lmdb}
READERS = {"tsv": read_tsv, "hdf5": read_hdf5, "numpy": read_folders, "lmdb": read_lmdb}
