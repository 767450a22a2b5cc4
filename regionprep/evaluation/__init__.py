"""Captions to scores, and to pictures that can be looked at.

`score` compares tokenised captions with references (BLEU, ROUGE-L, CIDEr, CIDEr-D), `evaluate` and
`read_references` do it for a workspace's captions, `table` prints it. `contact_sheet` draws images
with their boxes and captions. `check_features` tells whether features mean anything.
"""

from regionprep.evaluation.metrics import ALL, LABELS, Scores, document_frequency, score, table
from regionprep.evaluation.ngrams import DocumentFrequency, References
from regionprep.evaluation.results import evaluate, read_captions, read_references, write_captions
from regionprep.evaluation.retrieval import Retrieval, check_features
from regionprep.evaluation.sheet import Entry, contact_sheet

__all__ = [
    "ALL",
    "LABELS",
    "DocumentFrequency",
    "Entry",
    "References",
    "Retrieval",
    "Scores",
    "check_features",
    "contact_sheet",
    "document_frequency",
    "evaluate",
    "read_captions",
    "read_references",
    "score",
    "table",
    "write_captions",
]
