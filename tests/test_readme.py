"""The README's commands are commands that `prep` and `make` have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from regionprep import cli, manifests

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"(?m)(?:^|`)prep ([a-z]+[^`#\n]*)", README)))


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) > 10


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
