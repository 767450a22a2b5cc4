"""Shapes are checked in every test, and real photographs are at hand where they are."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

# Before the first import of a model: every shape in a signature is enforced from here on.
jaxtyping.install_import_hook("regionprep.models", "beartype.beartype")

# A busy machine is no fault of the code: the suite has a timeout, an example has none.
hypothesis.settings.register_profile("regionprep", deadline=None)
hypothesis.settings.load_profile("regionprep")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Keep torch to one thread: on small tensors and a busy machine two take far longer."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real photographs, or skip: it is no part of the project."""
    folder = Path(os.environ.get("REGIONPREP_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real photographs at {folder}; set REGIONPREP_DATA to their folder")
    return folder
