"""Kill imports at random moments: `python kill_import.py WORKSPACE SOURCE KILLS SEED`.

Every import is a fork. Each finished one is thrown away; the last is left as its kill left it.
Prints as JSON how many imports were killed after how many parts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from regionprep.pipeline.exchange import run_import
from regionprep.pipeline.verify import verify
from regionprep.workspace import Workspace

UNFINISHED = {"missing", "unfinished", "leftover"}


def child(root, source):
    workspace = Workspace.open(root)
    options = {"shard_size": 10, "progress": False}
    run_import(workspace, "tsv", [source], detector="found", backbone="theirs", **options)


def start(root, source):
    pid = os.fork()
    if pid == 0:
        child(root, source)
        os._exit(0)
    return pid


def clear(folders):
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main(root, source, kills, seed):
    rng, after = random.Random(seed), Counter()
    folders = [root / "regions" / "found", root / "features" / "found" / "theirs"]
    clear(folders)
    child(root, source)
    clear(folders)
    started = time.monotonic()
    os.waitpid(start(root, source), 0)
    longest = time.monotonic() - started
    while after.total() < kills:
        if (folders[1] / "manifest.json").exists():
            clear(folders)
        pid = start(root, source)
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        planned = [folder for folder in folders if (folder / "plan.json").exists()]
        torn = [fault for folder in planned for fault in verify(folder)]
        torn = [fault for fault in torn if fault.kind not in UNFINISHED]
        if torn:
            sys.exit("\n".join(map(str, torn)))
        parts = sum(len(list(folder.glob("part-*.parquet"))) for folder in folders)
        after[parts] += killed
    print(json.dumps(after))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
