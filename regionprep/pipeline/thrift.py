"""Thrift's compact protocol, as far as Parquet's page headers and footers use it.

Source: Apache Thrift, "Thrift compact protocol encoding".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_TRUE, _FALSE, _I16, _I32, _I64, _BINARY, _LIST, _STRUCT = 1, 2, 4, 5, 6, 8, 9, 12

# A value as it is written: its type, and its bytes.
Value = tuple[int, bytes]


def i16(number: int) -> Value:
    """Return a 16-bit integer."""
    return _I16, varint(_zigzag(number))


def i32(number: int) -> Value:
    """Return a 32-bit integer."""
    return _I32, varint(_zigzag(number))


def i64(number: int) -> Value:
    """Return a 64-bit integer."""
    return _I64, varint(_zigzag(number))


def binary(content: str | bytes) -> Value:
    """Return a string of characters or bytes."""
    content = content.encode() if isinstance(content, str) else content
    return _BINARY, varint(len(content)) + content


def array(values: Iterable[Value]) -> Value:
    """Return a list of values of one type; an empty one is of structs."""
    values = list(values)
    kind = values[0][0] if values else _STRUCT
    short = len(values) < 15
    head = bytes([len(values) << 4 | kind]) if short else bytes([0xF0 | kind]) + varint(len(values))
    return _LIST, head + b"".join(content for _, content in values)


def struct(fields: Mapping[int, Value | None]) -> Value:
    """Return a struct of fields by number, in rising order, each at most 15 after the last."""
    content, last = b"", 0
    for number, value in fields.items():
        if value is not None:
            content += bytes([(number - last) << 4 | value[0]]) + value[1]
            last = number
    return _STRUCT, content + b"\0"


def varint(number: int) -> bytes:
    """Return a number that is not negative in groups of seven bits, the lowest first."""
    groups = bytearray()
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def _zigzag(number: int) -> int:
    return number << 1 if number >= 0 else ~(number << 1)


class Reader:
    """Reads structs of numbers, strings and structs.

    Raises IndexError where the data end too early, ValueError for what no page header holds.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the next struct's fields by number."""
        if depth > 4:
            raise ValueError("nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            delta, kind = head >> 4, head & 15
            number = number + delta if delta else self._integer()
            fields[number] = self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:  # noqa: ANN401 - a value of any type
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in (_I16, _I32, _I64):
            return self._integer()
        if kind == _BINARY:
            length = self._varint()
            self.place += length
            return self.data[self.place - length : self.place]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"type {kind} in a page header")

    def _byte(self) -> int:
        self.place += 1
        return self.data[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("an integer of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
