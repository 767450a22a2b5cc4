"""Random inputs in double precision, and the comparison of a module with a slow loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same(
    module: nn.Module,
    inputs: Iterable[Tensor],
    fast: Tensor,
    slow: Tensor,
    *,
    real: Tensor | None = None,
) -> None:
    """Fail unless two ways to compute agree, and so do their gradients; only where it is `real`."""
    where = torch.ones(fast.shape[:-1], dtype=torch.bool) if real is None else real
    torch.testing.assert_close(fast[where], slow[where])
    direction = torch.randn_like(fast) * where[..., None]
    wanted = [*inputs, *module.parameters()]
    for got, expected in zip(
        torch.autograd.grad((fast * direction).sum(), wanted, materialize_grads=True),
        torch.autograd.grad((slow * direction).sum(), wanted, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)
