"""Hurt every command on purpose and hold what it makes after all: `python benchmarks/faults.py`.

    python benchmarks/faults.py [--kills N] [--hurts N] [--times N] [--images N] [--files N]
                                [--seed N] [--write]

A workspace of the embedded scenes. Each command is killed (SIGKILL) at random moments until it has
been killed `--kills` times, and given again each time; no torn file may be under a final name, and
whenever it ends, every byte must be that of a run that nothing disturbed. Then one part at a time
is cut at a random byte, or has a random bit flipped, `--hurts` times each: `verify` must name it,
and the commands that it names must mend it. Then a disk that is too small, two at once, images that
kill the process, and a folder of many tiny files. Every command runs in a fork of this process, so
that a kill costs no import.

Prints a table and exits with 1 if anything did not hold; --write keeps the table in results/.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from regionprep import __version__
from regionprep.errors import BusyError, PrepError, StorageError
from regionprep.pipeline import datasets
from regionprep.pipeline.detect import Photographs, run_detect
from regionprep.pipeline.extract import run_extract
from regionprep.pipeline.shards import PLAN, Plan
from regionprep.pipeline.splits import make_splits
from regionprep.pipeline.verify import verify
from regionprep.pipeline.vocab import make_vocabulary
from regionprep.workspace import Workspace

RESULT = Path(__file__).parent / "results" / "faults.md"
SHARD = 8
UNFINISHED = {"missing", "unfinished", "leftover"}
"""What a killed run may leave to be seen; everything else would be a torn file."""

SCENES = """
summary: Scenes to be hurt.
images: {{kind: scenes, seed: 0}}
captions: {{kind: scenes}}
splits: {{train: {train}, val: 8, test: 8}}
defaults: {{detector: scenes, backbone: roi, min_count: 1}}
"""


@dataclass(frozen=True)
class Command:
    """A command of `prep`, the folder that it fills, and what it needs made before."""

    name: str
    work: Callable[[Workspace], object]
    folder: Callable[[Workspace], Path]

    @property
    def makes_shards(self) -> bool:
        """Tell whether the folder has parts, which `verify` knows."""
        return self.name in ("detect", "extract")


COMMANDS = (
    Command("splits", make_splits, lambda workspace: workspace.root),
    Command("vocab", make_vocabulary, lambda workspace: workspace.root),
    Command(
        "detect",
        lambda workspace: run_detect(workspace, shard_size=SHARD, device="cpu", progress=False),
        lambda workspace: workspace.regions("scenes"),
    ),
    Command(
        "extract",
        lambda workspace: run_extract(workspace, shard_size=SHARD, device="cpu", progress=False),
        lambda workspace: workspace.features("scenes", "roi"),
    ),
)


@dataclass
class Row:
    """A line of the table: what was done to which command how often, and what did not hold."""

    command: str
    fault: str
    times: int = 0
    broken: list[str] = field(default_factory=list)
    remark: str = ""

    def hold(self, condition: object, what: str) -> None:
        """Note what does not hold."""
        if not condition:
            self.broken.append(what)

    def __str__(self) -> str:
        held = "yes" if not self.broken else "NO: " + "; ".join(sorted(set(self.broken))[:3])
        return f"| {self.command} | {self.fault} | {self.times} | {held} | {self.remark} |"


class Drill:
    """A workspace that nothing disturbed, and copies of it to be hurt."""

    def __init__(self, root: Path, images: int, seed: int) -> None:
        self.root, self.rng = root, random.Random(seed)
        (root / "hurt.yaml").write_text(SCENES.format(train=max(images - 16, 1)))
        self.whole = datasets.initialise(root / "whole", dataset=str(root / "hurt.yaml"))
        self.digests: dict[str, dict[str, str]] = {}
        for command in COMMANDS:
            command.work(self.whole)
            self.digests[command.name] = digests(command.folder(self.whole))

    def copy(self, before: Command) -> Workspace:
        """Return a workspace in which all commands before this one are done."""
        place = self.root / "hurt"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.whole.root, place)
        workspace = Workspace.open(place)
        for command in COMMANDS[COMMANDS.index(before) :]:
            if command.makes_shards:
                shutil.rmtree(command.folder(workspace))
        if before.name == "splits":
            workspace.images.unlink()
            workspace.captions.unlink()
        if before.name in ("splits", "vocab"):
            workspace.vocabulary.unlink()
        return workspace

    def same(self, command: Command, workspace: Workspace) -> bool:
        """Tell whether a command made every byte as it does undisturbed, and nothing else."""
        return digests(command.folder(workspace)) == self.digests[command.name]

    def kill(self, command: Command, kills: int) -> Row:
        """Kill a command at random moments, and give it again until it is done."""
        row, after = Row(command.name, "SIGKILL"), Counter[int]()
        workspace = self.copy(command)
        longest = seconds(lambda: command.work(workspace))
        workspace = self.copy(command)
        while row.times < kills:
            code = killed_after(self.rng.uniform(0, longest), partial(command.work, workspace))
            if code == 0:
                row.hold(self.same(command, workspace), "other bytes than undisturbed")
                workspace = self.copy(command)
                continue
            row.hold(code == -signal.SIGKILL, f"the command ended by itself with {code}")
            row.times += 1
            row.broken += torn(command, workspace)
            after[len(list(command.folder(workspace).glob("part-*.parquet")))] += 1
        row.hold(in_a_fork(lambda: command.work(workspace)) == 0, "it did not end")
        row.hold(self.same(command, workspace), "other bytes than undisturbed")
        if command.makes_shards:
            row.remark = f"after 0 to {max(after)} parts"
        return row

    def hurt(
        self, command: Command, fault: str, change: Callable[[bytearray], None], n: int
    ) -> Row:
        """Change a random part, look whether `verify` names it alone, and mend it as it says."""
        row, kinds = Row(command.name, fault), Counter[str]()
        workspace = self.copy(COMMANDS[0])
        shutil.copytree(self.whole.root, workspace.root, dirs_exist_ok=True)
        folder = command.folder(workspace)
        parts = sorted(folder.glob("part-*.parquet"))
        for _ in range(n):
            path = self.rng.choice(parts)
            data = bytearray(path.read_bytes())
            change(data)
            path.write_bytes(data)
            faults = verify(folder)
            row.times += 1
            row.hold([found.path for found in faults] == [path], "verify did not name it")
            for found in faults:
                kinds[found.kind] += 1
                if "Remove it" in found.mend:
                    found.path.unlink()
            command.work(workspace)
            row.hold(self.same(command, workspace), "other bytes than undisturbed")
        row.remark = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        return row

    def cut(self, data: bytearray) -> None:
        """Shorten a file."""
        del data[self.rng.choice([0, 7, len(data) - 8, self.rng.randrange(len(data))]) :]

    def flip(self, data: bytearray) -> None:
        """Flip a bit."""
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)

    def fill_disk(self, command: Command) -> Row:
        """Run a command on a disk with room for a part of what it makes."""
        row, folder = Row(command.name, "disk full (tmpfs)"), self.root / "disk"
        folder.mkdir(exist_ok=True)
        needed = size(command.folder(self.whole))
        kept = size(self.copy(command).root)
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            space = f"size={kept + int(needed * share)}"
            if not mounted(folder, space):
                row.remark = "not done: mounting is not permitted here"
                break
            try:
                shutil.copytree(self.copy(command).root, folder / "work")
                workspace = Workspace.open(folder / "work")
                row.times += 1
                self._fill(row, command, workspace, folder)
            finally:
                subprocess.run(["umount", str(folder)], check=True)
        return row

    def _fill(self, row: Row, command: Command, workspace: Workspace, disk: Path) -> None:
        try:
            command.work(workspace)
            row.hold(False, "it fitted")
        except StorageError as error:
            told = str(error)
            row.hold(str(disk) in told and "free" in told and "needed" in told, f"said {told}")
        row.broken += torn(command, workspace)
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        command.work(workspace)
        row.hold(self.same(command, workspace), "other bytes than undisturbed")

    def two(self, command: Command, times: int) -> Row:
        """Start a command twice at the same moment."""
        row, refused = Row(command.name, "two at once"), 0
        for _ in range(times):
            workspace = self.copy(command)
            children = [fork(partial(command.work, workspace)) for _ in range(2)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            row.times += 1
            # One that begins when the other has ended finds everything done, and ends well too.
            row.hold(sorted(codes) in ([0, BUSY], [0, 0]), f"exit codes {codes}")
            refused += BUSY in codes
            row.hold(self.same(command, workspace), "other bytes than undisturbed")
        row.remark = f"{refused} told who was there"
        return row

    def crash(self, command: Command, times: int) -> Row:
        """Let the decoder kill the process on one image in every shard of some."""
        row, most = Row(command.name, "image kills the process"), 0
        names = Plan.read(command.folder(self.whole)).image_ids  # type: ignore[union-attr]
        original = Photographs.__getitem__
        for _ in range(times):
            deadly = set(self.rng.sample(names, 3))
            workspace = self.copy(command)

            def read(self: Photographs, image_id: str) -> object:
                if image_id in deadly:  # noqa: B023 - used up within the turn
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(self, image_id)

            Photographs.__getitem__ = read  # type: ignore[assignment,method-assign]
            try:
                again = partial(in_a_fork, partial(command.work, workspace))
                runs = next(number for number in range(20) if again() == 0)
            finally:
                Photographs.__getitem__ = original  # type: ignore[method-assign]
            row.times += 1
            most = max(most, runs)
            row.hold(crashed(command.folder(workspace)) == deadly, "other images than those")
            row.hold(not verify(command.folder(workspace)), "verify found faults")
        row.remark = f"3 of {len(names)} images; given again at most {most} times"
        return row

    def many(self, count: int) -> Row:
        """Take a folder of tiny files and one of a tenth: time must grow with them, not faster."""
        row, per_image = Row("splits, detect", f"{count:,} tiny files", 1), []
        for number in (count // 10, count):
            folder = self.root / f"{number}-files"
            folder.mkdir()
            for place in range(number):
                Image.new("RGB", (2, 2)).save(folder / f"{place}.png", compress_level=0)
            workspace = datasets.initialise(self.root / f"{number}-work", images=folder)

            def work(workspace: Workspace = workspace) -> None:
                make_splits(workspace)
                run_detect(workspace, "whole", progress=False)

            per_image.append(seconds(work) / number)
        few, all_ = per_image
        row.hold(all_ < 3 * few, "time grew faster than the images")
        row.remark = f"{1 / all_:,.0f} images/s, of a tenth {1 / few:,.0f}"
        return row


BUSY, FAULT = 75, 70


def crashed(folder: Path) -> set[str]:
    """Return the images that are rows with the status `crashed`."""
    from regionprep import FeatureStore

    store = FeatureStore(folder)
    return {name for name in store if store[name].status == "crashed"}


def fork(work: Callable[[], object]) -> int:
    """Start a child that does `work` and exits with 0, or says what was wrong by its code."""
    child = os.fork()
    if child:
        return child
    code = FAULT
    with suppress(BaseException), redirect_stdout(sys.stderr):
        try:
            work()
            code = 0
        except BusyError:
            code = BUSY
        except PrepError as error:
            print(error, file=sys.stderr)
    os._exit(code)


def in_a_fork(work: Callable[[], object]) -> int:
    """Return the exit code of a child that does `work`; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])


