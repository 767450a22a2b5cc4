"""Read captions as people keep them; every format becomes the same entries, one an image.

| kind | what it is | image_id | splits |
| --- | --- | --- | --- |
| karpathy | Karpathy's `dataset_*.json` | `cocoid`, else the file name's stem | as given |
| coco | COCO caption annotations | `id` | from the file's name: `captions_train2014.json` |
| table | JSON lines or CSV, below | `image_id`, else the path without extension | `split` |

A table has a column `path` (or `image`, or `file_name`), a column `caption` (or `text`) and, where
wanted, `split` and `image_id`; an image with several captions has several rows, or, in JSON lines,
a list of captions. Other columns are passed over.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, TypeAdapter, ValidationError

from regionprep.errors import InputError, unknown
from regionprep.pipeline.documents import parse_json, read_csv, read_json, read_json_lines
from regionprep.pipeline.names import encode_path

Kind = Literal["karpathy", "coco", "table"]

PATH_COLUMNS = ("path", "image", "file_name")
TEXT_COLUMNS = ("caption", "text")
SPLITS = {
    **{name: name for name in ("train", "restval", "val", "test")},
    **dict.fromkeys(("valid", "validation", "dev"), "val"),
}
KNOWN = "Known: Karpathy's dataset_*.json, COCO caption annotations, JSON lines, CSV."
HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Caption:
    """A caption as its file has it; `tokens` only where the file gives them."""

    caption_id: str
    text: str
    tokens: Sequence[str] | None = None


@dataclass(slots=True)
class Entry:
    """An image as a caption file describes it.

    `folder` is where the file hints that `path` lies; `split` is "" where the file gives none;
    `size` is the width and height that the file states.
    """

    image_id: str
    path: str
    where: str
    folder: str = ""
    split: str = ""
    size: tuple[int, int] | None = None
    captions: list[Caption] = field(default_factory=list)


def detect(path: Path) -> Kind:
    """Return the kind of a caption file, from its content.

    Raises InputError for what is of no such kind: other text, no text, or boxes.
    """
    try:
        with path.open("rb") as file:
            start = file.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=path) from error
    # No text has zero bytes; what is no UTF-8 all the same is refused with its line.
    if b"\0" in start:
        raise InputError("is no text", where=path, mend=KNOWN)
    head = start.decode("utf-8-sig", errors="replace").lstrip()
    if not head:
        raise InputError("is empty", where=path, mend=KNOWN)
    if not head.startswith("{"):
        _check_heading(head, path)
        return "table"
    with contextlib.suppress(InputError):
        row = parse_json(head.partition("\n")[0], where=path)
        if any(name in row for name in PATH_COLUMNS):
            return "table"
    return _json_kind(head, path)


def _json_kind(head: str, path: Path) -> Kind:
    """Tell Karpathy's JSON from COCO's by its keys: from the head alone if they are there."""
    if '"sentences"' in head:
        return "karpathy"
    data = read_json(path)
    if '"file_name"' in head or "annotations" in data:
        _check_captioned(data, path)
        return "coco"
    if "images" in data:
        return "karpathy"
    raise InputError(
        f"is JSON of no known kind, with keys {', '.join(data)}", where=path, mend=KNOWN
    )


def _check_captioned(data: Any, path: Path) -> None:  # noqa: ANN401 - any JSON
    """Refuse annotations of boxes, which look like those of captions but for the captions."""
    annotations = data.get("annotations")
    first = annotations[0] if isinstance(annotations, list) and annotations else None
    if not isinstance(first, dict) or "caption" in first:
        return
    if "bbox" in first:
        raise InputError(
            "these are boxes, not captions",
            where=path,
            mend=f"Use them with `prep detect --detector boxes --boxes {path}`.",
        )
    raise InputError("annotations[0] has no 'caption'", where=path, mend=KNOWN)


def _check_heading(head: str, path: Path) -> None:
    heading = head.splitlines()[0][:200]
    columns = [name.strip(' "').lower() for name in re.split(r"[,\t]", heading)]
    semicolons = len(columns) == 1 and ";" in heading
    for wanted in (PATH_COLUMNS, TEXT_COLUMNS):
        if not set(wanted) & set(columns):
            raise InputError(
                f"has no column {' or '.join(wanted)} in its first line: {columns}",
                where=path,
                mend="Separate columns by commas or tabs, not semicolons." if semicolons else KNOWN,
            )


def read(kind: Kind, paths: Iterable[Path]) -> list[Entry]:
    """Return the images and captions of files of one kind, in the files' order.

    Raises InputError for whatever the format does not allow, and for an image that is there twice.
    """
    entries: dict[str, Entry] = {}
    for path in paths:
        for entry in READERS[kind](path):
            other = entries.setdefault(entry.image_id, entry)
            if other is not entry:
                raise InputError(
                    f"the image '{entry.image_id}' is there twice: "
                    f"'{other.path}' ({other.where}) and '{entry.path}' ({entry.where})",
                    mend="Give every image an id of its own.",
                )
    return list(entries.values())


class _KarpathySentence(BaseModel):
    tokens: list[str] | None = None
    raw: str = ""
    sentid: int | str | None = None


class _KarpathyImage(BaseModel):
    filename: str
    sentences: list[_KarpathySentence]
    filepath: str = ""
    split: str = ""
    cocoid: int | str | None = None


def _read_karpathy(path: Path) -> Iterator[Entry]:
    images = _validated(list[_KarpathyImage], read_json(path), "images", path)
    for number, image in enumerate(images):
        where = f"{path}: images[{number}]"
        _check_path(image.filename, where)
        name = PurePosixPath(image.filename).stem
        image_id = encode_path(name) if image.cocoid is None else str(image.cocoid)
        yield Entry(
            image_id=_storable(image_id, where),
            path=image.filename,
            where=where,
            folder=image.filepath,
            split=_split(image.split, where),
            captions=[
                Caption(
                    f"{image_id}#{place}" if sentence.sentid is None else str(sentence.sentid),
                    _clean(sentence.raw or " ".join(sentence.tokens or ())),
                    _clean_tokens(sentence.tokens),
                )
                for place, sentence in enumerate(image.sentences)
            ],
        )


class _CocoImage(BaseModel):
    id: int | str
    file_name: str
    width: int | None = None
    height: int | None = None
    coco_url: str = ""


class _CocoAnnotation(BaseModel):
    id: int | str
    image_id: int | str
    caption: str


def _read_coco(path: Path) -> Iterator[Entry]:
    data = read_json(path)
    images = _validated(list[_CocoImage], data, "images", path)
    _check_unique(images, path)
    _validated(list[_CocoAnnotation], data, "annotations", path)
    index = _coco_index(data)
    listed = {image.id for image in images}
    if strangers := [image_id for image_id in index.imgToAnns if image_id not in listed]:
        raise InputError(
            f"captions {len(strangers)} images that it does not list, such as id {strangers[0]}",
            where=path,
            mend="Add them to 'images', or remove their annotations.",
        )
    split = _split_of_name(path)
    for image in images:
        where = f"{path}: image {image.id}"
        _check_path(image.file_name, where)
        yield Entry(
            image_id=_storable(str(image.id), where),
            path=image.file_name,
            where=where,
            folder=PurePosixPath(urlsplit(image.coco_url).path).parent.name,
            split=split,
            size=(image.width, image.height) if image.width and image.height else None,
            captions=[
                Caption(str(annotation["id"]), _clean(annotation["caption"]))
                for annotation in index.imgToAnns.get(image.id, [])
            ],
        )


def _check_unique(images: list[_CocoImage], path: Path) -> None:
    """Refuse an id that stands twice: pycocotools would keep the last in silence."""
    names: dict[int | str, str] = {}
    for image in images:
        other = names.setdefault(image.id, image.file_name)
        if other is not image.file_name:
            raise InputError(
                f"the image id {image.id} is there twice: '{other}' and '{image.file_name}'",
                where=path,
                mend="Give every image an id of its own.",
            )


def _coco_index(data: Any) -> Any:  # noqa: ANN401 - pycocotools has no types
    from pycocotools.coco import COCO

    coco = COCO()
    coco.dataset = data
    with contextlib.redirect_stdout(io.StringIO()):  # it prints "creating index..."
        coco.createIndex()
    return coco


def _split_of_name(path: Path) -> str:
    found = re.search(r"(?<![a-z])(train|val|test)(?![a-z])", path.stem.lower())
    return found[1] if found else ""


def _read_table(path: Path) -> Iterator[Entry]:
    entries: dict[str, Entry] = {}
    for line, row in _rows(path):
        where = f"{path}: line {line}"
        entry = _row_entry(row, where)
        known = entries.setdefault(entry.image_id, entry)
        _check_same_image(known, entry)
        for text in _texts(row, where):
            number = len(known.captions)
            known.captions.append(Caption(f"{entry.image_id}#{number}", _clean(text)))
    yield from entries.values()


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        start = file.read(HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    return read_json_lines(path) if start.startswith("{") else read_csv(path)


def _row_entry(row: dict[str, Any], where: str) -> Entry:
    path = _column(row, PATH_COLUMNS, where)
    if not isinstance(path, str):
        raise InputError("the path of the image is no text", where=where)
    given = row.get("image_id")
    _check_path(path, where)
    image_id = _stem(path) if given in (None, "") else str(given)
    split = _split(str(row.get("split") or ""), where)
    return Entry(image_id=_storable(image_id, where), path=path, where=where, split=split)


def _check_same_image(known: Entry, entry: Entry) -> None:
    for kind, old, new in (
        ("paths", known.path, entry.path),
        ("splits", known.split, entry.split),
    ):
        if old != new:
            raise InputError(
                f"the image '{entry.image_id}' has two {kind}: "
                f"'{old}' ({known.where}) and '{new}' ({entry.where})",
                mend="Give every image one path, one split and an id of its own.",
            )


def _texts(row: dict[str, Any], where: str) -> list[str]:
    value = _column(row, TEXT_COLUMNS, where)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise InputError("the caption is neither text nor a list of texts", where=where)
    return texts


def _column(row: dict[str, Any], names: tuple[str, ...], where: str) -> Any:  # noqa: ANN401 - JSON
    present = [name for name in names if name in row]
    if len(present) != 1:
        found = "both " + " and ".join(present) if present else f"no {' or '.join(names)}"
        raise InputError(f"has {found}", where=where, mend="Name one such column.")
    return row[present[0]]


def _split(name: str, where: str) -> str:
    if name and name not in SPLITS:
        raise InputError(unknown("split", name, SPLITS), where=where)
    return SPLITS[name] if name else ""


def _clean(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON escapes can spell and UTF-8 cannot store."""
    if text.isascii():  # nearly all are, and COCO has seven million tokens
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _clean_tokens(tokens: list[str] | None) -> list[str] | None:
    if tokens is None or "".join(tokens).isascii():
        return tokens
    return [_clean(token) for token in tokens]


def _stem(path: str) -> str:
    return encode_path(str(PurePosixPath(path).with_suffix("")))


def _check_path(path: str, where: str) -> None:
    """Refuse a path that no file can have."""
    if not PurePosixPath(path).name:
        raise InputError(f"the path '{path}' names no file", where=where)
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise InputError(f"the path {path!r} cannot be written as UTF-8", where=where) from None


def _storable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"the id {text!r} cannot be written as UTF-8", where=where) from None
    return text


T = TypeVar("T")


def _validated(kind: type[T], data: Any, key: str, path: Path) -> T:  # noqa: ANN401 - any JSON
    """Return what `data` has under `key` as `kind`; report the first faults and how many."""
    if not isinstance(data, dict) or key not in data:
        raise InputError(f"has no '{key}'", where=path, mend=KNOWN)
    try:
        return TypeAdapter(kind).validate_python(data[key])
    except ValidationError as error:
        faults = error.errors()
        first = "; ".join(f"{key}{_place(fault['loc'])}: {fault['msg']}" for fault in faults[:3])
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InputError(first + more, where=path, mend=KNOWN) from None


def _place(steps: Iterable[int | str]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


READERS = {"karpathy": _read_karpathy, "coco": _read_coco, "table": _read_table}
