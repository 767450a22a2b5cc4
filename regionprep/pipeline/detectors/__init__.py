"""Detectors: where the regions of an image come from."""

from __future__ import annotations

from regionprep.manifests import DetectorManifest
from regionprep.pipeline.detectors.detector import Candidates, Detector, Resources
from regionprep.pipeline.detectors.fixed import Grid, Whole
from regionprep.pipeline.detectors.given import Boxes
from regionprep.pipeline.detectors.scenes import ScenesDetector
from regionprep.pipeline.detectors.torchvision import TorchvisionDetector

DETECTORS: dict[str, type[Detector]] = {
    "boxes": Boxes,
    "grid": Grid,
    "scenes": ScenesDetector,
    "torchvision": TorchvisionDetector,
    "whole": Whole,
}


def load(manifest: DetectorManifest, resources: Resources | None = None) -> Detector:
    """Return the detector of a manifest; its model is loaded at its first batch."""
    return DETECTORS[manifest.kind].from_manifest(manifest, resources or Resources())


__all__ = ["DETECTORS", "Candidates", "Detector", "Resources", "load"]
