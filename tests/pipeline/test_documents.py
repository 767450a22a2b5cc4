"""Strict JSON, JSON lines and CSV: what is ambiguous is an error with its line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regionprep.errors import InputError, StorageError
from regionprep.pipeline.documents import parse_json, read_csv, read_json, read_json_lines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


def refused(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_json(text, where="file.json")
    assert str(caught.value).startswith("file.json: ")
    return caught.value.what


def test_a_byte_order_mark_is_accepted(file: Path):
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(file) == {"a": 1}
    assert list(read_json_lines(file)) == [(1, {"a": 1})]
    file.write_bytes(b"\xef\xbb\xbfpath,caption\na.jpg,words\n")
    assert list(read_csv(file)) == [(2, {"path": "a.jpg", "caption": "words"})]


def test_a_repeated_key_is_named_with_its_line():
    text = '{"a": {"b": 1},\n "c": [{"b": 2}],\n\n "d": {"e": "x{y\\"", "e": 2}}'
    assert refused(text) == "line 4: the key 'e' is there twice in one object"


def test_a_key_repeated_by_an_escape_is_found():
    assert refused('{"a": 1,\n"\\u0061": 2}') == "line 2: the key 'a' is there twice in one object"


def test_one_key_in_many_objects_is_no_repetition():
    text = '{"a": {"a": {"a": ["a", "a"]}}, "b": [{"a": "b"}, {"a": "b"}]}'
    assert parse_json(text, where="x") == json.loads(text)


def test_nan_is_read_where_it_is_allowed(tmp_path):
    path = tmp_path / "boxes.json"
    path.write_text("[1.5, NaN]")
    one, other = read_json(path, allow_nan=True)
    assert one == 1.5
    assert other != other


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_named_with_their_line(constant: str):
    text = f'{{"note": "NaN is text here",\n"score": {constant}}}'
    assert refused(text) == f"line 2: {constant} is no JSON number"


def test_broken_json_is_named_with_line_and_column():
    assert refused('{"a": 1,\n "b": }').startswith("line 2, column 7: Expecting value")


def test_nesting_without_end_is_an_error_and_no_crash():
    assert "nested" in refused("[" * 200_000 + "]" * 200_000)


def test_a_number_of_thousands_of_digits_is_an_error():
    assert "number" in refused("1" * 5_000)


def test_bytes_that_are_no_utf8_are_named_with_their_line(file: Path):
    file.write_bytes(b'{"a":\n "\xe9"}')
    with pytest.raises(InputError, match="line 2: not UTF-8"):
        read_json(file)
    file.write_bytes(b'{"a": 1}\n{"a": "\xe9"}')
    with pytest.raises(InputError, match="line 2: not UTF-8"):
        list(read_json_lines(file))
    file.write_bytes(b"path,caption\nx,y\nx,\xff\n")
    with pytest.raises(InputError, match="line 3: not UTF-8"):
        list(read_csv(file))


def test_json_of_more_than_the_limit_is_refused_with_advice(file: Path):
    file.write_text("[1, 2, 3]")
    with pytest.raises(InputError, match=r"has 9 bytes, more than the 8 .*\n.*JSON lines"):
        read_json(file, max_bytes=8)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    for reader in (read_json, read_json_lines, read_csv):
        with pytest.raises(StorageError, match=str(tmp_path)):
            list(reader(tmp_path))


def test_json_lines_pass_over_blank_lines_and_count_them(file: Path):
    file.write_text('{"a": 1}\r\n\n  \n{"a": 2}')
    assert list(read_json_lines(file)) == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[1]", "line 2: holds no JSON object"),
        ('{"a": 1, "a": 2}', "line 2: the key 'a' is there twice"),
        ('{"a": NaN}', "line 2: NaN is no JSON number"),
        ('{"a": 1', "line 2, column 8: Expecting ',' delimiter"),
        ('{"a": 1} {"a": 2}', "line 2, column 10: Extra data"),
    ],
)
def test_a_bad_line_of_json_is_named(file: Path, line: str, reason: str):
    file.write_text('{"a": 0}\n' + line + "\n")
    with pytest.raises(InputError) as caught:
        list(read_json_lines(file))
    assert caught.value.what.startswith(reason)


def test_csv_reads_quotes_line_breaks_and_tabs(file: Path):
    file.write_text('Path , CAPTION\na.jpg,"one, ""two""\nthree"\n\nb.jpg,four\n')
    assert list(read_csv(file)) == [
        (2, {"path": "a.jpg", "caption": 'one, "two"\nthree'}),
        (5, {"path": "b.jpg", "caption": "four"}),
    ]
    file.write_text("path\tcaption\na.jpg\tone, two\n")
    assert list(read_csv(file)) == [(2, {"path": "a.jpg", "caption": "one, two"})]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("path,caption\na.jpg,one, two\n", "line 2: 3 fields where the header has 2"),
        ("path,caption\na.jpg,x\nb.jpg\n", "line 3: 1 fields where the header has 2"),
        ('path,caption\na.jpg,x\nb.jpg,"never closed\nc.jpg,y\n', "line 3: unexpected end of data"),
        ('path,caption\na.jpg,"one" two\n', "line 2: ',' expected after '\"'"),
        ("path,caption,path\na,b,c\n", "line 1: a column is there twice"),
    ],
)
def test_bad_csv_is_named_with_its_line(file: Path, text: str, reason: str):
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        list(read_csv(file))
    assert caught.value.what.startswith(reason)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(st.lists(st.tuples(NAMES, NAMES), min_size=1))
def test_csv_written_by_the_standard_library_comes_back(tmp_path_factory, rows):
    sink = io.StringIO(newline="")
    writer = csv.writer(sink, quoting=csv.QUOTE_ALL)
    writer.writerows([("path", "caption"), *rows])
    path = tmp_path_factory.mktemp("csv") / "file.csv"
    path.write_bytes(sink.getvalue().encode())
    assert [tuple(row.values()) for _, row in read_csv(path)] == rows


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_strict_reading_agrees_with_the_standard_library(value):
    assert parse_json(json.dumps(value), where="x") == value


@given(JSON, st.text(), st.integers(0, 5))
def test_a_repetition_is_found_at_any_depth(value, key: str, depth: int):
    name = json.dumps(key)
    text = f"{{{name}: {json.dumps(value, indent=1)},\n{name}: 0}}"
    line = 1 + text.count("\n")
    text = "[" * depth + text + "]" * depth
    assert refused(text).startswith(f"line {line}: the key")
