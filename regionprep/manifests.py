"""Strict schemas of `manifests/` and their loader: one YAML a thing, file name = registry name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from regionprep.errors import ManifestError, unknown

Scalar = bool | int | float | str | None

MAX_PIXELS = 120_000_000
"""More than any camera of a photograph's dataset makes, less than what exhausts a worker."""


class Manifest(BaseModel):
    """What all manifests share: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")
    summary: str


class Part(BaseModel):
    """A nested part of a manifest, as strict as the whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Download(Part):
    """A file that the user fetches: address, size in bytes and checksum where they are known.

    `unpack` is the folder, counted from the workspace, into which an archive is unpacked.
    """

    file: str
    url: str
    unpack: str = ""
    bytes: int | None = None
    sha256: str | None = None
    md5: str | None = None


class ImageSource(Part):
    """Where the images are: a folder of files, or the embedded scenes drawn from a seed."""

    kind: Literal["folder", "scenes"] = "folder"
    root: str = ""
    seed: int = 0
    max_pixels: int = Field(default=MAX_PIXELS, gt=0)


class CaptionSource(Part):
    """Where the captions are, and in which format: detected from the files when it is null."""

    kind: Literal["karpathy", "coco", "table", "scenes"] | None = None
    files: tuple[str, ...] = ()


class SplitRule(Part):
    """Splits as the source gives them, or drawn by a seed with these many images.

    `train` is the number of images drawn for training: all that are left when it is null.
    `restval` says whether Karpathy's restval joins train or is left out.
    """

    kind: Literal["given", "drawn"] = "given"
    restval: bool = True
    seed: int = 0
    train: int | None = Field(default=None, ge=0)
    val: int = Field(default=0, ge=0)
    test: int = Field(default=0, ge=0)


class Defaults(Part):
    """What a command uses when the user names nothing."""

    detector: str = "fasterrcnn_resnet50_fpn_v2"
    backbone: str | None = None
    model: str = "transformer"
    preset: str = "base"
    min_count: int = Field(default=6, ge=1)
    max_length: int = Field(default=16, ge=1)


class DatasetManifest(Manifest):
    """Images, captions and splits of a dataset."""

    licence: str = ""
    homepage: str = ""
    downloads: tuple[Download, ...] = ()
    images: ImageSource = ImageSource()
    captions: CaptionSource | None = None
    splits: SplitRule = SplitRule()
    defaults: Defaults = Defaults()


class DetectorManifest(Manifest):
    """A detector: which adapter runs it, with which weights, and how boxes are selected.

    `model` and `weights` are names in the library that owns the network.
    """

    kind: Literal["scenes", "torchvision", "boxes", "grid", "whole"]
    licence: str = ""
    source: str = ""
    model: str = ""
    weights: str | None = None
    min_boxes: int = Field(default=10, ge=0)
    max_boxes: int = Field(default=100, ge=1)
    score_threshold: float = Field(default=0.2, ge=0, le=1)
    nms_threshold: float = Field(default=0.3, gt=0, le=1)
    options: dict[str, Scalar] = {}


class BackboneManifest(Manifest):
    """A backbone: the library that owns it, its name and weights there, and its output."""

    library: Literal["timm", "open_clip", "roi"]
    model: str = ""
    pretrained: str | None = None
    package: str | None = None
    licence: str = ""
    source: str = ""
    width: int | None = None
    options: dict[str, Scalar] = {}


