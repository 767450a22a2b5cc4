"""Attention mechanisms: one file each, one call for all, one registry.

Each is a drop-in for multi-head attention: (rows, tokens, width) in and out, batch first.

    from regionprep.models.attention import ZodiacAttention

    attention = ZodiacAttention(width=512, heads=8)
    output = attention(x, x, x, mask=real)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regionprep.errors import InputError, unknown
from regionprep.models.attention.absolute_geometry import AbsoluteGeometryAttention
from regionprep.models.attention.aoa import AoaAttention
from regionprep.models.attention.dot import DotAttention
from regionprep.models.attention.gsa import GeometryAttention
from regionprep.models.attention.linformer import LinformerAttention
from regionprep.models.attention.mechanism import Cache, Layout, Mechanism, MemoryCache, WordCache
from regionprep.models.attention.memory import MemoryAttention
from regionprep.models.attention.nsa import NormalizedAttention
from regionprep.models.attention.relation import RelationAttention
from regionprep.models.attention.stt import (
    TensorDenseSynthesizer,
    TensorHeightSynthesizer,
    TensorSumSynthesizer,
    TensorWidthSynthesizer,
)
from regionprep.models.attention.stt_factorized import (
    TensorFactorizedSynthesizer,
    TensorRandomFactorizedSynthesizer,
)
from regionprep.models.attention.stt_mixture import TensorMixtureSynthesizer
from regionprep.models.attention.stt_random import TensorRandomSynthesizer
from regionprep.models.attention.synthesizer import MatrixDenseSynthesizer
from regionprep.models.attention.zodiac import ZodiacAttention
from regionprep.models.options import checked, require_grid, takes

MECHANISMS: dict[str, type[Mechanism]] = {
    "aoa": AoaAttention,
    "dot": DotAttention,
    "memory": MemoryAttention,
    "zodiac": ZodiacAttention,
    "synthesizer_dense": MatrixDenseSynthesizer,
    "stt": TensorDenseSynthesizer,
    "stt_height": TensorHeightSynthesizer,
    "stt_width": TensorWidthSynthesizer,
    "stt_channel": TensorDenseSynthesizer,  # The paper's eq. 11 is its Z_C: `stt`, once more.
    "stt_sum": TensorSumSynthesizer,
    "stt_random": TensorRandomSynthesizer,
    "stt_factorized": TensorFactorizedSynthesizer,
    "stt_random_factorized": TensorRandomFactorizedSynthesizer,
    "stt_mixture": TensorMixtureSynthesizer,
    "linformer": LinformerAttention,
    "nsa": NormalizedAttention,
    "gsa": GeometryAttention,
    "absolute_geometry": AbsoluteGeometryAttention,
    "relation": RelationAttention,
}

SIZES = ("width", "heads", "grid")
"""What a model decides for all its mechanisms."""

__all__ = [
    "MECHANISMS",
    "AbsoluteGeometryAttention",
    "AoaAttention",
    "Cache",
    "DotAttention",
    "GeometryAttention",
    "Layout",
    "LinformerAttention",
    "MatrixDenseSynthesizer",
    "Mechanism",
    "MemoryAttention",
    "MemoryCache",
    "NormalizedAttention",
    "RelationAttention",
    "TensorDenseSynthesizer",
    "TensorFactorizedSynthesizer",
    "TensorHeightSynthesizer",
    "TensorMixtureSynthesizer",
    "TensorRandomFactorizedSynthesizer",
    "TensorRandomSynthesizer",
    "TensorSumSynthesizer",
    "TensorWidthSynthesizer",
    "WordCache",
    "ZodiacAttention",
    "build",
]


def build(
    name: str,
    *,
    width: int,
    heads: int,
    dropout: float = 0.0,
    decoder: bool = False,
    grid: tuple[int, int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Mechanism:
    """Return the mechanism of that name for a model of `width`, `heads` and `dropout`.

    What `options` leave open is as the mechanism wants it in an encoder or a `decoder`. `grid` is
    the height and width of the feature map whose cells are looked at, for mechanisms that are made
    for one. Raises InputError for a name or an option that does not exist, naming the nearest, and
    for a mechanism of encoders in a decoder.
    """
    if name not in MECHANISMS:
        raise InputError(unknown("attention", name, MECHANISMS))
    mechanism = MECHANISMS[name]
    if decoder and not mechanism.decodes:
        decoders = [known for known, other in MECHANISMS.items() if other.decodes]
        raise InputError(
            f"attention '{name}' is for encoders: words cannot look through it",
            mend=f"Give decoder_attention and cross_attention, each one of {', '.join(decoders)}.",
        )
    given = {**mechanism.defaults(dropout=dropout, decoder=decoder), **(options or {})}
    arguments = checked(mechanism, given, owner=f"attention '{name}'", reserved=SIZES)
    sizes: dict[str, Any] = {"width": width, "heads": heads}
    if takes(mechanism, "grid"):
        sizes["grid"] = require_grid(grid, owner=f"attention '{name}'")
    return mechanism(**sizes, **arguments)
