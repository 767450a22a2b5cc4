"""Which images there are, what captions they have, and which split each belongs to.

Splits are `train`, `val` and `test`, as the source gives them or drawn by a seed; images without
captions, a bare folder's, are in `all`. What cannot be matched is refused before anything is
written.
"""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from regionprep.errors import InputError
from regionprep.manifests import SplitRule
from regionprep.pipeline import captions as caption_files
from regionprep.pipeline.captions import Caption, Entry
from regionprep.pipeline.claim import claimed, terminable
from regionprep.pipeline.crashes import forget_crashes, surviving_crashes
from regionprep.pipeline.images import SUFFIXES, Header, ImageFault, ImageReader
from regionprep.pipeline.names import encode_path
from regionprep.pipeline.tables import (
    CaptionRecord,
    ImageRecord,
    collector_paused,
    dataset_fingerprint,
    read_captions,
    read_images,
    write_tables,
)
from regionprep.pipeline.text import tokenize
from regionprep.workspace import Workspace

__all__ = [
    "CaptionRecord",
    "ImageRecord",
    "SplitsOutcome",
    "dataset_fingerprint",
    "make_splits",
    "read_captions",
    "read_images",
]

NAMED = 5
"""How many culprits an error names."""


@dataclass(frozen=True)
class SplitsOutcome:
    """What `make_splits` wrote, and what it counted on the way."""

    workspace: Workspace
    images: Counter[str]
    captions: int
    changed: bool
    unusable: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        splits = ", ".join(f"{split} {count:,}" for split, count in self.images.items())
        state = "" if self.changed else "; nothing has changed"
        lines = [f"{self.images.total():,} images ({splits}), {self.captions:,} captions{state}"]
        for title, counts in (
            ("cannot be used, kept without regions", self.unusable),
            ("left out", self.left_out),
            ("noted", self.notes),
        ):
            lines += [f"  {title}: {count:,} {what}" for what, count in sorted(counts.items())]
        return "\n".join(lines)


def make_splits(
    workspace: Workspace,
    *,
    restval: bool | None = None,
    seed: int | None = None,
    train: int | None = None,
    val: int | None = None,
    test: int | None = None,
    max_pixels: int | None = None,
    skip_unmatched: bool = False,
) -> SplitsOutcome:
    """Write `images.parquet` and `captions.parquet`, and return what is in them.

    `restval` says whether Karpathy's restval joins train or is left out. `seed` and the sizes draw
    the splits anew. Images of more than `max_pixels` are not decoded. What is given here becomes
    the workspace's choice. `skip_unmatched` leaves out images without captions, captions without
    image, and says how many.

    Raises InputError for whatever is wrong with the images or captions; nothing is written then.
    Raises BusyError while another process writes the tables or the vocabulary.
    """
    workspace = _with_limit(workspace, max_pixels)
    draft = _Draft(_with_rule(workspace, restval, seed, train, val, test), skip_unmatched)
    with claimed(workspace.root), terminable(), collector_paused():
        entries = draft.read()
        _check_ids(entries)
        headers = draft.probe(entries)
        outcome = draft.write(draft.split(draft.match(entries, headers)), headers)
        forget_crashes(workspace.root)
    return outcome


def _with_limit(workspace: Workspace, max_pixels: int | None) -> Workspace:
    if max_pixels is None:
        return workspace
    images = workspace.dataset.images.model_copy(update={"max_pixels": max_pixels})
    return replace(workspace, dataset=workspace.dataset.model_copy(update={"images": images}))


def _with_rule(
    workspace: Workspace,
    restval: bool | None,
    seed: int | None,
    train: int | None,
    val: int | None,
    test: int | None,
) -> Workspace:
    """Return the workspace with what the user chose now in the place of what was chosen before."""
    rule = workspace.dataset.splits
    drawn = {"seed": seed, "train": train, "val": val, "test": test}
    chosen: dict[str, Any] = {name: value for name, value in drawn.items() if value is not None}
    if seed is not None and workspace.dataset.images.kind == "scenes":
        raise InputError(
            "scenes are drawn by the seed in their manifest, so --seed does not go with them",
            mend="Make a workspace from your own YAML with another images.seed.",
        )
    if seed is not None and not any((rule.val, rule.test, val, test)):
        raise InputError(
            "a seed alone draws neither val nor test", mend="Add --val N and --test N."
        )
    if chosen:
        chosen["kind"] = "drawn"
    elif restval is not None:
        chosen["kind"] = "given"
    if restval is not None:
        chosen["restval"] = restval
    rule = rule.model_copy(update=chosen)
    return replace(workspace, dataset=workspace.dataset.model_copy(update={"splits": rule}))


