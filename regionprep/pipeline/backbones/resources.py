"""What a backbone may need besides its manifest."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regionprep.errors import ManifestError, unknown
from regionprep.manifests import BackboneManifest
from regionprep.pipeline.detectors.detector import Detector
from regionprep.pipeline.weights import Weights


@dataclass(frozen=True)
class Resources:
    """A file of weights, the detector for `roi`, how many crops go together, and where."""

    weights: Path | None = None
    detector: Detector | None = None
    batch_size: int | None = None
    device: str = "auto"

    @property
    def file(self) -> Weights | None:
        """Return the user's file of weights, or raise MissingError when it is not there."""
        return None if self.weights is None else Weights.of_file(self.weights)


def only_options(manifest: BackboneManifest, known: Sequence[str] = ()) -> None:
    """Raise ManifestError if a manifest has an option that its library does not know."""
    for name in manifest.options:
        if name not in known:
            raise ManifestError(unknown("option", name, known), where=manifest.name)


def no_such(library: str, model: str, known: Sequence[str]) -> ManifestError:
    """Return the error that names the nearest of a library's many models."""
    close = difflib.get_close_matches(model, known, n=5)
    return ManifestError(
        f"{library} has no model '{model}'."
        + (f" Did you mean {' or '.join(close)}?" if close else ""),
        mend=f"{library}.list_models() lists all {len(known)}.",
    )
