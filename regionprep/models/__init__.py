"""Tables to captions: captioners, their attention mechanisms, and one search for all.

The letters of the shapes in signatures:

    b  batch (images)         t  tokens               h  heads
    c  captions of an image   v  vocabulary           d  width of a head
    n  rows: one for each     q  queries              m  width of the model
       caption or hypothesis  k  keys                 f  width of a region's features
    r  regions                i  inner width

`n` is a multiple of `b`: rows that follow each other share an image. Shapes are enforced in tests.
"""

from __future__ import annotations

from typing import Any

from regionprep.errors import InputError, unknown
from regionprep.models.captioner import Captioner, Criterion, Regions, Shape, State
from regionprep.models.decoding import Hypothesis, beam_search, greedy
from regionprep.models.gpt2 import GPT2
from regionprep.models.options import checked
from regionprep.models.show_and_tell import ShowAndTell
from regionprep.models.show_attend_tell import ShowAttendTell
from regionprep.models.transformer import Transformer
from regionprep.models.up_down import UpDown

CAPTIONERS: dict[str, type[Captioner[Any, Any]]] = {
    "gpt2": GPT2,
    "transformer": Transformer,
    "show_attend_tell": ShowAttendTell,
    "show_and_tell": ShowAndTell,
    "up_down": UpDown,
}

__all__ = [
    "CAPTIONERS",
    "Captioner",
    "Criterion",
    "Hypothesis",
    "Regions",
    "Shape",
    "State",
    "beam_search",
    "build",
    "greedy",
]


def build(
    captioner: str,
    *,
    feature_width: int,
    vocabulary_size: int,
    max_length: int,
    pad: int,
    bos: int,
    eos: int,
    grid: tuple[int, int] | None = None,
    **arguments: Any,  # noqa: ANN401 - each captioner has its own
) -> Captioner[Any, Any]:
    """Return a new captioner of the registry, its weights drawn from torch's random state.

    `max_length` counts words; `pad`, `bos` and `eos` are token ids; `grid` is the height and width
    of the feature map whose cells are the regions, if they are; `arguments` are the captioner's
    own. Raises InputError for a name or an argument that does not exist, naming the nearest, for
    values that do not fit, and for a model of feature maps without one.
    """
    if captioner not in CAPTIONERS:
        raise InputError(unknown("captioner", captioner, CAPTIONERS))
    shape = Shape(
        feature_width=feature_width,
        vocabulary_size=vocabulary_size,
        max_length=max_length,
        pad=pad,
        bos=bos,
        eos=eos,
        grid=grid,
    )
    kind = CAPTIONERS[captioner]
    own = checked(kind, arguments, owner=f"captioner '{captioner}'", reserved=("shape",))
    return kind(shape, **own)
