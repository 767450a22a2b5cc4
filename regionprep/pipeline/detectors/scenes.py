"""The embedded detector of the embedded dataset."""

from __future__ import annotations

from typing import Any, Self

from torchvision.models.detection import FasterRCNN

from regionprep.manifests import DetectorManifest
from regionprep.pipeline.detectors.detector import Resources, options
from regionprep.pipeline.detectors.faster_rcnn import FasterRCNNDetector
from regionprep.pipeline.weights import Weights, fit
from regionprep.scenes import CLASSES
from regionprep.scenes.detector import WEIGHTS, untrained


class ScenesDetector(FasterRCNNDetector):
    """Finds the objects of `regionprep.scenes`, with the shipped weights or those in a file."""

    classes = CLASSES

    def __init__(
        self, *, weights: Weights | None = None, batch_size: int = 32, device: str = "auto"
    ) -> None:
        super().__init__(batch_size=batch_size, device=device)
        self.weights = weights or Weights(WEIGHTS, "regionprep")

    @classmethod
    def from_manifest(cls, manifest: DetectorManifest, resources: Resources) -> Self:
        """Return the detector, or raise what is missing for it."""
        resources.refuse(manifest, "boxes")
        return cls(
            weights=Weights.of_file(resources.weights) if resources.weights else None,
            device=resources.device,
            **options(manifest, batch_size=32),
        )

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the boxes."""
        return {"weights": self.weights.provenance}

    def build(self) -> FasterRCNN:
        """Return the network with its weights."""
        network = untrained()
        fit(network, self.weights.read(), where=self.weights.path)
        return network
