"""The detector's own pooled features, as bottom-up attention takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from regionprep.errors import InputError
from regionprep.manifests import BackboneManifest
from regionprep.pipeline.backbones.backbone import Boxes, FeatureMap, Features, Pixels
from regionprep.pipeline.backbones.resources import Resources, only_options
from regionprep.pipeline.detectors.detector import Detector


class RoiBackbone:
    """Pools the features of the detector that found the regions."""

    def __init__(self, detector: Detector) -> None:
        self.detector = detector

    @classmethod
    def from_manifest(cls, manifest: BackboneManifest, resources: Resources) -> Self:
        """Return the backbone over the detector at hand."""
        only_options(manifest)
        if resources.weights is not None:
            raise InputError(
                f"backbone '{manifest.name}' has no weights of its own: they are the detector's",
                mend="Give --weights to `prep detect`.",
            )
        if resources.detector is None:
            raise InputError(
                f"backbone '{manifest.name}' pools a detector's regions and has no feature map",
                mend="Leave out --grid, or take another backbone.",
            )
        return cls(resources.detector)

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the features: the detector, as it decided the boxes."""
        return {"pooling": self.detector.provenance}

    def load(self) -> None:
        """Load the detector now, or raise what is wrong with it."""
        self.detector.load()

    @property
    def width(self) -> int:
        """Return how many values a region has."""
        return self.detector.feature_width

    @property
    def map_width(self) -> int:
        """Raise InputError: there is no feature map."""
        raise InputError("the detector's pooled features make no feature map")

    def regions(self, images: Sequence[Pixels], boxes: Sequence[Boxes]) -> list[Features]:
        """Return the pooled features (r, D) of each image's boxes (r, 4)."""
        return self.detector.features(images, boxes)

    def maps(self, images: Sequence[Pixels]) -> list[FeatureMap]:
        """Raise InputError: there is no feature map."""
        raise InputError("the detector's pooled features make no feature map")
