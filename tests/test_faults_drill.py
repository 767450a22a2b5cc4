"""The drill of `benchmarks/faults.py` at a small size: real commands, killed and hurt for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parent.parent / "benchmarks" / "faults.py"
SMALL = ["--kills", "4", "--hurts", "2", "--times", "1", "--images", "24", "--files", "300"]


@pytest.mark.slow
def test_every_command_killed_and_hurt_ends_as_if_nothing_had_been() -> None:
    done = subprocess.run(
        [sys.executable, DRILL, *SMALL], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    killed = {row[0].strip("| "): int(row[2]) for row in rows if row[1] == "SIGKILL"}
    assert killed == {"splits": 4, "vocab": 4, "detect": 4, "extract": 4}
    assert {row[3] for row in rows} == {"yes"}
