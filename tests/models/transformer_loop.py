"""The transformer captioner as "Attention Is All You Need" writes it, one caption, in float64."""

from __future__ import annotations

import math

import torch
from connection_loops import dot, layer_norm, linear
from torch import Tensor


def sublayer(residual, rows: list[Tensor], branch) -> list[Tensor]:
    """Return each row with what a branch makes of all, normalised before or after."""
    if residual.norm_first:
        made = branch([layer_norm(residual.norm, row) for row in rows])
        return [row + new for row, new in zip(rows, made, strict=True)]
    made = branch(rows)
    return [layer_norm(residual.norm, row + new) for row, new in zip(rows, made, strict=True)]


def feed_forward(network, row: Tensor) -> Tensor:
    return linear(network[3], linear(network[0], row).clamp_min(0))


def end(norm, rows: list[Tensor]) -> list[Tensor]:
    return [layer_norm(norm, row) if hasattr(norm, "weight") else row for row in rows]


def position(place: int, width: int) -> Tensor:
    numbers = []
    for j in range(width):
        angle = place / 10000 ** (2 * (j // 2) / width)
        numbers.append(math.cos(angle) if j % 2 else math.sin(angle))
    return torch.tensor(numbers, dtype=torch.float64)


def encoded(model, features: Tensor) -> list[Tensor]:
    rows = [linear(model.encoder.project[0], region).clamp_min(0) for region in features]
    for layer in model.encoder.layers:
        rows = sublayer(
            layer.attention_residual,
            rows,
            lambda seen, layer=layer: [dot(layer.attention, row, seen, seen) for row in seen],
        )
        rows = sublayer(
            layer.feed_forward_residual,
            rows,
            lambda seen, layer=layer: [feed_forward(layer.feed_forward, row) for row in seen],
        )
    return end(model.encoder.end, rows)


def logits(model, features: Tensor, tokens: list[int]) -> Tensor:
    """Return the logits that follow each token of a caption of an image."""
    memory, width = encoded(model, features), model.words.embedding_dim
    rows = [
        math.sqrt(width) * model.words.weight[token] + position(place, width)
        for place, token in enumerate(tokens)
    ]
    for layer in model.decoder:
        look = layer.connection
        rows = sublayer(
            layer.attention_residual,
            rows,
            lambda seen, layer=layer: [
                dot(layer.attention, row, seen[: place + 1], seen[: place + 1])
                for place, row in enumerate(seen)
            ],
        )
        rows = sublayer(
            look.residual,
            rows,
            lambda seen, look=look: [dot(look.attention, row, memory, memory) for row in seen],
        )
        rows = sublayer(
            layer.feed_forward_residual,
            rows,
            lambda seen, layer=layer: [feed_forward(layer.feed_forward, row) for row in seen],
        )
    return torch.stack([linear(model.output, row) for row in end(model.decoder_end, rows)])
