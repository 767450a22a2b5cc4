"""File names as text: a table's strings are UTF-8, a file system's names need not be."""

from __future__ import annotations

import os
from urllib.parse import quote_from_bytes, unquote_to_bytes

ENCODED = "bytes:"


def encode_path(path: str) -> str:
    """Return `path` as a table stores it: itself, or `bytes:` and percent escapes.

    Only a name that is no UTF-8, or that begins like an escaped one, is escaped.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        return ENCODED + quote_from_bytes(os.fsencode(path))
    return ENCODED + quote_from_bytes(path.encode()) if path.startswith(ENCODED) else path


def decode_path(path: str) -> str:
    """Return the file system's name for a table's `path`."""
    if not path.startswith(ENCODED):
        return path
    return os.fsdecode(unquote_to_bytes(path.removeprefix(ENCODED)))
