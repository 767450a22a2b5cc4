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
from regionprep.models.attention.dot import DotAttention
from regionprep.models.attention.mechanism import Cache, Layout, Mechanism, MemoryCache, WordCache
from regionprep.models.attention.zodiac import ZodiacAttention
from regionprep.models.options import checked

MECHANISMS: dict[str, type[Mechanism]] = {
    "dot": DotAttention,
    "zodiac": ZodiacAttention,
}

__all__ = [
    "MECHANISMS",
    "Cache",
    "DotAttention",
    "Layout",
    "Mechanism",
    "MemoryCache",
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
    options: Mapping[str, Any] | None = None,
) -> Mechanism:
    """Return the mechanism of that name for a model of `width`, `heads` and `dropout`.

    What `options` leave open is as the mechanism wants it in an encoder or a `decoder`. Raises
    InputError for a name or an option that does not exist, naming the nearest.
    """
    if name not in MECHANISMS:
        raise InputError(unknown("attention", name, MECHANISMS))
    mechanism = MECHANISMS[name]
    given = {**mechanism.defaults(dropout=dropout, decoder=decoder), **(options or {})}
    arguments = checked(mechanism, given, owner=f"attention '{name}'", reserved=("width", "heads"))
    return mechanism(width=width, heads=heads, **arguments)
