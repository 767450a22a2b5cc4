"""Features from and to other projects' formats, one file a format."""

from __future__ import annotations

from regionprep.pipeline.exchange.exporting import Exported, run_export
from regionprep.pipeline.exchange.formats import FORMATS, Format, open_source
from regionprep.pipeline.exchange.importing import Imported, run_import
from regionprep.pipeline.exchange.matching import RULES, RuleName
from regionprep.pipeline.exchange.record import Record

__all__ = [
    "FORMATS",
    "RULES",
    "Exported",
    "Format",
    "Imported",
    "Record",
    "RuleName",
    "open_source",
    "run_export",
    "run_import",
]
