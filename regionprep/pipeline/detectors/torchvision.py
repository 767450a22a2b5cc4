"""torchvision's Faster R-CNNs, with its weights for COCO or the user's own."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

from torchvision import models
from torchvision.models.detection import FasterRCNN

from regionprep.errors import ManifestError, unknown
from regionprep.manifests import DetectorManifest
from regionprep.pipeline.detectors.detector import Resources, options
from regionprep.pipeline.detectors.faster_rcnn import FasterRCNNDetector
from regionprep.pipeline.weights import Weights, fetch_url, fit


class TorchvisionDetector(FasterRCNNDetector):
    """A Faster R-CNN of torchvision by name.

    `pretrained` names torchvision's weights, which also name the classes; `weights` is a file
    instead of them. `min_size` and `max_size` bound the input's sides in pixels, 0 as torchvision
    has it; input size is what costs time.
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: str,
        weights: Weights | None = None,
        min_size: int = 0,
        max_size: int = 0,
        batch_size: int = 1,
        device: str = "auto",
    ) -> None:
        super().__init__(batch_size=batch_size, device=device)
        known = [name for name in models.list_models(models.detection) if "fasterrcnn" in name]
        if model not in known:
            raise ManifestError(unknown("torchvision model", model, known))
        offered = models.get_model_weights(model).__members__
        if pretrained not in offered:
            raise ManifestError(unknown(f"weights of {model}", pretrained, offered))
        self.model, self.pretrained = model, offered[pretrained].value
        self.sizes = {"min_size": min_size, "max_size": max_size}
        self.sizes = {name: value for name, value in self.sizes.items() if value}
        self.classes = tuple(self.pretrained.meta["categories"][1:])  # 0 is the background
        self._file = weights

    @classmethod
    def from_manifest(cls, manifest: DetectorManifest, resources: Resources) -> Self:
        """Return the detector, or raise what is missing for it."""
        resources.refuse(manifest, "boxes")
        return cls(
            manifest.model,
            pretrained=manifest.weights or "COCO_V1",
            weights=Weights.of_file(resources.weights) if resources.weights else None,
            device=resources.device,
            **options(manifest, min_size=0, max_size=0, batch_size=1),
        )

    @cached_property
    def weights(self) -> Weights:
        """Return the file of weights, downloaded by name if it was not given."""
        url = self.pretrained.url
        prefix = url.rpartition("-")[2].partition(".")[0]  # torchvision's file names end in it
        origin = f"torchvision {self.model}"
        return self._file or fetch_url(url, origin=origin, hash_prefix=prefix)

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the boxes."""
        return {"weights": self.weights.provenance, "preprocessing": self.sizes}

    def build(self) -> FasterRCNN:
        """Return the network with its weights."""
        network = models.get_model(
            self.model,
            weights=None,
            weights_backbone=None,
            num_classes=len(self.classes) + 1,
            **self.sizes,
        )
        fit(network, self.weights.read(), where=self.weights.path)
        return network
