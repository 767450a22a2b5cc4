"""Captions to scores, and to pictures that can be looked at.

`score` compares tokenised captions with references (BLEU, ROUGE-L, CIDEr, CIDEr-D), `evaluate` and
`read_references` do it for a workspace's captions, `table` prints it. `contact_sheet` draws images
with their boxes and captions. `retrieval` tells whether features mean something at all.
"""

from regionprep.evaluation.metrics import ALL, LABELS, Scores, document_frequency, score, table
from regionprep.evaluation.ngrams import DocumentFrequency, References
from regionprep.evaluation.results import evaluate, read_captions, read_references, write_captions

__all__ = [
    "ALL",
    "LABELS",
    "DocumentFrequency",
    "References",
    "Scores",
    "document_frequency",
    "evaluate",
    "read_captions",
    "read_references",
    "score",
    "table",
    "write_captions",
]