class TrainingRecipe(Part):
    """How a model is trained unless the user says otherwise.

    `warmup` counts updates, over which the rate rises with each; over `warmup_epochs` it rises with
    each epoch and stays the same within one. `decay_from` is the first epoch at a decayed rate,
    the one after `decay_every` epochs when it is null.
    """

    epochs: int = Field(default=15, ge=1)
    batch_images: int = Field(default=50, ge=1)
    captions_per_image: int = Field(default=5, ge=1)
    learning_rate: float = Field(default=5e-4, gt=0)
    schedule: Literal["constant", "noam", "step"] = "step"
    warmup: int = Field(default=0, ge=0)
    warmup_epochs: int = Field(default=0, ge=0)
    decay: float = Field(default=0.8, gt=0, le=1)
    decay_every: int = Field(default=3, ge=1)
    decay_from: int | None = Field(default=None, ge=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    clip_norm: float | None = None
    clip_value: float | None = None
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)


class ParameterCount(Part):
    """How many parameters a model has, and on which features and vocabulary.

    `grid` is the size of the paper's feature map; None for models that take sets of regions.
    """

    count: int
    feature_width: int = 768
    vocabulary_size: int = 9488
    grid: tuple[int, int] | None = None


class Preset(Part):
    """A named size: what it changes in the arguments and the recipe."""

    arguments: dict[str, Any] = {}
    training: dict[str, Any] = {}


class ModelManifest(Manifest):
    """A captioner: its class, keyword arguments, presets and recipe."""

    captioner: str
    source: str = ""
    scores: dict[str, Any] = {}
    parameters: ParameterCount | None = None
    command: str = ""
    arguments: dict[str, Any] = {}
    presets: dict[str, Preset] = {}
    training: TrainingRecipe = TrainingRecipe()


KINDS: dict[str, type[Manifest]] = {
    "datasets": DatasetManifest,
    "detectors": DetectorManifest,
    "backbones": BackboneManifest,
    "models": ModelManifest,
}

M = TypeVar("M", bound=BaseModel)


@functools.cache
def root() -> Path:
    """Return the folder of the shipped manifests: in the wheel, or beside the package."""
    package = Path(__file__).parent
    inside = package / "_manifests"
    return inside if inside.is_dir() else package.parent / "manifests"


def names(kind: str) -> list[str]:
    """Return the names of the shipped manifests of `kind`, sorted."""
    return sorted(path.stem for path in (root() / kind).glob("*.yaml"))


def load(kind: str, name: str) -> Any:  # noqa: ANN401 - the class depends on `kind`
    """Return the manifest called `name`, or the one in the YAML file at that path.

    Raises ManifestError when there is none, or when it does not fit the schema; all its faults
    are reported together.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = root() / kind / f"{name}.yaml"
        if name not in names(kind):
            raise ManifestError(unknown(kind.rstrip("s"), name, names(kind)))
    return parse(KINDS[kind], read_yaml(path) | {"name": path.stem}, where=path)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; only plain data is accepted, no tags."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(
            "no such file", where=path, mend="Check the path, or give a shipped name."
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"cannot be read as YAML: {error}", where=path) from error
    if not isinstance(data, dict):
        raise ManifestError("holds no mapping of keys to values", where=path)
    return data


def parse(schema: type[M], data: dict[str, Any], *, where: object) -> M:
    """Return `data` as `schema`, or raise a ManifestError that lists every fault."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        faults = [_explain(schema, fault) for fault in error.errors()]
        raise ManifestError("; ".join(faults), where=where) from None


def _explain(schema: type[BaseModel], fault: Any) -> str:  # noqa: ANN401 - pydantic's own dict
    *part, key = fault["loc"]
    if fault["type"] == "extra_forbidden":
        place = ".".join(map(str, part))
        return (f"{place}: " if place else "") + unknown("key", str(key), _fields_at(schema, part))
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']} (got {fault['input']!r})"


def _fields_at(schema: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Return the fields of the part of `schema` that `place` leads to."""
    for step in place:
        if isinstance(step, str) and step in schema.model_fields:
            inner = _part_in(schema.model_fields[step].annotation)
            if inner is None:
                return []
            schema = inner
    return list(schema.model_fields)


def _part_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - any annotation
    """Return the schema in an annotation such as `CaptionSource | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_part_in, get_args(annotation))), None)
