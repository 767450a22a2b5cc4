"""Kill runs of a plan at random moments: `python kill_at_random.py FOLDER KILLS SEED`.

Every run is a fork, so that a kill costs no import. After each, no file under a final name may be
torn. Prints how many runs were killed, and after how many parts.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from dummy_stage import DummyStage, plan

from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import MANIFEST
from regionprep.pipeline.verify import verify

PLAN = plan(60, shard_size=10)
UNFINISHED = {"missing", "unfinished", "leftover"}


def child(folder):
    run_plan(PLAN, folder, lambda: DummyStage(pause=0.002), progress=False)


def start(folder):
    pid = os.fork()
    if pid == 0:
        child(folder)
        os._exit(0)
    return pid


def kill_one(folder, delay):
    """Return whether the run was still going on."""
    pid = start(folder)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def undisturbed_seconds(folder):
    started = time.monotonic()
    os.waitpid(start(folder), 0)
    shutil.rmtree(folder)
    folder.mkdir()
    return time.monotonic() - started


def main(folder, kills, seed):
    rng, after = random.Random(seed), Counter()
    # Once here, so that no fork has to import what the first run imports.
    child(folder)
    longest = undisturbed_seconds(folder)
    while after.total() < kills:
        killed = kill_one(folder, rng.uniform(0, longest))
        torn = [fault for fault in verify(folder) if fault.kind not in UNFINISHED]
        if torn and (folder / "plan.json").exists():
            sys.exit("\n".join(map(str, torn)))
        if killed:
            after[len(list(folder.glob("part-*.parquet")))] += 1
        if (folder / MANIFEST).exists():
            shutil.rmtree(folder)
            folder.mkdir()
    print(dict(sorted(after.items())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
