"""What tests of training share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made_up import make_workspace

from regionprep.workspace import Workspace


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute in one thread: for models this small, two only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Return a workspace of 32 images to train on and 8 to validate with."""
    return make_workspace(tmp_path / "work")
