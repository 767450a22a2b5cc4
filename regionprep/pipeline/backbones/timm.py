"""Image models of timm: pooled features before the classifier, or the map before the pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Self

import timm
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from timm.models import get_pretrained_cfg
from torch import Tensor, nn

from regionprep.errors import ManifestError, MissingError, unknown
from regionprep.manifests import BackboneManifest, Scalar
from regionprep.pipeline.backbones.backbone import BATCH_CROPS, CropBackbone, channels_last
from regionprep.pipeline.backbones.packaged import PACKAGES, Packaged
from regionprep.pipeline.backbones.resources import Resources, no_such, only_options
from regionprep.pipeline.weights import Weights, differences, fetch_hub, fetch_url, misfit

HUB_FILES = ("model.safetensors", "pytorch_model.bin")


class TimmBackbone(CropBackbone):
    """A model of timm by name, with its transform.

    `pretrained` is the tag of timm's weights (None: timm's first), which the transform belongs to;
    `weights` is a file instead of them, `package` a Python package that brings them. `map_stride`
    is how many pixels of the input a cell of its feature map is wide: the map is then the last of
    that stride, before what halves it. Without one it is the model's last.
    """

    def __init__(
        self,
        model: str,
        *,
        pretrained: str | None = None,
        weights: Weights | None = None,
        package: Packaged | None = None,
        map_stride: Scalar = None,
        batch_size: int = BATCH_CROPS,
        device: str = "auto",
    ) -> None:
        super().__init__(batch_size=batch_size, device=device)
        if not timm.is_model(model):
            raise no_such("timm", model, timm.list_models())
        tags = [name.partition(".")[2] for name in timm.list_pretrained(f"{model}.*")]
        if pretrained is not None and pretrained not in tags:
            raise ManifestError(unknown(f"weights of timm's {model}", pretrained, tags))
        self.name = f"{model}.{pretrained}" if pretrained else model
        self._file, self._package = weights, package
        self._map_stride = map_stride

    @classmethod
    def from_manifest(cls, manifest: BackboneManifest, resources: Resources) -> Self:
        """Return the backbone, or raise what is missing for it."""
        only_options(manifest, ("map_stride",))
        model, _, tag = manifest.model.partition(".")
        return cls(
            model,
            pretrained=manifest.pretrained or tag or None,
            weights=resources.file,
            package=PACKAGES[manifest.package] if manifest.package else None,
            map_stride=manifest.options.get("map_stride"),
            batch_size=resources.batch_size or BATCH_CROPS,
            device=resources.device,
        )

    @cached_property
    def weights(self) -> Weights:
        """Return the file of weights, downloaded by name if it was neither given nor packaged."""
        return self._file or (self._package.find() if self._package else self._fetch())

    @property
    def provenance(self) -> dict[str, Any]:
        """Return what decides the features."""
        decides = {"weights": self.weights.provenance, "preprocessing": self._config}
        # Only where it is given, for it changes no other features.
        return decides if self._map_stride is None else decides | {"map_stride": self._map_stride}

    @cached_property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Return timm's transform for these weights."""
        transform: Callable[[Image.Image], Tensor] = create_transform(**self._config)
        return transform

    def load(self) -> None:
        """Load the model now, or raise what is wrong with it or with the stride of its map."""
        super().load()
        if self._map_stride is not None:
            self.map_width  # noqa: B018 - one forward pass shows that it is there

    def build(self) -> nn.Module:
        """Return the model without its classifier."""
        tensors = self.weights.read()
        if self._package and not self._file:
            tensors = self._package.rename(tensors)
        for classes in self._classes(tensors):
            with suppress(RuntimeError, KeyError):
                return self._create(tensors, classes)
        whole = timm.create_model(self.name, pretrained=False)
        differ = differences(whole, tensors) or ["timm cannot read them"]
        raise misfit(f"timm's {self.name}", differ, where=self.weights.path)

    def _create(self, tensors: Mapping[str, Tensor], classes: int) -> nn.Module:
        """Return the model; raise RuntimeError or KeyError where the weights do not fit.

        The classifier leaves after loading: told to leave it out before, timm's loader is not
        strict, and would take the weights of any other network in silence.
        """
        model: Any = timm.create_model(
            self.name,
            pretrained=True,
            num_classes=classes,
            pretrained_cfg_overlay={"state_dict": dict(tensors), "num_classes": classes},
        )
        model.reset_classifier(0)
        network: nn.Module = model
        return network

    def _classes(self, tensors: Mapping[str, Tensor]) -> Sequence[int]:
        """Return how many classes the file's classifier may have, 0 if it was taken off."""
        config = self._pretrained
        names = [config.classifier] if isinstance(config.classifier, str) else config.classifier
        heads = [tensors[f"{name}.weight"] for name in names or () if f"{name}.weight" in tensors]
        if heads:
            return [len(heads[0]) - (config.label_offset or 0)]
        return [config.num_classes, 0]  # under another project's name, or without

    def pooled(self, batch: Tensor) -> Tensor:
        """Return the features before the classifier."""
        features: Tensor = self.model(batch)
        return features

    def mapped(self, batch: Tensor) -> Tensor:
        """Return the features before the pooling, or those of the stride that was asked for."""
        model = self.model
        cells = getattr(getattr(model, "patch_embed", None), "grid_size", (0, 0))
        prefix = getattr(model, "num_prefix_tokens", 0)
        if self._map_stride is None:
            return channels_last(model.forward_features(batch), model.num_features, prefix, cells)
        return channels_last(self._passing(batch), self._stage["num_chs"], prefix, cells)

    def _passing(self, batch: Tensor) -> Tensor:
        """Return what leaves the stage of the map's stride."""
        left: list[Tensor] = []
        module = self.model.get_submodule(self._stage["module"])
        hook = module.register_forward_hook(lambda *call: left.append(call[-1]))
        try:
            self.model.forward_features(batch)
        finally:
            hook.remove()
        return left[-1]

    @cached_property
    def _stage(self) -> dict[str, Any]:
        """Return what timm says of the last stage of the map's stride."""
        stages = {stage["reduction"]: stage for stage in self.model.feature_info}
        if self._map_stride not in stages:
            what = f"map_stride of timm's {self.name}"
            raise ManifestError(unknown(what, str(self._map_stride), [str(one) for one in stages]))
        found: dict[str, Any] = stages[self._map_stride]
        return found

    @cached_property
    def _config(self) -> dict[str, Any]:
        resolve: Callable[..., dict[str, Any]] = resolve_data_config
        config = resolve(pretrained_cfg=self._pretrained.to_dict())
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in config.items()
        }

    @property
    def _pretrained(self) -> Any:  # noqa: ANN401 - timm has no types
        return get_pretrained_cfg(self.name)

    def _fetch(self) -> Weights:
        config, origin = self._pretrained, f"timm {self.name}"
        if config.hf_hub_id:
            files = (config.hf_hub_filename,) if config.hf_hub_filename else HUB_FILES
            return fetch_hub(config.hf_hub_id, files, origin=origin)
        if config.url:
            return fetch_url(config.url, origin=origin)
        raise MissingError(
            f"timm has no weights for {self.name}",
            mend="Give them with --weights FILE, or choose another of timm.list_pretrained().",
        )
