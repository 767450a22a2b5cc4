"""A run's captions on disk and against its dataset's: `captions.json`, and the scores of it.

The file is in COCO's results format, `[{"image_id": ..., "caption": ...}, ...]`, which COCO's own
tools and pycocoevalcap read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, StrictInt, StrictStr, TypeAdapter, ValidationError

from regionprep.errors import InputError, MissingError, unknown
from regionprep.evaluation.metrics import ALL, Scores, score
from regionprep.evaluation.ngrams import some
from regionprep.pipeline.documents import read_json
from regionprep.pipeline.tables import read_captions as read_caption_table
from regionprep.pipeline.tables import read_images
from regionprep.pipeline.text import tokenize
from regionprep.workspace import Workspace, write_text

Tokens: TypeAlias = list[str]


class _Result(BaseModel):
    model_config = ConfigDict(extra="ignore")

    image_id: StrictInt | StrictStr
    caption: StrictStr


# As an integer of 64 bits would print it: "007" stays a name, and so do longer ones.
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_RESULTS = TypeAdapter(list[_Result])


def write_captions(path: Path, captions: Mapping[str, str | Sequence[str]]) -> None:
    """Write captions by image id to `path`, whole or not at all, sorted by image id.

    Tokens are joined by spaces. Ids that are numbers are written as numbers, since COCO's tools
    look them up so.
    """
    rows = [
        {"image_id": _number_or_name(image_id), "caption": _text(captions[image_id])}
        for image_id in sorted(captions)
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(path, f"[\n{lines}\n]\n" if rows else "[]\n")


def read_captions(path: Path) -> dict[str, str]:
    """Return the captions of a file in COCO's results format, by image id.

    Raises MissingError when it is not there, InputError when it is no such file or has two captions
    for one image.
    """
    if not path.is_file():
        raise MissingError("no such file", where=path, mend="Make it with `prep caption`.")
    try:
        rows = _RESULTS.validate_python(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part!r}]" for part in first["loc"])
        raise InputError(
            f"not in COCO's results format: {place or 'the whole'}: {first['msg']}",
            where=path,
            mend='Expected: [{"image_id": 42, "caption": "a dog"}, ...].',
        ) from None
    captions = {str(row.image_id): row.caption for row in rows}
    if len(captions) != len(rows):
        times = Counter(str(row.image_id) for row in rows)
        twice = [image_id for image_id, number in times.items() if number > 1]
        raise InputError(f"more than one caption for image {some(twice)}", where=path)
    return captions


def read_references(workspace: Workspace, split: str) -> dict[str, list[Tokens]]:
    """Return the tokenised captions of a split's images by image id.

    They come from the captions' text by our own rule, even where the dataset gives tokens: scores
    are to mean the same for every dataset. Images without captions are left out.

    Raises InputError for a split that no image is in.
    """
    images = read_images(workspace)
    splits = {image.image_id: image.split for image in images}
    if split not in splits.values():
        raise InputError(unknown("split", split, set(splits.values())), where=workspace.images)
    references: dict[str, list[Tokens]] = {}
    for caption in read_caption_table(workspace):
        if splits.get(caption.image_id) == split:
            references.setdefault(caption.image_id, []).append(tokenize(caption.text))
    return references


def evaluate(
    captions: Mapping[str, str | Sequence[str]],
    references: Mapping[str, Sequence[str | Sequence[str]]],
    metrics: Iterable[str] = ALL,
) -> Scores:
    """Score one caption an image; texts are tokenised, lists are taken as tokens.

    Raises InputError when there is nothing to score or the images differ.
    """
    return score(
        {image_id: _tokens(caption) for image_id, caption in captions.items()},
        {image_id: [_tokens(text) for text in texts] for image_id, texts in references.items()},
        metrics,
    )


def _tokens(caption: str | Sequence[str]) -> Sequence[str]:
    return tokenize(caption) if isinstance(caption, str) else caption


def _text(caption: str | Sequence[str]) -> str:
    return caption if isinstance(caption, str) else " ".join(caption)


def _number_or_name(image_id: str) -> int | str:
    return int(image_id) if _NUMBER.fullmatch(image_id) else image_id
