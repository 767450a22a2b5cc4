"""Compare the reader of shards with other ways to keep features: `python benchmarks/shards.py`.

Every way holds the same images of 36 x 1024 float16 and gives single images in shuffled order, in
one process, from a warm page cache; each image's features are copied into one array, as a batch
would. The ways take turns, and the best of all turns counts: a busy machine only ever slows down.

Writes the table to `benchmarks/results/shards.md`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import h5py
import lmdb
import numpy as np

from regionprep import FeatureStore
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import Columns, ImageRow, Plan

RESULTS = Path(__file__).parent / "results" / "shards.md"
REGIONS, WIDTH = 36, 1024
IMAGE_BYTES = REGIONS * WIDTH * 2
NAMES = {
    "regionprep": "regionprep (Parquet, mapped)",
    "memmap": "raw memmap",
    "lmdb": "LMDB",
    "hdf5": "HDF5",
    "npz": "npz per image",
}
# What is slow is timed on fewer images, for the table's sake.
SAMPLE = {"hdf5": 1000, "npz": 500}

# Gives the features of one image by its id.
Read = Callable[[str], np.ndarray]

MEMORY_PROBE = """
import sys
from regionprep import FeatureStore
store = FeatureStore(sys.argv[1])
total = sum(int(row.features.view("u2").max()) for row in store.rows())
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


class Drawn:
    """A stage whose features cost nothing: views of one array of random numbers."""

    schema = Columns(WIDTH, "float16")
    batch_size = 64

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.values = rng.normal(size=(512, REGIONS, WIDTH)).astype(np.float16)
        self.boxes = rng.random((REGIONS, 4), np.float32)
        self.scores = rng.random(REGIONS, np.float32)
        self.classes = rng.integers(0, 80, REGIONS).astype(np.int32)

    def features(self, image_id: str) -> np.ndarray:
        """Return an image's features."""
        return self.values[int(image_id) % len(self.values)]

    def read(self, image_id: str) -> str:
        """Return the id: there is nothing to read."""
        return image_id

    def __call__(self, items: list[str]) -> list[ImageRow]:
        """Return the images' rows."""
        return [
            ImageRow(name, 640, 480, self.boxes, self.scores, self.classes, self.features(name))
            for name in items
        ]


def image_ids(count: int) -> list[str]:
    """Return as many ids."""
    return [f"{number:012d}" for number in range(count)]


def make_shards(folder: Path, count: int) -> float:
    """Write a folder of shards; return the seconds it took, flushes and checks included."""
    plan = Plan.make(image_ids(count), stage="features", settings={})
    stage = Drawn()
    started = time.perf_counter()
    run_plan(plan, folder, lambda: stage, force=True, progress=False)
    return time.perf_counter() - started


def make_others(folder: Path, count: int) -> None:
    """Write the same images in the other ways."""
    stage, names = Drawn(), image_ids(count)
    shape = (count, REGIONS, WIDTH)
    raw = np.lib.format.open_memmap(folder / "raw.npy", "w+", np.float16, shape)
    (folder / "npz").mkdir()
    space = count * IMAGE_BYTES * 2 + 2**24
    with (
        lmdb.open(str(folder / "lmdb"), map_size=space) as environment,
        environment.begin(write=True) as transaction,
        h5py.File(folder / "features.hdf5", "w") as hdf5,
    ):
        for place, name in enumerate(names):
            features = stage.features(name)
            raw[place] = features
            transaction.put(name.encode(), features.tobytes())
            hdf5[f"{name}_features"] = features
            if place < SAMPLE["npz"]:
                np.savez(folder / "npz" / f"{name}.npz", features=features)
    raw.flush()


