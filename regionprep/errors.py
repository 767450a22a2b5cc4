"""The exception tree: every error says what is wrong, where, and how to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PrepError(Exception):
    """A fault that the user can mend; `prep` prints it without a traceback and exits with 2."""

    def __init__(self, what: str, *, where: object = None, mend: str | None = None) -> None:
        self.what, self.where, self.mend = what, where, mend
        place = f"{where}: " if where is not None else ""
        super().__init__(f"{place}{what}" + (f"\n  {mend}" if mend else ""))


class InputError(PrepError):
    """A file, argument or value from the user that cannot be used."""


class ManifestError(InputError):
    """A manifest with unknown keys, wrong values or an unknown name."""


class MissingError(PrepError):
    """Something an earlier stage makes is not there; `mend` names the command that makes it."""


class MismatchError(PrepError):
    """Two things that do not belong together: vocabularies, box sets, checkpoints, plans."""


class StorageError(PrepError):
    """The disk is full, unreadable, or holds a damaged file."""


class BusyError(PrepError):
    """Another process works on the same folder."""


class ClusterError(PrepError):
    """The Dask scheduler or its workers cannot be reached, or die."""


class TrainingError(PrepError):
    """Training cannot go on: a loss that is not finite, a shard that went bad."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return "unknown KIND 'NAME'. Did you mean ...? Known: ..." for an error message."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"unknown {kind} '{name}'.{hint} Known: {', '.join(known) or 'none'}"
