"""Where to compute."""

from __future__ import annotations

import pytest
import torch

from regionprep.errors import InputError
from regionprep.pipeline.devices import choose_device


def test_auto_takes_a_gpu_only_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto").type == "cuda"


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match=r"sees 0 GPUs here\n.*--device cpu"):
        choose_device("cuda")


def test_an_unknown_device_is_told():
    with pytest.raises(InputError, match="unknown device 'gpu'"):
        choose_device("gpu")
