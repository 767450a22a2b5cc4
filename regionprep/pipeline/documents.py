"""Strict readers of JSON, JSON lines and CSV: what is ambiguous is an error with its line.

Files are UTF-8, with or without a byte order mark. JSON with a key twice in one object, with NaN or
Infinity, or nested deeper than Python reads is refused; so is CSV with broken quotes or with rows
of another length than its header.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regionprep.errors import InputError, StorageError

# Python holds about ten times a JSON file's size while reading it. COCO's captions are 144 MB.
MAX_JSON_BYTES = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|-?(?:NaN|Infinity)', re.DOTALL)


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES, allow_nan: bool = False) -> Any:  # noqa: ANN401 - any JSON
    """Return the value in a JSON file; NaN and Infinity only where they are allowed.

    Raises InputError with the line where the file is not strict JSON, and for a file of more than
    `max_bytes`; StorageError when it cannot be read.
    """
    data = _read(path)
    if len(data) > max_bytes:
        raise InputError(
            f"has {len(data)} bytes, more than the {max_bytes} that are read as one JSON",
            where=path,
            mend="Split it, or write it as JSON lines, which are read one by one.",
        )
    return parse_json(_text(data, path), where=path, allow_nan=allow_nan)


def parse_json(text: str, *, where: object, line: int = 1, allow_nan: bool = False) -> Any:  # noqa: ANN401 - any JSON
    """Return the value in `text`, whose first line is line `line` of `where`."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=float if allow_nan else _refuse
        )
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        raise InputError(f"line {at}, column {error.colno}: {error.msg}", where=where) from None
    except _Refused as refused:
        at = line + _line_of_fault(text) - 1
        raise InputError(f"line {at}: {refused}", where=where) from None
    except RecursionError:
        raise InputError("nested more deeply than can be read", where=where) from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"holds a number that cannot be read: {error}", where=where) from None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of every line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, start=1):
                text = _text(data, path, line=number).strip()
                if not text:
                    continue
                row = parse_json(text, where=path, line=number)
                if not isinstance(row, dict):
                    raise InputError(f"line {number}: holds no JSON object", where=path)
                yield number, row
    except OSError as error:
        raise _unreadable(path, error) from error


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and the fields, by column name, of every row of a CSV or TSV file."""
    text = _text(_read(path), path)
    heading = text.partition("\n")[0]
    delimiter = "\t" if "\t" in heading and "," not in heading else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: list[str] = []
    start = 1
    try:
        for row in reader:
            if not columns:
                columns = _columns(row, path)
            elif row:
                if len(row) != len(columns):
                    raise InputError(
                        f"line {start}: {len(row)} fields where the header has {len(columns)}",
                        where=path,
                        mend="Put quotes around fields that contain commas or quotes.",
                    )
                yield start, dict(zip(columns, row, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"line {start}: {error}", where=path, mend='A quote inside quotes is written "".'
        ) from None


def _columns(row: list[str], path: Path) -> list[str]:
    columns = [name.strip().lower() for name in row]
    if len(set(columns)) != len(columns):
        raise InputError(f"line 1: a column is there twice: {', '.join(columns)}", where=path)
    return columns


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot be read: {error.strerror}", where=path, mend="Check the path.")


def _text(data: bytes, path: Path, *, line: int = 1) -> str:
    data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = line + data[: error.start].count(b"\n")
        raise InputError(
            f"line {at}: not UTF-8 ({error.reason})", where=path, mend="Save the file as UTF-8."
        ) from None


class _Refused(Exception):  # noqa: N818 - control flow inside this module
    """Raised inside the JSON decoder, which does not say where it is."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refused(f"the key '{twice}' is there twice in one object")
    return found


def _refuse(constant: str) -> None:
    raise _Refused(f"{constant} is no JSON number")


def _line_of_fault(text: str) -> int:
    """Return the line of the first constant or repeated key, by walking the tokens again."""
    objects: list[set[str] | None] = []
    keys_may_follow = False
    for match in JSON_TOKEN.finditer(text):
        token = match[0]
        if token in "{[":
            objects.append(set() if token == "{" else None)
        elif token in "}]":
            objects.pop()
        elif token[0] in "-NI":
            break
        elif token[0] == '"' and keys_may_follow and objects and (keys := objects[-1]) is not None:
            key = json.loads(token, strict=False)
            if key in keys:
                break
            keys.add(key)
        keys_may_follow = token in "{,"
    return text.count("\n", 0, match.start()) + 1