class _Draft:
    """The tables while they are made: every step takes entries, returns those kept, and counts."""

    def __init__(self, workspace: Workspace, skip_unmatched: bool) -> None:
        self.workspace = workspace
        self.skip_unmatched = skip_unmatched
        self.source = workspace.dataset.captions
        self.root = workspace.image_root()
        self.left_out: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    def read(self) -> list[Entry]:
        """Return all images of the source, with paths below the folder of images."""
        if self.workspace.dataset.images.kind == "scenes":
            return self._scenes()
        _check_root(self.root)
        if self.source is None or self.source.kind is None or self.source.kind == "scenes":
            return self._walk()
        files = [self.workspace.root / file for file in self.source.files]
        entries = caption_files.read(self.source.kind, files)
        if not entries:
            raise InputError("lists no image", where=", ".join(map(str, files)))
        return [self._located(entry) for entry in entries]

    def _scenes(self) -> list[Entry]:
        from regionprep import scenes

        seed, rule = self.workspace.dataset.images.seed, self.workspace.dataset.splits
        train = scenes.SPLITS["train"] if rule.train is None else rule.train
        splits = ["train"] * train + ["val"] * rule.val + ["test"] * rule.test
        entries = []
        for index, split in enumerate(splits):
            image_id = scenes.image_id(index)
            entry = Entry(image_id, image_id, where="scenes", split=split)
            if self.source is not None:
                texts = scenes.captions(scenes.scene(seed, index))
                entry.captions += [Caption(f"{image_id}#{n}", t) for n, t in enumerate(texts)]
            entries.append(entry)
        return entries

    def _walk(self) -> list[Entry]:
        entries = []
        for path in walk(self.root):
            if PurePosixPath(path).suffix.lower() not in SUFFIXES:
                self.left_out["files that are not named like images"] += 1
                continue
            image_id = encode_path(str(PurePosixPath(path).with_suffix("")))
            entries.append(Entry(image_id, path, where=str(self.root)))
        if not entries:
            raise InputError(
                "holds no images",
                where=self.root,
                mend=f"Known endings: {' '.join(sorted(SUFFIXES))}.",
            )
        return entries

    def _located(self, entry: Entry) -> Entry:
        path = PurePosixPath(entry.path)
        if path.is_absolute() and path.is_relative_to(self.root):
            path = path.relative_to(self.root)
        elif len(path.parts) == 1 and entry.folder and (self.root / entry.folder).is_dir():
            path = entry.folder / path
        if path.is_absolute() or ".." in path.parts or "\0" in str(path):
            raise InputError(
                f"the path '{path}' leads out of the folder of images {self.root}",
                where=entry.where,
                mend="Give the folder that holds all images, with paths below it.",
            )
        return replace(entry, path=str(path))

    def probe(self, entries: Sequence[Entry]) -> dict[str, Header | ImageFault]:
        """Return every image's header, or why it cannot be used; threads wait for the disk."""
        reader = ImageReader(self.workspace)

        def look(entry: Entry) -> Header | ImageFault:
            try:
                return probe(encode_path(entry.path))
            except ImageFault as fault:
                return fault

        with (
            surviving_crashes(self.workspace.root, reader.probe) as probe,
            ThreadPoolExecutor(max_workers=8) as threads,
        ):
            found = dict(
                zip((entry.image_id for entry in entries), threads.map(look, entries), strict=True)
            )
        for entry in entries:
            self._note(entry, found[entry.image_id])
        return found

    def _note(self, entry: Entry, header: Header | ImageFault) -> None:
        if isinstance(header, ImageFault):
            return
        if header.animated:
            self.notes["images of several frames or pages: the first is taken"] += 1
        if entry.size is not None and entry.size != (header.width, header.height):
            self.notes[
                "images of another size than their annotation says: the file's is taken"
            ] += 1

    def match(
        self, entries: Sequence[Entry], headers: dict[str, Header | ImageFault]
    ) -> list[Entry]:
        """Return the images that are there and have captions; refuse others, or count them."""
        if self.source is None:
            return list(entries)
        missing = [entry for entry in entries if _is_missing(headers[entry.image_id])]
        missing_ids = {entry.image_id for entry in missing}
        present = [self._tokenized(e) for e in entries if e.image_id not in missing_ids]
        silent = [entry for entry in present if not entry.captions]
        problems = {
            "images with captions, but no such file": [entry.path for entry in missing],
            "images without captions": [entry.path for entry in silent],
            "files in the folder of images without captions": self._unlisted(entries),
        }
        self._refuse_or_count(problems, everything=len(missing) == len(entries))
        return [entry for entry in present if entry.captions]

    def _tokenized(self, entry: Entry) -> Entry:
        """Return `entry` with tokens, without captions that have none."""
        kept = []
        for caption in entry.captions:
            tokens = tokenize(caption.text) if caption.tokens is None else caption.tokens
            # Runs of punctuation such as !! are tokens, but no caption.
            text = caption.text if caption.tokens is None else " ".join(tokens)
            if tokens and any(map(str.isalnum, text)):
                kept.append(replace(caption, tokens=tokens))
        self.left_out["captions without a word"] += len(entry.captions) - len(kept)
        return replace(entry, captions=kept)

    def _unlisted(self, entries: Sequence[Entry]) -> list[str]:
        """Return the image files that lie beside listed ones and are not listed themselves."""
        if self.workspace.dataset.images.kind == "scenes":
            return []
        listed = {entry.path for entry in entries}
        folders = {str(PurePosixPath(path).parent) for path in listed}
        beside = (path for folder in sorted(folders) for path in _files_in(self.root, folder))
        unlisted = [path for path in beside if path not in listed]
        assert self.source is not None
        if self.source.kind == "karpathy":  # published splits leave images out on purpose
            self.notes["image files that the splits do not list"] += len(unlisted)
            return []
        return unlisted

    def _refuse_or_count(self, problems: dict[str, list[str]], *, everything: bool) -> None:
        found = {what: paths for what, paths in problems.items() if paths}
        if found and (everything or not self.skip_unmatched):
            raise InputError(
                "; ".join(
                    f"{len(paths):,} {what} ({_some(paths)})" for what, paths in found.items()
                ),
                where=self.root,
                mend="Check the folder of images (`prep init --images`) and the caption files"
                + ("." if everything else ", or leave these out: `prep splits --skip-unmatched`."),
            )
        self.left_out.update({what: len(paths) for what, paths in found.items()})

    def split(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the images with the split that each belongs to; those in none are left out."""
        rule = self.workspace.dataset.splits
        if self.workspace.dataset.images.kind != "scenes" and rule.kind == "drawn":
            drawn = _drawn(entries, rule)
            self.left_out["images that no split drew"] += len(entries) - len(drawn)
            entries = drawn
        else:
            entries = self._given(entries, rule)
        if not entries:
            raise InputError("no image is left", where=self.root)
        return entries

    def _given(self, entries: Sequence[Entry], rule: SplitRule) -> list[Entry]:
        without = [entry for entry in entries if not entry.split]
        if without and self.source is None:
            return [replace(entry, split="all") for entry in entries]
        if without:
            raise InputError(
                f"{len(without):,} of {len(entries):,} images have no split "
                f"({_some([entry.path for entry in without])})",
                where=", ".join(self.source.files) if self.source else None,
                mend="Draw the splits: `prep splits --val N --test N`.",
            )
        restval = sum(entry.split == "restval" for entry in entries)
        if not rule.restval:
            self.left_out["images of restval"] += restval
            return [entry for entry in entries if entry.split != "restval"]
        self.notes["images of restval, now in train"] += restval
        return [replace(e, split="train") if e.split == "restval" else e for e in entries]

    def write(
        self, entries: Iterable[Entry], headers: dict[str, Header | ImageFault]
    ) -> SplitsOutcome:
        """Write both tables where they differ from what is there, images last."""
        entries = sorted(entries, key=lambda entry: entry.image_id)
        images = [_record(entry, headers[entry.image_id]) for entry in entries]
        captions = [
            CaptionRecord(entry.image_id, caption.caption_id, caption.text, caption.tokens or ())
            for entry in entries
            for caption in entry.captions
        ]
        self.workspace.save()
        has_captions = self.source is not None
        changed = write_tables(self.workspace, images, captions if has_captions else None)
        faults = (headers[entry.image_id] for entry in entries)
        return SplitsOutcome(
            workspace=self.workspace,
            images=Counter(entry.split for entry in entries),
            captions=len(captions),
            changed=changed,
            unusable=Counter(fault.status for fault in faults if isinstance(fault, ImageFault)),
            left_out=+self.left_out,
            notes=+self.notes,
        )


def walk(root: Path, below: str = "") -> Iterator[str]:
    """Yield the paths below `root` of all files that are not hidden, sorted, folder by folder.

    Folders that are symlinks are not entered: what they lead to is outside, or is met anyway.
    """
    with os.scandir(root / below) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        path = f"{below}/{item.name}" if below else item.name
        if item.name.startswith("."):
            continue
        if item.is_dir(follow_symlinks=False):
            yield from walk(root, path)
        elif item.is_file() or item.is_symlink():
            yield path


def _files_in(root: Path, folder: str) -> Iterator[str]:
    """Yield the image files of one folder, as paths below `root`."""
    try:
        items = sorted(item.name for item in os.scandir(root / folder) if item.is_file())
    except OSError:  # a folder of images that are all missing
        return
    for name in items:
        if PurePosixPath(name).suffix.lower() in SUFFIXES and not name.startswith("."):
            yield str(PurePosixPath(folder) / name)


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise InputError(
            "there is no such folder of images",
            where=root,
            mend="Name it with `prep init DIR --images FOLDER`, or bring it back.",
        )


def _check_ids(entries: Iterable[Entry]) -> None:
    """Refuse one file under two ids, which could be in train and test, and one id for two files.

    Ids are the same once written alike: 7 and 007, composed and decomposed letters.
    """
    seen: dict[str, Entry] = {}
    by_path: dict[str, Entry] = {}
    for entry in entries:
        other = by_path.setdefault(entry.path, entry)
        if other is not entry:
            raise InputError(
                f"the file '{entry.path}' has two ids: '{other.image_id}' ({other.where}) "
                f"and '{entry.image_id}' ({entry.where})",
                mend="Give all its captions one image_id.",
            )
        normal = unicodedata.normalize("NFC", entry.image_id)
        if normal.isascii() and normal.isdecimal():
            normal = normal.lstrip("0")
        other = seen.setdefault(normal, entry)
        if other is not entry:
            raise InputError(
                f"two images share an id: '{other.image_id}' is '{other.path}' ({other.where}), "
                f"'{entry.image_id}' is '{entry.path}' ({entry.where})",
                mend="Rename one of them, or give both an image_id.",
            )


def _drawn(entries: Sequence[Entry], rule: SplitRule) -> list[Entry]:
    """Draw test, then val, then train by a hash of seed and id: the order of files is no matter."""
    if rule.val + rule.test + (rule.train or 0) > len(entries):
        raise InputError(
            f"cannot draw {rule.train or 0} train, {rule.val} val and {rule.test} test images "
            f"from {len(entries)}",
            mend="Ask for fewer with --val and --test.",
        )

    def lot(entry: Entry) -> bytes:
        return hashlib.sha256(f"{rule.seed}:{entry.image_id}".encode()).digest()

    rest = len(entries) - rule.val - rule.test
    train = rest if rule.train is None else rule.train
    names = ["test"] * rule.test + ["val"] * rule.val + ["train"] * train
    ordered = sorted(entries, key=lot)[: len(names)]
    return [replace(entry, split=name) for entry, name in zip(ordered, names, strict=True)]


def _is_missing(header: Header | ImageFault) -> bool:
    return isinstance(header, ImageFault) and header.status == "missing"


def _some(paths: Sequence[str]) -> str:
    named = ", ".join(encode_path(path) for path in paths[:NAMED])
    return named + (", ..." if len(paths) > NAMED else "")


def _record(entry: Entry, header: Header | ImageFault) -> ImageRecord:
    width, height = (0, 0) if isinstance(header, ImageFault) else (header.width, header.height)
    return ImageRecord(entry.image_id, encode_path(entry.path), width, height, entry.split)
