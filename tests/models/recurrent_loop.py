"""The recurrent captioners as their equations say them, one caption and one region at a time.

`model` lends its weights. `regions` are the real regions of one image, a list of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Reading:
    """What a loop gives of a caption: logits (t, v), and α_t over all steps."""

    logits: Tensor
    weights: list[list[Tensor]]


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def tanh(x: Tensor) -> Tensor:
    return 2 * sigmoid(2 * x) - 1


def linear(layer, x: Tensor) -> Tensor:
    out = layer.weight @ x
    return out if layer.bias is None else out + layer.bias


def mean(regions: list[Tensor], width: int) -> Tensor:
    total = torch.zeros(width, dtype=torch.float64)
    for region in regions:
        total = total + region
    return total / max(len(regions), 1)


def cell(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    size = len(memory)
    i, f = sigmoid(gates[:size]), sigmoid(gates[size : 2 * size])
    o, g = sigmoid(gates[2 * size : 3 * size]), tanh(gates[3 * size :])
    memory = f * memory + i * g
    return o * tanh(memory), memory


def attend(attention, regions: list[Tensor], hidden: Tensor) -> list[Tensor]:
    """Return the weights of the regions: the softmax of w^T tanh(W_a a + W_h h + b)."""
    energies = [
        (
            attention.score.weight[0]
            * tanh(linear(attention.key, region) + attention.query.weight @ hidden)
        ).sum()
        for region in regions
    ]
    total = sum(torch.exp(energy) for energy in energies)
    return [torch.exp(energy) / total for energy in energies]


def weighted(weights: list, regions: list[Tensor], width: int) -> Tensor:
    total = torch.zeros(width, dtype=torch.float64)
    for weight, region in zip(weights, regions, strict=True):
        total = total + weight * region
    return total


def initial(network, x: Tensor) -> Tensor:
    first, _, second, _ = network
    return tanh(linear(second, linear(first, x).clamp(min=0)))


def show_attend_tell(model, regions, tokens, places: list[int] | None = None) -> Reading:
    """Read a caption; `places` are the locations s_t, without them ẑ is the expected one."""
    width = model.feature_width
    n = model.from_state.weight.shape[0] // 4
    centre = mean(regions, width)
    h, c = initial(model.initial_hidden, centre), initial(model.initial_cell, centre)
    logits, looks = [], []
    for t, token in enumerate(tokens):
        alpha = attend(model.attention, regions, h)
        z = weighted(alpha, regions, width) if places is None else regions[places[t]]
        if model.selector is not None:
            z = sigmoid(linear(model.selector, h)[0]) * z
        word = model.words.weight[token]
        u, zed = model.from_state.weight[:, :n], model.from_state.weight[:, n:]
        h, c = cell(linear(model.from_words, word) + u @ h + zed @ z, c)
        l_h, l_z = model.deep.weight[:, :n], model.deep.weight[:, n:]
        logits.append(linear(model.output, tanh(word + l_h @ h + l_z @ z + model.deep.bias)))
        looks.append(alpha)
    return Reading(torch.stack(logits), looks)


def show_and_tell(model, regions, tokens) -> Reading:
    n = model.from_state.weight.shape[1]
    h = c = torch.zeros(n, dtype=torch.float64)
    logits = []
    inputs = [linear(model.image, mean(regions, model.feature_width))]
    inputs += [model.words.weight[token] for token in tokens]
    for x in inputs:
        h, c = cell(linear(model.from_words, x) + model.from_state.weight @ h, c)
        logits.append(linear(model.output, h))
    return Reading(torch.stack(logits[1:]), [])


def up_down(model, regions, tokens) -> Reading:
    width, n = model.feature_width, model.write.weight.shape[0] // 4
    h1 = c1 = h2 = c2 = torch.zeros(n, dtype=torch.float64)
    centre = mean(regions, width)
    logits, looks = [], []
    for token in tokens:
        gates = linear(model.look_words, model.words.weight[token])
        gates = gates + model.look_image.weight @ centre
        gates = gates + model.look_state.weight[:, :n] @ h2 + model.look_state.weight[:, n:] @ h1
        h1, c1 = cell(gates, c1)
        alpha = attend(model.attention, regions, h1)
        v = weighted(alpha, regions, width)
        parts = model.write.weight.split([width, n, n], 1)
        gates = parts[0] @ v + parts[1] @ h1 + parts[2] @ h2 + model.write.bias
        h2, c2 = cell(gates, c2)
        logits.append(linear(model.output, h2))
        looks.append(alpha)
    return Reading(torch.stack(logits), looks)


def log_p(reading: Reading, targets: list[int]) -> Tensor:
    """Return log p(y | ...) of the words of a caption."""
    total = torch.zeros((), dtype=torch.float64)
    for row, target in zip(reading.logits, targets, strict=False):
        total = total + row[target] - torch.log(torch.exp(row).sum())
    return total


def penalty(weights: list[list[Tensor]], steps: int) -> Tensor:
    """Return the sum of eq. 3.9 over the first steps."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(weights[0])):
        received = sum(weights[t][i] for t in range(steps))
        total = total + (1 - received) ** 2
    return total


def entropy(weights: list[list[Tensor]], steps: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for t in range(steps):
        for weight in weights[t]:
            total = total - weight * torch.log(weight)
    return total
