"""`prep` as a person meets it: exit codes, messages without tracebacks, nothing half-written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regionprep import cli


def prep(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "regionprep.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["splits"], "Make a workspace with `prep init"),
        (["init", "work", "--dataset", "scnes"], "Did you mean 'scenes'"),
        (["init", "work", "--dataset", "coco"], "http://images.cocodataset.org"),
        (["init", "work", "--images", "nowhere"], "nowhere"),
        (["init", "work"], "--dataset"),
        (["detect", "--min-boxes", "-1"], "--min-boxes"),
        (["dtect"], "detect"),
    ],
)
def test_bad_input_is_told_without_a_traceback(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    result = prep(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_of_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    result = prep("init", "work", "--images", "photos", cwd=tmp_path)
    if result.returncode == 0:
        result = prep("-w", "work", "splits", cwd=tmp_path)
    assert result.returncode == 2
    assert "photos" in result.stderr
    assert "Traceback" not in result.stderr


def test_strict_exits_with_1_where_an_image_failed(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "photos" / "good.png")
    (tmp_path / "photos" / "bad.jpg").write_text("no image")
    assert prep("init", "work", "--images", "photos", cwd=tmp_path).returncode == 0
    assert prep("-w", "work", "splits", cwd=tmp_path).returncode == 0
    lenient = prep("-w", "work", "detect", "--detector", "whole", cwd=tmp_path)
    assert lenient.returncode == 0, lenient.stderr
    assert "1 not_an_image" in lenient.stdout
    strict = prep("-w", "work", "detect", "--detector", "whole", "--strict", cwd=tmp_path)
    assert strict.returncode == 1


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stopped)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 128 + signal.SIGINT
