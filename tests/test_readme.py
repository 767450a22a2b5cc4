"""The README's commands are commands that `prep` and `make` have, and what it shows runs."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets.config
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from regionprep import cli, manifests
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import Columns, ImageRow, Plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"(?m)(?:^|`|&& )prep ([a-z]+[^`#&\n]*)", README)))


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) > 10
    assert "vocab" in COMMANDS, "a command after && is one too"


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_exists_with_its_options(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = line.split()
    with pytest.raises(SystemExit) as ended:
        cli.app([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for option in (word for word in rest if word.startswith("--")):
        assert option in told, f"prep {command} has no {option}"


def test_the_two_commands_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?m)^make (\w+)", README):
        assert re.search(rf"(?m)^{target}:", makefile), target


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_a_link_of_the_readme_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_readme_names_every_model_that_ships() -> None:
    table = README[README.index("## Models") : README.index("The attention mechanisms are")]
    rows = [row for row in table.splitlines() if row.startswith("| ")]
    named = re.findall(r"`([a-z0-9_]+)`", " ".join(row.split("|")[2] for row in rows))
    assert sorted(set(named)) == manifests.names("models")


def test_the_readme_s_attention_is_a_drop_in() -> None:
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.S)
    scope: dict[str, torch.Tensor] = {}
    exec(code, scope)
    assert scope["refined"].shape == scope["regions"].shape


class Made:
    """A stage that gives every image two regions."""

    batch_size = 8
    schema = Columns(1536, "float16")

    def read(self, image_id: str) -> str:
        return image_id

    def __call__(self, items: Sequence[str]) -> list[ImageRow]:
        boxes = np.array([[0, 0, 20, 20], [10, 10, 40, 30]], np.float32)
        scores, classes = np.ones(2, np.float32), np.zeros(2, np.int32)
        features = np.ones((2, 1536), np.float16)
        return [ImageRow(name, 40, 30, boxes, scores, classes, features) for name in items]


@pytest.fixture
def features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make the README's folder of features here, and return the ids of its images."""
    folder = tmp_path / "coco/features/boxes/convnext_large"
    folder.mkdir(parents=True)
    ids = ["391895", "522418", "9"]
    run_plan(Plan.make(ids, stage="features", settings={}), folder, Made, progress=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return ids


def values(code: str) -> tuple[list[Any], dict[str, Any]]:
    """Run `code`; return what its bare expressions come to, and its names."""
    scope: dict[str, Any] = {}
    found = []
    for line in ast.parse(code).body:
        if isinstance(line, ast.Expr):
            found.append(eval(ast.unparse(line), scope))
        else:
            exec(ast.unparse(line), scope)
    return found, scope


def test_the_readme_s_store_reads_features(features: list[str]) -> None:
    (code,) = re.findall(r"```python\n(from regionprep import .*?)```", README, re.S)
    (regions, boxes), scope = values(code)
    assert (regions.shape, regions.dtype) == ((2, 1536), np.float16)
    assert (boxes.shape, boxes.dtype) == ((2, 4), np.float32)
    assert scope["batch"].features.shape == (2, 2, 1536)
    assert scope["batch"].mask.all()


def test_other_readers_read_what_the_readme_shows(features: list[str]) -> None:
    (code,) = re.findall(r"```python\n(import duckdb.*?)```", README, re.S)
    (by_duckdb, by_polars, by_datasets), _ = values(code)
    assert sorted(by_duckdb.fetchall()) == [(name, 2) for name in features]
    assert by_polars["image_id"].to_list() == features
    assert by_polars["boxes"][0].to_list() == [[0, 0, 20, 20], [10, 10, 40, 30]]
    assert by_datasets["train"]["image_id"][:] == features


PHOTOGRAPHS = {"train": 4, "restval": 4, "val": 2, "test": 2}
"""How many images of each split are taken: the more, the longer it takes."""


@pytest.fixture
def few_photographs(shared_data: Path, tmp_path: Path) -> Path:
    """Return a folder like the sample's, of a few of its images that have boxes."""
    sample, folder = shared_data / "coco_sample", tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    karpathy, instances = (
        json.loads((sample / f"{name}.json").read_text()) for name in ("karpathy", "instances")
    )
    boxed = {box["image_id"] for box in instances["annotations"]}
    known = [image for image in karpathy["images"] if image["cocoid"] in boxed]
    karpathy["images"] = [
        image
        for split, count in PHOTOGRAPHS.items()
        for image in [image for image in known if image["split"] == split][:count]
    ]
    taken = {image["cocoid"] for image in karpathy["images"]}
    instances["images"] = [image for image in instances["images"] if image["id"] in taken]
    instances["annotations"] = [box for box in instances["annotations"] if box["image_id"] in taken]
    for image in karpathy["images"]:
        name = image["filename"]
        (folder / "images" / name).write_bytes((sample / "images" / name).read_bytes())
    (folder / "karpathy.json").write_text(json.dumps(karpathy))
    (folder / "instances.json").write_text(json.dumps(instances))
    return folder


def run_block(block: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a block of commands as a shell would, here and in this process; return their output."""
    told = ""
    for line in block.splitlines():
        for command in line.split("&&"):
            program, *arguments = shlex.split(command, comments=True)
            if program == "cd":
                monkeypatch.chdir(*arguments)
                continue
            assert program == "prep"
            done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            told += done.stdout
    return told


def form(line: str) -> str:
    """Return `line` with # for every number."""
    return re.sub(r"\d[\d,.]*(?<=\d)", "#", line.strip())


@pytest.mark.slow
def test_the_commands_on_real_photographs_print_what_the_readme_shows(
    few_photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = README[README.index("## On real photographs") : README.index("## Speed")]
    commands, shown = re.findall(r"```(?:console)?\n(.*?)```", section, re.S)
    monkeypatch.chdir(tmp_path)
    told = run_block(commands.replace("$DATA", str(few_photographs)), monkeypatch)
    told = told.replace(f"{tmp_path}/", "")
    assert "12 images (train 8, val 2, test 2), 60 captions" in told
    assert "4 images of restval, now in train" in told
    forms = [form(line) for line in told.splitlines()]
    for line in shown.splitlines():
        assert any(there.startswith(form(line)) for there in forms), f"{line!r} not in\n{told}"
