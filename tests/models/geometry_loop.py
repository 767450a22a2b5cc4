"""NSA, GSA and their relatives as their equations say them, one number at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-5


def project(linear, x: Tensor) -> Tensor:
    out = linear.weight @ x
    return out if linear.bias is None else out + linear.bias


def heads_of(module, linear, x: Tensor) -> dict[tuple[int, int, int], Tensor]:
    """Return the head of each image, head and region."""
    size = module.width // module.heads
    return {
        (b, h, i): project(linear, x[b, i])[h * size : (h + 1) * size]
        for b in range(x.shape[0])
        for h in range(module.heads)
        for i in range(x.shape[1])
    }


def normalised(heads, real: Tensor, kind: str, norm=None) -> dict[tuple[int, int, int], Tensor]:
    """Return Norm(heads) at what is real; `norm` lends gamma and beta."""
    together = {
        "instance": lambda b, h, i, c: (b, h, c),
        "layer": lambda b, h, i, c: (b, h, i),
        "batch": lambda b, h, i, c: (h, c),
    }[kind]
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for (b, h, i), head in heads.items():
        for c in range(len(head)):
            if real[b, i]:
                groups.setdefault(together(b, h, i, c), []).append(head[c])
    out = {}
    for (b, h, i), head in heads.items():
        if not real[b, i]:
            continue
        numbers = []
        for c in range(len(head)):
            group = groups[together(b, h, i, c)]
            mean = sum(group) / len(group)
            variance = sum((x - mean) ** 2 for x in group) / len(group)
            number = (head[c] - mean) / torch.sqrt(variance + EPSILON)
            if norm is not None and norm.scale is not None:
                channel = h * len(head) + c
                number = number * norm.scale[channel] + norm.shift[channel]
            numbers.append(number)
        out[b, h, i] = torch.stack(numbers)
    return out


def attention(module, x: Tensor, real: Tensor, *, queries=None, keys=None, bias=None) -> Tensor:
    """Return what real regions take from each other; what is not given is plain projections."""
    queries = heads_of(module, module.query, x) if queries is None else queries
    keys = heads_of(module, module.key, x) if keys is None else keys
    values = heads_of(module, module.value, x)
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            if not real[b, i]:
                continue
            heads = []
            for h in range(module.heads):
                root = math.sqrt(len(values[b, h, i]))
                weights = {}
                for j in range(x.shape[1]):
                    if real[b, j]:
                        score = (queries[b, h, i] * keys[b, h, j]).sum() / root
                        weights[j] = torch.exp(score + (bias(b, h, i, j) if bias else 0))
                total = sum(weights.values())
                heads.append(sum(w / total * values[b, h, j] for j, w in weights.items()))
            out[b, i] = project(module.output, torch.cat(heads))
    return out


def relation(boxes, i: int, j: int, *, signed=False, margin=0.0) -> list[float]:
    """Eq. 8 for two boxes of one image, with the floor of the notes."""
    features = []
    for axis in (0, 1):
        size = float(boxes[i, axis + 2] - boxes[i, axis]) + margin
        here = float(boxes[i, axis + 2] + boxes[i, axis]) / 2
        there = float(boxes[j, axis + 2] + boxes[j, axis]) / 2
        ratio = (there - here) / size
        if signed:
            features.append(math.copysign(math.log(1 + abs(ratio)), ratio))
        else:
            features.append(math.log(max(abs(ratio), 1e-3)))
    for axis in (0, 1):
        first, second = (float(boxes[k, axis + 2] - boxes[k, axis]) + margin for k in (i, j))
        features.append(math.log(first / second))
    return features


def geometric_bias(module, x: Tensor, boxes: Tensor, kinds: list[str], *, signed=False):
    """Return the function (b, h, i, j) -> phi / sqrt(d_g) of eq. 9-13."""
    size = module.width // module.heads

    def bias(b: int, h: int, i: int, j: int) -> Tensor:
        features = torch.tensor(relation(boxes[b], i, j, signed=signed), dtype=x.dtype)
        geometry = project(module.relations, features)
        geometry = torch.where(geometry > 0, geometry, torch.zeros_like(geometry))
        part = slice(h * size, (h + 1) * size)
        total = torch.zeros((), dtype=x.dtype)
        if "content_independent" in kinds:
            score = (module.weight.weight[h] * geometry).sum()
            total = total + (score if score > 0 else 0 * score)
        if "query_dependent" in kinds:
            total = total + (project(module.geometric_query, x[b, i])[part] * geometry).sum()
        if "key_dependent" in kinds:
            total = total + (project(module.geometric_key, x[b, j])[part] * geometry).sum()
        return total / math.sqrt(size)

    return bias


def relation_bias(module, boxes: Tensor):
    """Return the function (b, h, i, j) -> log of the geometric weight of 1906.05963."""

    def bias(b: int, h: int, i: int, j: int) -> Tensor:
        features = relation(boxes[b], i, j, margin=1.0)
        angles = [100 * x / 1000 ** (wave / 8) for x in features for wave in range(8)]
        embedded = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        weight = module.geometry.bias[h]
        for number, factor in zip(embedded, module.geometry.weight[h], strict=True):
            weight = weight + number * factor
        return torch.log(weight if weight > 1e-6 else torch.tensor(1e-6, dtype=weight.dtype))

    return bias


def absolute(box, size, width: int) -> list[float]:
    """The sinusoids of one box: by wave length, sines before cosines, x y w h."""
    x1, y1, x2, y2 = (float(number) for number in box)
    wide, high = (float(number) for number in size)
    places = [(x1 + x2) / 2 / wide, (y1 + y2) / 2 / high, (x2 - x1) / wide, (y2 - y1) / high]
    each = -(-width // 8) * 2
    numbers = []
    for pair in range(each // 2):
        for function in (math.sin, math.cos):
            numbers += [function(place / 10000 ** (2 * pair / each)) for place in places]
    return numbers[:width]
