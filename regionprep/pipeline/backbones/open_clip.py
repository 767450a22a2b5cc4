"""Image towers of open_clip: the embedding that is compared with texts, or the map before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Self

import open_clip
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn

from regionprep.errors import ManifestError, MissingError, unknown
from regionprep.manifests import BackboneManifest
from regionprep.pipeline.backbones.backbone import BATCH_CROPS, CropBackbone
from regionprep.pipeline.backbones.resources import Resources, no_such, only_options
from regionprep.pipeline.weights import Weights, differences, fetch_hub, misfit

HUB_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


class OpenClipBackbone(CropBackbone):
    """An image tower of open_clip by name, with its transform.

    `pretrained` is the tag of open_clip's weights, which the transform belongs to; `weights` is a
    file instead of them, of the whole model. The embedding is not normalised.
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: str | None = None,
        weights: Weights | None = None,
        batch_size: int = BATCH_CROPS,
        device: str = "auto",
    ) -> None:
        super().__init__(batch_size=batch_size, device=device)
        if model not in open_clip.list_models():
            raise no_such("open_clip", model, open_clip.list_models())
        tags = open_clip.list_pretrained_tags_by_model(model)
        if pretrained not in (None, *tags):
            raise ManifestError(unknown(f"weights of open_clip's {model}", str(pretrained), tags))
        if pretrained is None and weights is None:
            raise ManifestError(
                f"no weights are named for open_clip's {model}. Known: {', '.join(tags) or 'none'}",
                mend=f"Name them, open_clip:{model}/TAG, or give --weights FILE.",
            )
        self.name, self._file = model, weights
        self._tag = open_clip.get_pretrained_cfg(model, pretrained) if pretrained else {}
        self._origin = f"open_clip {model}/{pretrained}"

    @classmethod
    def from_manifest(cls, manifest: BackboneManifest, resources: Resources) -> Self:
        """Return the backbone, or raise what is missing for it."""
        only_options(manifest)
        return cls(
            manifest.model,
            pretrained=manifest.pretrained,
            weights=resources.file,
            batch_size=resources.batch_size or BATCH_CROPS,
            device=resources.device,
        )

    @cached_property
    def weights(self) -> Weights:
        """Return the file of weights, downloaded by name if it was not given."""
        return self._file or self._fetch()

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the features."""
        return {"weights": self.weights.provenance, "preprocessing": vars(self._preprocessing)}

    @cached_property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Return open_clip's transform for these weights."""
        transform: Callable[[Image.Image], Tensor] = image_transform_v2(
            self._preprocessing, is_train=False
        )
        return transform

    def build(self) -> nn.Module:
        """Return the image tower."""
        with _without_advice():
            # Pretrained parts would be downloaded only to be written over.
            whole = open_clip.create_model(
                self.name,
                pretrained=None,
                pretrained_text=False,
                # OpenAI's weights need it; open_clip says so in its tags, and only warns.
                force_quick_gelu=bool(self._tag.get("quick_gelu")),
            )
        try:
            open_clip.load_checkpoint(whole, str(self.weights.path), weights_only=True)
        except Exception as error:  # whatever a file makes of it: read it for what is wrong
            tensors = self.weights.read()
            differ = differences(whole, tensors) or [str(error)]
            raise misfit(f"open_clip's {self.name}", differ, where=self.weights.path) from error
        tower: nn.Module = whole.visual
        return tower

    def pooled(self, batch: Tensor) -> Tensor:
        """Return the embedding."""
        output = self.model(batch)
        features: Tensor = output[0] if isinstance(output, tuple) else output
        return features

    def mapped(self, batch: Tensor) -> Tensor:
        """Return the last layer's features, before pooling and projection."""
        found = self.model.forward_intermediates(
            batch, indices=1, normalize_intermediates=True, intermediates_only=True
        )
        last: Tensor = found["image_intermediates"][-1]
        return last.permute(0, 2, 3, 1)

    @cached_property
    def _preprocessing(self) -> PreprocessCfg:
        size = open_clip.get_model_config(self.name)["vision_cfg"]["image_size"]
        told = {key: self._tag[key] for key in PREPROCESSING if self._tag.get(key) is not None}
        return PreprocessCfg(size=size, **told)

    def _fetch(self) -> Weights:
        if hub := self._tag.get("hf_hub", ""):
            place = PurePosixPath(hub)
            if hub.endswith("/"):
                return fetch_hub(str(place), HUB_FILES, origin=self._origin)
            files = (place.with_suffix(".safetensors").name, place.name)
            return fetch_hub(str(place.parent), files, origin=self._origin)
        try:
            return Weights(Path(open_clip.download_pretrained(self._tag)), self._origin)
        except (OSError, RuntimeError) as error:
            raise MissingError(
                f"the weights of {self._origin} are not on this machine and cannot be fetched: "
                f"{error}",
                mend=f"Fetch {self._tag['url']} where there is a network, and give it with "
                "--weights FILE.",
            ) from error


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep open_clip from warning of random weights: the real ones come right after.

    It logs by the root logger's functions, which set up a handler for the whole process.
    """
    before, handlers = logging.root.manager.disable, logging.root.handlers[:]
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
        logging.root.handlers[:] = handlers
