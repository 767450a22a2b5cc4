"""Where to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from regionprep.errors import InputError


def choose_device(name: str) -> torch.device:
    """Return the device called `name`: cpu, cuda, cuda:1, or auto for a GPU where there is one.

    Raises InputError when torch sees no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device '{name}'", mend="Use auto, cpu or cuda.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here",
            mend="Use --device cpu, or install the torch that fits this machine's driver.",
        )
    return device


@contextmanager
def plain_float32() -> Iterator[None]:
    """Compute in float32 alone meanwhile: no autocast, no TF32."""
    before = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, before)
        torch.set_float32_matmul_precision("highest")
        stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
