"""ZoDIAC as its equations say it, one number at a time, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Eq. 1; its integral is sqrt(pi) / 2 erf."""
    return x / 2 + x / math.sqrt(math.pi) * (math.sqrt(math.pi) / 2) * torch.erf(x / math.sqrt(2))


def zodiac(module, query, key, value, allowed, real, *, pool, use_gelu=True, mask_sum=None):
    """Return ZMHA; keys have the rows of the queries, and `allowed` is (n, q, k).

    `module` lends its weights and options; `mask_sum` is what the release divides by.
    """
    rows, queries, width = query.shape
    size = width // module.heads
    g = gelu if use_gelu else lambda x: x
    gate = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "identity": lambda x: x}
    entries = {}
    heads = [[[None] * module.heads for _ in range(queries)] for _ in range(rows)]
    for n in range(rows):
        for h in range(module.heads):
            part = slice(h * size, (h + 1) * size)
            q1 = [project(module.query, g(x))[part] for x in query[n]]
            k = [project(module.key, g(x))[part] for x in key[n]]
            v = [project(module.value, g(x))[part] for x in value[n]]
            for i in range(queries):
                heads[n][i][h] = refined(g, q1[i], k, v, allowed[n, i])
            if module.gate == "off":
                continue
            q2 = [project(module.second, g(x))[part] for x in query[n]]
            for i in range(queries):
                for j in range(len(v)):
                    if allowed[n, i, j] and (real[n, i] or pool == "released"):
                        entries[n, h, i, j] = g((g(q2[i]) * g(v[j])).sum() / math.sqrt(size))
    out = []
    for n in range(rows):
        for i in range(queries):
            scaled = []
            for h in range(module.heads):
                intensity = torch.ones((), dtype=query.dtype)
                if module.gate != "off":
                    mean = rap(entries, pool, n, h, i, mask_sum)
                    intensity = module.zoneup + gate[module.gate](mean)
                scaled.append(heads[n][i][h] * intensity)
            out.append(project(module.output, torch.cat(scaled)))
    return torch.stack(out).reshape(query.shape)


def project(linear, x: Tensor) -> Tensor:
    return linear.weight @ x + linear.bias


def refined(g, query, keys, values, allowed) -> Tensor:
    """Eq. 2, 3 for one query of one head."""
    weights = [
        torch.exp(g((g(query) * g(key)).sum() / math.sqrt(len(query)))) if may else 0.0
        for key, may in zip(keys, allowed, strict=True)
    ]
    total = sum(weights)
    if not allowed.any():
        return torch.zeros_like(query)
    return sum(weight / total * g(value) for weight, value in zip(weights, values, strict=True))


def rap(entries, pool, n, h, i, mask_sum) -> Tensor:
    """Eq. 6, 7 over what the pool says."""
    inside = {
        "causal": lambda row, head, query: (row, head) == (n, h) and query <= i,
        "head": lambda row, head, query: (row, head) == (n, h),
        "sample": lambda row, head, query: row == n,
        "batch": lambda row, head, query: True,
        "released": lambda row, head, query: True,
    }[pool]
    chosen = [entry for (*place, _), entry in entries.items() if inside(*place)]
    if not chosen:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(chosen).sum() / (mask_sum if pool == "released" else len(chosen))
