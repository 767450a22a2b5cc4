"""Whatever bit of an array's file is flipped, and wherever it ends, only its record is lost."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from regionprep.pipeline.exchange import arrays
from regionprep.pipeline.images import ImageFault


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(12, dtype=np.float32).reshape(3, 4))
    return file.getvalue()


def npz(compression: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("feat.npy", npy())
    return file.getvalue()


def hurt(data: bytes):
    """Yield the data cut at each byte, then with each bit flipped."""
    yield from (data[:end] for end in range(len(data)))
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        yield bytes(flipped)


def faults(read, data: bytes) -> list[str]:
    """Return what is said of those that cannot be read; nothing but a fault may come out."""
    said = []
    for damaged in hurt(data):
        try:
            read(damaged)
        except ImageFault as fault:
            said.append(fault.error)
    return said


@pytest.mark.parametrize("method", ["STORED", "DEFLATED", "BZIP2", "LZMA"])
def test_a_damaged_npz_is_a_fault_of_its_record(method):
    said = faults(lambda data: arrays._npz("", data), npz(getattr(zipfile, f"ZIP_{method}")))
    assert any("encrypted" in text for text in said)
    assert any("CRC" in text or "Invalid" in text for text in said)


@pytest.mark.filterwarnings("ignore:Reading")
def test_a_damaged_npy_is_a_fault_of_its_record():
    said = faults(arrays._npy, npy())
    assert any("multi-line" in text for text in said), "numpy's parser raises a TokenError"
