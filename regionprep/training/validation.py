"""What an epoch is worth: the loss on the captions of val, and the scores of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from regionprep.models import Captioner, beam_search
from regionprep.pipeline.vocab import Vocabulary
from regionprep.training.batches import Batch, Epoch
from regionprep.training.engine import Engine
from regionprep.training.losses import cross_entropy

Score = Callable[[dict[str, list[str]]], Mapping[str, float]]
"""From the words of a caption by image id to figures by name; higher is better."""


@torch.inference_mode()
def validate(
    engine: Engine, epoch: Epoch, vocabulary: Vocabulary, *, score: Score | None, beam_size: int
) -> dict[str, float]:
    """Return `val_loss`, in nats a token, and each figure of `score` under a name with `val_`."""
    captions: dict[str, list[str]] = {}
    loss, tokens = 0.0, 0
    criterion = partial(cross_entropy, pad=vocabulary.pad)
    engine.model.eval()
    for batch in engine.load(epoch):
        with engine.fabric.autocast():
            mean = engine.model(batch, criterion)
            if score is not None:
                captions |= _caption(engine.captioner, batch, vocabulary, beam_size)
        loss += mean.item() * batch.tokens
        tokens += batch.tokens
    engine.model.train()
    figures = {"loss": loss / tokens} | dict(score(captions) if score is not None else {})
    return {f"val_{name}": value for name, value in figures.items()}


def _caption(
    captioner: Captioner[Any, Any], batch: Batch, vocabulary: Vocabulary, beam_size: int
) -> dict[str, list[str]]:
    """Return the words of the best caption of each image."""
    found = beam_search(
        captioner, batch.regions, beam_size=beam_size, forbidden=vocabulary.forbidden
    )
    words = (vocabulary.decode(best[0].tokens) for best in found)
    return dict(zip(batch.image_ids, words, strict=True))