def killed_after(delay: float, work: Callable[[], object]) -> int:
    """Return the exit code of a child that is killed after `delay` seconds, if it still lives."""
    child = fork(work)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def seconds(work: Callable[[], object]) -> float:
    """Return how long a child takes for `work`."""
    started = time.monotonic()
    assert in_a_fork(work) == 0
    return time.monotonic() - started


def torn(command: Command, workspace: Workspace) -> list[str]:
    """Return what lies there under a final name without being whole."""
    folder = command.folder(workspace)
    if command.makes_shards:
        found = verify(folder) if (folder / PLAN).exists() else []
        return [str(fault) for fault in found if fault.kind not in UNFINISHED]
    whole = digests(folder)
    # Tables and vocabulary have one content here, so that each is there as it should be or not yet.
    return [name for name in whole if whole[name] != EXPECTED.get(name, whole[name])]


EXPECTED: dict[str, str] = {}
"""The digests of tables and vocabulary when nothing disturbed them."""


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, without the lock."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != ".lock"
    }


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder, in whole pages."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


def mounted(folder: Path, options: str) -> bool:
    """Tell whether a small disk could be mounted there."""
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return mount is not None and subprocess.run(command, capture_output=True).returncode == 0


def report(options: argparse.Namespace) -> tuple[str, bool]:
    """Hurt everything; return the page of results, and whether all of it held."""
    rows: list[Row] = []

    def tell(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        drill = Drill(Path(name), options.images, options.seed)
        EXPECTED.update(drill.digests["vocab"])
        for command in COMMANDS:
            tell(drill.kill(command, options.kills))
        for command in COMMANDS[2:]:
            tell(drill.hurt(command, "cut at a byte", drill.cut, options.hurts))
            tell(drill.hurt(command, "a flipped bit", drill.flip, options.hurts))
        for command in COMMANDS:
            tell(drill.two(command, options.times))
        for command in COMMANDS[2:]:
            tell(drill.fill_disk(command))
            tell(drill.crash(command, options.times))
        tell(drill.many(options.files))
    lines = [
        "# What was done to the commands, and what held",
        "",
        f"{options.images} scenes in shards of {SHARD}, regionprep {__version__}; made by "
        f"`python benchmarks/faults.py --kills {options.kills} --hurts {options.hurts} "
        f"--times {options.times} --images {options.images} --files {options.files} "
        f"--seed {options.seed} --write`. Held: after the same command again every byte is that of "
        "an undisturbed run, and no torn file ever had a final name.",
        "",
        "| command | fault | times | held | |",
        "| --- | --- | ---: | --- | --- |",
        *map(str, rows),
        "",
    ]
    return "\n".join(lines), not any(row.broken for row in rows)


def main() -> None:
    """Hurt everything, print the table, and exit with 1 if something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="of each command")
    parser.add_argument("--hurts", type=int, default=40, help="cuts, and flipped bits, a command")
    parser.add_argument("--times", type=int, default=5, help="everything else")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--files", type=int, default=10_000, help="tiny files in one folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not follow into a fork
    page, held = report(options)
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(page, encoding="utf-8")
    sys.exit(not held)


if __name__ == "__main__":
    main()
