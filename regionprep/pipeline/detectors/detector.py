"""What every detector is to the pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from regionprep.errors import InputError, ManifestError, unknown
from regionprep.manifests import DetectorManifest, Scalar
from regionprep.pipeline.tables import ImageRecord

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Candidates:
    """An image's boxes before selection.

    `boxes` (n, 4) float32 x1 y1 x2 y2, inside the image, with area; `scores` (n, c) float32, one a
    class.
    """

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]


@dataclass(frozen=True)
class Resources:
    """What a detector may need besides its manifest; each takes what it knows."""

    weights: Path | None = None
    boxes: Path | None = None
    images: Sequence[ImageRecord] = field(default=(), repr=False)
    device: str = "auto"

    def refuse(self, manifest: DetectorManifest, *names: str) -> None:
        """Raise InputError if one of `names` was given: this detector has no use for it."""
        for name in names:
            if getattr(self, name) is not None:
                raise InputError(f"detector '{manifest.name}' takes no --{name}")


class Detector(Protocol):
    """Finds boxes, and pools features of boxes where it is a network.

    Made without loading a model; the first batch loads it. `classes[i]` names class id i. Of a
    detector whose boxes are `given`, the boxes are taken as they are, without suppression.
    `batch_size` images go together unless told otherwise. `provenance` is what decides its boxes
    (weights, preprocessing, options), as JSON can hold it.
    """

    classes: tuple[str, ...]
    given: bool
    batch_size: int

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the boxes."""

    @classmethod
    def from_manifest(cls, manifest: DetectorManifest, resources: Resources) -> Self:
        """Return the detector, or raise what is missing for it."""

    def load(self) -> None:
        """Load the model now, or raise what is wrong with it."""

    def detect(self, images: Sequence[Pixels], image_ids: Sequence[str]) -> list[Candidates]:
        """Return each image's candidates; `images` are uint8 (height, width, 3) RGB."""

    @property
    def feature_width(self) -> int:
        """Return the width of a pooled feature; InputError where the detector has none."""

    def features(
        self, images: Sequence[Pixels], boxes: Sequence[NDArray[np.float32]]
    ) -> list[NDArray[np.float32]]:
        """Return the pooled features (r, D) of each image's boxes (r, 4)."""


class Networkless:
    """The part of a detector that has no network: no pooled features."""

    def load(self) -> None:
        """Do nothing: there is no model."""

    @property
    def feature_width(self) -> int:
        """Raise InputError: there is nothing to pool."""
        raise self._featureless()

    def features(
        self, images: Sequence[Pixels], boxes: Sequence[NDArray[np.float32]]
    ) -> list[NDArray[np.float32]]:
        """Raise InputError: there is nothing to pool."""
        raise self._featureless()

    def _featureless(self) -> InputError:
        return InputError(
            f"detector '{type(self).__name__.lower()}' has no network, so no features of its own",
            mend="Take a backbone other than 'roi', or a detector that is a network.",
        )


def options(manifest: DetectorManifest, **defaults: Scalar) -> dict[str, Any]:
    """Return the manifest's options over `defaults`.

    Raises ManifestError for an option that is not among them, or is of another type.
    """
    for name, value in manifest.options.items():
        if name not in defaults:
            raise ManifestError(unknown("option", name, defaults), where=manifest.name)
        if type(value) is not type(defaults[name]):
            kind = type(defaults[name]).__name__
            raise ManifestError(f"options.{name}: {value!r} is no {kind}", where=manifest.name)
    return defaults | manifest.options


def by_shape(images: Sequence[Pixels], size: int) -> Iterable[list[int]]:
    """Return the positions of `images` in groups of one shape, at most `size` a group.

    Images of one shape need no padding, so that no image's result depends on its batch-mates' size.
    """
    groups: Mapping[tuple[int, ...], list[int]] = defaultdict(list)
    for position, image in enumerate(images):
        groups[image.shape].append(position)
    return [
        positions[start : start + size]
        for positions in groups.values()
        for start in range(0, len(positions), size)
    ]
