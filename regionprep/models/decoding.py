"""Search for the best captions under any captioner: beam search and greedy choice, in batches.

The rule where implementations differ: a finished hypothesis keeps its slot in the beam and competes
by score. A score is the log-probability of the whole caption with its end; a caption of
`max_length` words can only end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regionprep.errors import InputError, TrainingError
from regionprep.models.captioner import Captioner, Regions


@dataclass(frozen=True)
class Hypothesis:
    """A caption as token ids without its start and end, and the sum of log p with its end."""

    tokens: list[int]
    score: float


@dataclass
class Beams:
    """The hypotheses of all images: their words, sums of log p, and whether they have ended."""

    tokens: Int[Tensor, "b k t"]
    totals: Float[Tensor, "b k"]
    ended: Bool[Tensor, "b k"]
    lengths: Int[Tensor, "b k"]

    @classmethod
    def empty(cls, images: int, size: int, device: torch.device) -> Beams:
        """Return beams with one live hypothesis each: more would all be the same."""
        totals = torch.full((images, size), -torch.inf, device=device)
        totals[:, 0] = 0
        return cls(
            torch.zeros(images, size, 0, dtype=torch.long, device=device),
            totals,
            torch.zeros(images, size, dtype=torch.bool, device=device),
            torch.zeros(images, size, dtype=torch.long, device=device),
        )

    def extend(
        self, log_p: Float[Tensor, "b k v"], *, eos: int, length_penalty: float
    ) -> tuple[Beams, Int[Tensor, "b k"]]:
        """Return the best beams with one more token, and which hypothesis each came from."""
        size, vocabulary = log_p.shape[1:]
        stay = torch.full_like(log_p[0, 0], -torch.inf)
        stay[eos] = 0
        totals = self.totals.unsqueeze(-1) + torch.where(self.ended.unsqueeze(-1), stay, log_p)
        lengths = self.lengths + ~self.ended
        ranks = totals / lengths.unsqueeze(-1) ** length_penalty
        chosen = ranks.flatten(1).topk(size).indices
        source, token = chosen // vocabulary, chosen % vocabulary
        longer = torch.cat([_pick(self.tokens, source), token.unsqueeze(-1)], -1)
        ended = self.ended.gather(1, source) | (token == eos)
        beams = Beams(longer, totals.flatten(1).gather(1, chosen), ended, lengths.gather(1, source))
        return beams, source

    def hypotheses(self, eos: int) -> list[list[Hypothesis]]:
        """Return the hypotheses of each image in their order, without those that cannot be."""
        return [
            [
                Hypothesis(row[: row.index(eos)], score)
                for row, score in zip(rows, scores, strict=True)
                if score > -torch.inf
            ]
            for rows, scores in zip(self.tokens.tolist(), self.totals.tolist(), strict=True)
        ]


@torch.inference_mode()
def beam_search(
    model: Captioner[Any, Any],
    regions: Regions,
    *,
    beam_size: int = 3,
    max_length: int | None = None,
    length_penalty: float = 0.0,
    forbidden: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Return up to `beam_size` captions of each image, best first.

    Hypotheses compete by sum of log p / (words + 1) ** `length_penalty`. Captions never hold the
    padding, the start, or a token in `forbidden` (ids, such as that of unknown words), and have at
    most `max_length` words (the model's by default). The model decodes as it stands: call
    `model.eval()` first. Raises InputError for sizes that do not fit and TrainingError for a model
    whose scores are not numbers.
    """
    length = model.max_length if max_length is None else max_length
    _check_sizes(model, beam_size, length)
    images, device = len(regions.mask), regions.mask.device
    never = torch.tensor([model.pad, model.bos, *forbidden], device=device)
    beams = Beams.empty(images, beam_size, device)
    tokens = torch.full((images * beam_size,), model.bos, device=device)
    state = model.start(model.encode(regions), beam_size)
    for position in range(length + 1):
        logits, state = model.step(tokens, state)
        log_p = logits.float().log_softmax(-1).unflatten(0, (images, beam_size))
        _require_numbers(log_p)
        log_p = _permitted(log_p, never, model.eos, last=position == length)
        beams, source = beams.extend(log_p, eos=model.eos, length_penalty=length_penalty)
        if beams.ended.all():
            break
        tokens = beams.tokens[..., -1].flatten()
        state = state.reorder(_rows(source))
    return beams.hypotheses(model.eos)


def greedy(
    model: Captioner[Any, Any],
    regions: Regions,
    *,
    max_length: int | None = None,
    forbidden: Sequence[int] = (),
) -> list[list[Hypothesis]]:
    """Return one caption of each image: the likeliest word at every step; see `beam_search`."""
    return beam_search(model, regions, beam_size=1, max_length=max_length, forbidden=forbidden)


def _check_sizes(model: Captioner[Any, Any], beam_size: int, max_length: int) -> None:
    if beam_size < 1:
        raise InputError(f"a beam of {beam_size}", mend="Give a beam size of at least 1.")
    if not 1 <= max_length <= model.max_length:
        raise InputError(
            f"captions of up to {max_length} words, and this model has room for 1 to "
            f"{model.max_length}",
            mend="Choose a length in that range, or train a model with a larger max_length.",
        )


def _require_numbers(log_p: Tensor) -> None:
    if log_p.isnan().any():
        raise TrainingError(
            "the model's scores are not numbers",
            mend="Its weights have diverged: decode with an earlier checkpoint.",
        )


def _permitted(
    log_p: Float[Tensor, "b k v"], never: Int[Tensor, " x"], eos: int, *, last: bool
) -> Float[Tensor, "b k v"]:
    """Return `log_p` with -inf where a token must not come; only the end may come `last`."""
    if last:
        only = torch.full_like(log_p, -torch.inf)
        only[..., eos] = log_p[..., eos]
        return only
    return log_p.index_fill(-1, never, -torch.inf)


def _pick(tokens: Int[Tensor, "b k t"], source: Int[Tensor, "b k"]) -> Int[Tensor, "b k t"]:
    return tokens.gather(1, source.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def _rows(source: Int[Tensor, "b k"]) -> Int[Tensor, " n"]:
    """Return the rows of the state that hypotheses came from; those of an image are neighbours."""
    images, size = source.shape
    first = torch.arange(images, device=source.device).unsqueeze(1) * size
    return (source + first).flatten()
