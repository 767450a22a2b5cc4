"""Workspaces over a few images made on the spot, and weights drawn at random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SIZES = ((64, 48), (48, 64), (64, 48), (40, 40), (90, 30))
"""Width and height of the images of `photographs`, in the order of their names."""


def photograph(width: int, height: int, seed: int) -> np.ndarray:
    """Return smooth noise: like a photograph, it survives being resized."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Return a folder of five images and one file that is none."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    for number, (width, height) in enumerate(SIZES):
        Image.fromarray(photograph(width, height, number)).save(folder / f"{number}.png")
    (folder / "9-broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def workspace(tmp_path: Path, photographs: Path):
    """Return a workspace over `photographs`."""
    from regionprep.pipeline.datasets import initialise
    from regionprep.pipeline.splits import make_splits

    made = initialise(tmp_path / "workspace", dataset=None, images=photographs, captions=[])
    make_splits(made)
    return made


@pytest.fixture(scope="session")
def timm_weights(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that gives a file of random weights for a small timm model."""
    import timm
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("timm")

    def weights(model: str, seed: int = 0) -> Path:
        path = folder / f"{model}-{seed}.safetensors"
        if not path.exists():
            torch.manual_seed(seed)
            save_file(timm.create_model(model).state_dict(), path)
        return path

    return weights
