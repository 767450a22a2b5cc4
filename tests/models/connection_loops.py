"""M2's and AoA's equations as they are written, one query at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def linear(layer, x: Tensor) -> Tensor:
    return layer.weight @ x + layer.bias


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def joined_heads(module, query: Tensor, keys, values, slots=()) -> Tensor:
    """Return the heads of one query over keys and values, and over (key, value) slots."""
    size = module.width // module.heads
    heads = []
    for h in range(module.heads):
        part = slice(h * size, (h + 1) * size)
        q = linear(module.query, query)[part]
        pairs = [
            (linear(module.key, key)[part], linear(module.value, value)[part])
            for key, value in zip(keys, values, strict=True)
        ]
        if pairs:
            pairs += [(key[part], value[part]) for key, value in slots]
        weights = [torch.exp((q * key).sum() / math.sqrt(size)) for key, _ in pairs]
        total = sum(weights)
        heads.append(
            sum(
                (weight / total * value for weight, (_, value) in zip(weights, pairs, strict=True)),
                torch.zeros_like(q),
            )
        )
    return torch.cat(heads)


def dot(module, query: Tensor, keys, values) -> Tensor:
    """Return multi-head scaled dot-product attention of one query."""
    return linear(module.output, joined_heads(module, query, keys, values))


def memory_augmented(module, query: Tensor, keys, values) -> Tensor:
    """Return M_mem of one region, who sees `keys`."""
    size = module.width // module.heads
    count = module.slot_keys.shape[1]
    slots = [
        (math.sqrt(size) * module.slot_keys[0, s], math.sqrt(count) * module.slot_values[0, s])
        for s in range(count)
    ]
    return linear(module.output, joined_heads(module, query, keys, values, slots))


def attention_on_attention(module, query: Tensor, attended: Tensor) -> Tensor:
    """Return g * i, number by number; the query's part of the weights comes first."""
    width, out = len(query), []
    for j in range(width):
        numbers = []
        for layer in (module.information, module.gate):
            number = layer.bias[j]
            for k in range(width):
                number = number + layer.weight[j, k] * query[k]
                number = number + layer.weight[j, width + k] * attended[k]
            numbers.append(number)
        out.append(numbers[0] * sigmoid(numbers[1]))
    return torch.stack(out)


def meshed(module, query: Tensor, layers) -> Tensor:
    """Return M_mesh of one word; `layers` are the regions it sees in each encoder layer."""
    out = []
    found = [dot(module.attention, query, regions, regions) for regions in layers]
    for j in range(len(query)):
        total = torch.zeros_like(query[0])
        for c, gate in zip(found, module.gates, strict=True):
            alpha = sigmoid((gate.weight[j] * torch.cat([query, c])).sum() + gate.bias[j])
            total = total + alpha * c[j]
        out.append(total / math.sqrt(len(layers)))
    return torch.stack(out)


def layer_norm(norm, x: Tensor) -> Tensor:
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / torch.sqrt(variance + norm.eps) * norm.weight + norm.bias


def add_and_norm(residual, x: Tensor, branch) -> Tensor:
    """Return x with what a branch makes of it, normalised before or after."""
    if residual.norm_first:
        return x + branch(layer_norm(residual.norm, x))
    return layer_norm(residual.norm, x + branch(x))
