"""The synthesizers (arXiv 2201.01410) and Linformer as their equations say it, in float64.

Every entry is a sum of its own over indices; feature maps are (H, W, C), matrices (rows, columns).
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def mode_product(x: Tensor, matrix: Tensor, mode: int) -> Tensor:
    """Eq. 7, entry by entry; modes count from 1, as printed."""
    n = mode - 1
    shape = [*x.shape]
    shape[n] = len(matrix)
    entries = [
        sum(x[(*at[:n], i, *at[n + 1 :])] * matrix[at[n], i] for i in range(x.shape[n]))
        for at in itertools.product(*map(range, shape))
    ]
    return torch.stack(entries).reshape(shape)


def kronecker(factors) -> Tensor:
    """Eq. 10, entry by entry, for any number of matrices."""
    first, *others = factors
    if not others:
        return first
    second = kronecker(others)
    (high, wide), (a, b) = first.shape, second.shape
    entries = [
        first[i // a, j // b] * second[i % a, j % b]
        for i in range(high * a)
        for j in range(wide * b)
    ]
    return torch.stack(entries).reshape(high * a, wide * b)


def feature_map(cells: Tensor, grid) -> Tensor:
    """Return X, of which cell (y, x) is token y W + x."""
    high, wide = grid
    return torch.stack(
        [torch.stack([cells[y * wide + x] for x in range(wide)]) for y in range(high)]
    )


def tensor_map(cells: Tensor, grid, matrices) -> Tensor:
    """Eq. 11: Z of one image, in the printed order of modes."""
    z = feature_map(cells, grid)
    for mode, matrix in enumerate(matrices, start=1):
        z = mode_product(z, matrix, mode)
    return z.reshape(len(cells), len(cells))


def matrix_map(cells: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """Return B of arXiv 2005.00743: row i of cell i alone."""
    rows = []
    for cell in cells:
        hidden = [sum(inner[i, c] * cell[c] for c in range(len(cell))) for i in range(len(inner))]
        hidden = [value if value > 0 else 0 * value for value in hidden]
        rows.append(
            torch.stack([sum(row[i] * hidden[i] for i in range(len(hidden))) for row in outer])
        )
    return torch.stack(rows)


def softmax(z: Tensor) -> Tensor:
    """Eq. 12: over the keys of each query."""
    rows = []
    for row in z:
        powers = [math.e**entry for entry in row]
        rows.append(torch.stack([power / sum(powers) for power in powers]))
    return torch.stack(rows)


def attend(module, cells: Tensor, weights: Tensor) -> Tensor:
    """Eq. 13, with the projections of `module`, for one image."""
    values = [project(module.value, cell) for cell in cells]
    rows = [sum(row[j] * values[j] for j in range(len(values))) for row in weights]
    return torch.stack([project(module.output, row) for row in rows])


def linformer(module, cells: Tensor) -> Tensor:
    """Eq. 7 of arXiv 2006.04768 for one image."""
    size = cells.shape[1] // module.heads
    rows = []
    for cell in cells:
        heads = []
        for h in range(module.heads):
            part = slice(h * size, (h + 1) * size)
            query = project(module.query, cell)[part]
            keys = mixed(module.shorten_keys, [project(module.key, one)[part] for one in cells])
            values = mixed(
                module.shorten_values, [project(module.value, one)[part] for one in cells]
            )
            powers = [math.e ** ((query * key).sum() / math.sqrt(size)) for key in keys]
            heads.append(
                sum(p / sum(powers) * value for p, value in zip(powers, values, strict=True))
            )
        rows.append(project(module.output, torch.cat(heads)))
    return torch.stack(rows)


def mixed(matrix: Tensor, rows) -> list[Tensor]:
    return [sum(weight * row for weight, row in zip(line, rows, strict=True)) for line in matrix]


def project(linear, x: Tensor) -> Tensor:
    return linear.weight @ x + linear.bias