@contextmanager
def readers(folder: Path, count: int) -> Iterator[dict[str, Read]]:
    """Open every way to read; the keys are those of NAMES."""
    with ExitStack() as stack:
        environment = lmdb.open(str(folder / "lmdb"), readonly=True, lock=False, readahead=False)
        stack.callback(environment.close)
        transaction = stack.enter_context(environment.begin(buffers=True))
        hdf5 = stack.enter_context(h5py.File(folder / "features.hdf5"))
        raw = np.load(folder / "raw.npy", mmap_mode="r")
        places = {name: place for place, name in enumerate(image_ids(count))}
        store = FeatureStore(folder / "shards")

        def read_lmdb(name: str) -> np.ndarray:
            values = np.frombuffer(transaction.get(name.encode()), np.float16)
            return values.reshape(REGIONS, WIDTH)

        def read_npz(name: str) -> np.ndarray:
            with np.load(folder / "npz" / f"{name}.npz") as file:
                return file["features"]

        yield {
            "regionprep": lambda name: store[name].features,
            "memmap": lambda name: raw[places[name]],
            "lmdb": read_lmdb,
            "hdf5": lambda name: hdf5[f"{name}_features"][()],
            "npz": read_npz,
        }


def images_per_second(read: Read, names: list[str]) -> float:
    """Return how fast the features of `names` are read and copied, one after the other."""
    batch = np.empty((REGIONS, WIDTH), np.float16)
    started = time.perf_counter()
    for name in names:
        batch[:] = read(name)
    return len(names) / (time.perf_counter() - started)


def measure_reading(folder: Path, count: int, turns: int) -> dict[str, float]:
    """Return the images a second of every way in its best turn."""
    names = image_ids(count)
    best = dict.fromkeys(NAMES, 0.0)
    rng = np.random.default_rng(0)
    with readers(folder, count) as ways:
        check(ways, names)
        for _ in range(turns):
            for way, read in ways.items():
                some = names[: SAMPLE.get(way, count)]
                order = [some[place] for place in rng.permutation(len(some))]
                best[way] = max(best[way], images_per_second(read, order))
    return best


def check(ways: dict[str, Read], names: list[str]) -> None:
    """Hold all ways against each other, and warm the page cache."""
    stage = Drawn()
    for way, read in ways.items():
        for name in names[: SAMPLE.get(way, len(names))]:
            np.testing.assert_array_equal(read(name), stage.features(name))


def memory(folder: Path) -> int:
    """Return how many bytes of its own a process holds that has read a whole folder."""
    command = [sys.executable, "-c", MEMORY_PROBE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def machine() -> str:
    """Return what the numbers were measured on."""
    info = Path("/proc/cpuinfo")
    models = [
        line.split(":", 1)[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def report(count: int, turns: int) -> str:
    """Measure everything and return the page of results."""
    with tempfile.TemporaryDirectory(prefix="shards-", dir=os.environ.get("TMPDIR")) as name:
        folder = Path(name)
        written = min(make_shards(folder / "shards", count) for _ in range(turns))
        make_others(folder, count)
        speeds = measure_reading(folder, count, turns)
        many = 4 * count
        make_shards(folder / "many", many)
        held = {count: memory(folder / "shards"), many: memory(folder / "many")}
    return text(count, turns, speeds, written, held)


def text(
    count: int, turns: int, speeds: dict[str, float], written: float, held: dict[int, int]
) -> str:
    """Return the page of results in Markdown."""
    ours = speeds["regionprep"]
    rate = count * IMAGE_BYTES / written / 1e6
    lines = [
        f"# Reading and writing {count:,} images of {REGIONS} x {WIDTH} float16",
        "",
        f"{machine()}. Shuffled single images, warm, one process; the best of {turns} turns. "
        f"Made by `python benchmarks/shards.py --images {count} --turns {turns}`.",
        "",
        "| way | images/s | ours is |",
        "| --- | ---: | ---: |",
        *(
            f"| {NAMES[way]} | {speed:,.0f} | {ours / speed:.2f}x |"
            for way, speed in sorted(speeds.items(), key=lambda item: -item[1])
        ),
        "",
        f"Writing, with flush, check and checksum: {rate:,.0f} MB/s.",
        "",
        "Memory of a process that has read all of a folder, mapped files aside: "
        + ", ".join(f"{size / 1e6:.1f} MB for {images:,} images" for images, size in held.items())
        + f" ({_growth(held):,.0f} bytes an image, which holds {IMAGE_BYTES:,}).",
        "",
    ]
    return "\n".join(lines)


def _growth(held: dict[int, int]) -> float:
    (few, low), (many, high) = sorted(held.items())
    return (high - low) / max(many - few, 1)


def main() -> None:
    """Print the results and keep them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    table = report(arguments.images, arguments.turns)
    print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(table)


if __name__ == "__main__":
    main()
