"""Backbones: what turns a region into a feature vector."""

from __future__ import annotations

import re
from typing import Any

from regionprep import manifests
from regionprep.errors import ManifestError
from regionprep.manifests import BackboneManifest
from regionprep.pipeline.backbones.backbone import Backbone, CropBackbone, FeatureMap
from regionprep.pipeline.backbones.open_clip import OpenClipBackbone
from regionprep.pipeline.backbones.resources import Resources
from regionprep.pipeline.backbones.roi import RoiBackbone
from regionprep.pipeline.backbones.timm import TimmBackbone

BACKBONES: dict[str, Any] = {
    "open_clip": OpenClipBackbone,
    "roi": RoiBackbone,
    "timm": TimmBackbone,
}


def manifest(name: str) -> BackboneManifest:
    """Return the manifest called `name`, in the YAML file of that name, or made on the spot.

    `timm:MODEL` and `timm:MODEL.TAG`, `open_clip:MODEL` and `open_clip:MODEL/TAG` need no manifest;
    their features' folder is called the same with dashes.
    """
    library, colon, model = name.partition(":")
    if not colon:
        found: BackboneManifest = manifests.load("backbones", name)
        return found
    if library not in ("timm", "open_clip") or not model:
        raise ManifestError(
            f"'{name}' names no backbone", mend="Write timm:MODEL.TAG or open_clip:MODEL/TAG."
        )
    model, _, tag = model.partition("/")
    return BackboneManifest.model_validate(
        {
            "name": re.sub(r"[^A-Za-z0-9_.\-]+", "-", name),
            "summary": f"{model} of {library}",
            "library": library,
            "model": model,
            "pretrained": tag or None,
        }
    )


def load(manifest: BackboneManifest, resources: Resources | None = None) -> Backbone:
    """Return the backbone of a manifest; its model is loaded at its first batch."""
    backbone: Backbone = BACKBONES[manifest.library].from_manifest(
        manifest, resources or Resources()
    )
    return backbone


__all__ = ["BACKBONES", "Backbone", "CropBackbone", "FeatureMap", "Resources", "load", "manifest"]
