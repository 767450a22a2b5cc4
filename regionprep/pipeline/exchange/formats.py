"""The registry of formats: how each is opened and, where it can be, written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from regionprep.errors import InputError, unknown
from regionprep.pipeline.exchange.databases import DatabaseSink, database_source
from regionprep.pipeline.exchange.folders import FolderSink, folder_source
from regionprep.pipeline.exchange.hdf5 import Hdf5Sink, Hdf5Source
from regionprep.pipeline.exchange.record import Sink, Source
from regionprep.pipeline.exchange.tables import TableSource
from regionprep.pipeline.exchange.tars import tar_source
from regionprep.pipeline.exchange.tsv import TsvSink, TsvSource


@dataclass(frozen=True)
class Format:
    """A format: what opens it (with its own options), what writes it, and what that loses."""

    source: Callable[..., Source]
    sink: Callable[[Path], Sink] | None = None
    options: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


AS_FLOAT32 = "float16 features are written as float32, the same numbers"
GRIDS = "a grid becomes a list of its cells"

FORMATS: dict[str, Format] = {
    "tsv": Format(TsvSource, TsvSink, lost=("scores and classes have no field", AS_FLOAT32, GRIDS)),
    "tsv10": Format(
        TsvSource,
        partial(TsvSink, fields=10),
        lost=("attributes are not known: -1", AS_FLOAT32, GRIDS),
    ),
    "hdf5": Format(Hdf5Source, Hdf5Sink, options=("grid",)),
    "numpy": Format(folder_source, FolderSink),
    "lmdb": Format(database_source, DatabaseSink),
    "tar": Format(tar_source),
    "parquet": Format(TableSource, options=("column", "id_column")),
}


def open_source(name: str, paths: Sequence[Path], **options: object) -> Source:
    """Return the source of a format; options that are None or False are not given.

    Raises InputError for an unknown format, an option that is not its own, and paths that it
    cannot open.
    """
    format_ = _format(name)
    given = {key: value for key, value in options.items() if value}
    useless = sorted(given.keys() - set(format_.options))
    if useless:
        option = useless[0].replace("_", "-")
        raise InputError(
            f"format '{name}' has no use for --{option}", mend=f"Leave out --{option}."
        )
    return format_.source(paths, **given)


def writable(name: str) -> tuple[Callable[[Path], Sink], tuple[str, ...]]:
    """Return what writes a format, and what is lost by that; InputError where nothing does."""
    format_ = _format(name)
    if format_.sink is None:
        able = ", ".join(key for key, value in FORMATS.items() if value.sink)
        raise InputError(f"format '{name}' can only be imported", mend=f"Export to one of: {able}.")
    return format_.sink, format_.lost


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise InputError(unknown("format", name, FORMATS))
    return FORMATS[name]
