"""Connections: how a decoder's layer looks at the encoder; one file each, one registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from regionprep.errors import InputError, unknown
from regionprep.models.attention import Mechanism
from regionprep.models.connections.add_norm import AddNorm
from regionprep.models.connections.aoa import Aoa
from regionprep.models.connections.connection import Connection, Gates, Memory
from regionprep.models.connections.meshed import Meshed
from regionprep.models.connections.srau import Srau, SrauNormalized, SrauReleased
from regionprep.models.options import checked, takes

CONNECTIONS: dict[str, type[Connection]] = {
    "add_norm": AddNorm,
    "aoa": Aoa,
    "meshed": Meshed,
    "srau": Srau,
    "srau_normalized": SrauNormalized,
    "srau_released": SrauReleased,
}

__all__ = [
    "CONNECTIONS",
    "AddNorm",
    "Aoa",
    "Connection",
    "Gates",
    "Memory",
    "Meshed",
    "Srau",
    "SrauNormalized",
    "SrauReleased",
    "build",
]


def build(
    name: str,
    *,
    attention: Callable[[], Mechanism],
    width: int,
    dropout: float,
    norm_first: bool,
    layers: int,
    options: Mapping[str, Any] | None = None,
) -> Connection:
    """Return the connection of that name; `attention` makes the mechanisms it looks through.

    `layers` counts those of the encoder, for connections that look at each of them. Raises
    InputError for a name or an option that does not exist, naming the nearest.
    """
    if name not in CONNECTIONS:
        raise InputError(unknown("connection", name, CONNECTIONS))
    connection = CONNECTIONS[name]
    shared = {"attention": attention, "width": width, "dropout": dropout, "norm_first": norm_first}
    if takes(connection, "layers"):
        shared["layers"] = layers
    own = checked(connection, options or {}, owner=f"connection '{name}'", reserved=shared)
    return connection(**shared, **own)
