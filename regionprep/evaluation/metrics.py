"""Scores of captions against references: BLEU, ROUGE-L, CIDEr and CIDEr-D.

All work on tokens and equal pycocoevalcap's on the same tokens; each has its file, which opens
with its paper and equations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regionprep.errors import InputError, unknown
from regionprep.evaluation.bleu import bleu
from regionprep.evaluation.cider import cider
from regionprep.evaluation.ngrams import DocumentFrequency, Floats, References, Sentences, some
from regionprep.evaluation.rouge import rouge_l

LABELS = {
    "bleu_1": "BLEU-1",
    "bleu_2": "BLEU-2",
    "bleu_3": "BLEU-3",
    "bleu_4": "BLEU-4",
    "rouge_l": "ROUGE-L",
    "cider": "CIDEr",
    "cider_d": "CIDEr-D",
}
"""Every metric's name, and how tables print it."""

ALL = tuple(LABELS)


@dataclass(frozen=True)
class Scores:
    """The values of metrics over a corpus and of each image, as they come: CIDEr-D goes to 10.

    `per_image[image_id][metric]` averages to `corpus[metric]` for all but BLEU, whose counts are
    summed over the corpus before they are divided.
    """

    corpus: dict[str, float]
    per_image: dict[str, dict[str, float]]


def score(
    candidates: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[Sequence[str]]] | References,
    metrics: Iterable[str] = ALL,
    *,
    frequency: DocumentFrequency | None = None,
) -> Scores:
    """Score one tokenised caption an image against the image's tokenised references.

    `References.of(...)` made once serves many calls. CIDEr's document frequencies are the
    references' own; pass another's, such as the training captions', by `frequency`.

    Raises InputError when there is nothing to score, when images of candidates and references
    differ, and for unknown metrics.
    """
    metrics = list(metrics)
    for name in metrics:
        if name not in LABELS:
            raise InputError(unknown("metric", name, LABELS))
    if not isinstance(references, References):
        references = References.of(references)
    _check_same_images(candidates, references)
    sentences = Sentences.of([candidates[image_id] for image_id in references.ids])
    columns = _columns(sentences, references, metrics, frequency)
    rows = np.stack([per_image for _, per_image in columns], axis=1).tolist()
    return Scores(
        corpus={name: corpus for name, (corpus, _) in zip(metrics, columns, strict=True)},
        per_image={
            image_id: dict(zip(metrics, row, strict=True))
            for image_id, row in zip(references.ids, rows, strict=True)
        },
    )


def document_frequency(references: Mapping[str, Sequence[Sequence[str]]]) -> DocumentFrequency:
    """Return in how many images the tokenised references hold each n-gram, for CIDEr."""
    return References.of(references).document_frequency


def table(scores: Scores | Mapping[str, Scores]) -> str:
    """Return scores as an aligned text table, times 100 as papers print them.

    A mapping gives one row for each name; all rows are to hold the same metrics.
    """
    rows = {"": scores} if isinstance(scores, Scores) else dict(scores)
    metrics = list(next(iter(rows.values())).corpus) if rows else []
    lines = [["", *(LABELS[metric] for metric in metrics)]]
    lines += [
        [name, *(f"{100 * row.corpus[metric]:.1f}" for metric in metrics)]
        for name, row in rows.items()
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _columns(
    candidates: Sentences,
    references: References,
    metrics: Sequence[str],
    frequency: DocumentFrequency | None,
) -> list[tuple[float, Floats]]:
    """Return each metric's value over the corpus and of each image."""
    columns: dict[str, tuple[float, Floats]] = {}
    if any(name.startswith("bleu") for name in metrics):
        corpus, per_image = bleu(candidates, references)
        for n in range(4):
            columns[f"bleu_{n + 1}"] = float(corpus[n]), per_image[:, n]
    if "rouge_l" in metrics:
        columns["rouge_l"] = _averaged(rouge_l(candidates, references))
    if {"cider", "cider_d"} & set(metrics):
        plain, clipped = cider(candidates, references, frequency)
        columns |= {"cider": _averaged(plain), "cider_d": _averaged(clipped)}
    return [columns[name] for name in metrics]


def _averaged(per_image: Floats) -> tuple[float, Floats]:
    return float(per_image.mean()), per_image


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *others] if widths[0] else others)


def _check_same_images(candidates: Mapping[str, Sequence[str]], references: References) -> None:
    if not candidates:
        raise InputError("no captions to score")
    known = set(references.ids)
    if alone := sorted(set(candidates) - known):
        raise InputError(
            f"{len(alone)} captioned images have no references: {some(alone)}",
            mend="Score the captions against the split they were made for.",
        )
    if alone := sorted(known - set(candidates)):
        raise InputError(
            f"{len(alone)} images with references have no caption: {some(alone)}",
            mend="Caption the whole split, or pass the references of the captioned images only.",
        )
    if texts := sorted(name for name, tokens in candidates.items() if isinstance(tokens, str)):
        raise InputError(
            f"captions are to be lists of tokens, but these are texts: {some(texts)}",
            mend="Tokenise them first: regionprep.pipeline.text.tokenize.",
        )
