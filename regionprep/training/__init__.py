"""Training: from features and captions to a run's folder."""

from __future__ import annotations

from regionprep.training.batches import Batch, CaptionedImages, Epoch, pad_regions
from regionprep.training.journal import read_metrics
from regionprep.training.loop import train
from regionprep.training.runs import Run, RunConfig, load_run
from regionprep.training.validation import Score

__all__ = [
    "Batch",
    "CaptionedImages",
    "Epoch",
    "Run",
    "RunConfig",
    "Score",
    "load_run",
    "pad_regions",
    "read_metrics",
    "train",
]
