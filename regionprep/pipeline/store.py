"""The reader of a folder of regions or features: values are mapped, not decoded.

It needs numpy and pyarrow only, and holds in memory the image ids, three numbers an image, and what
failed; the values stay in the files, shared by all processes that read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from regionprep.errors import InputError, MismatchError, MissingError, StorageError, unknown
from regionprep.pipeline.decoded import decode_part
from regionprep.pipeline.mapped import BOXES, CLASSES, SCORES, Leaf, features_leaf, map_values
from regionprep.pipeline.parts import Footer, Manifest, PartRecord, record
from regionprep.pipeline.shards import MANIFEST, PLAN, Columns, ImageRow, Plan, command

if TYPE_CHECKING:
    import torch

_NUMBERS = ("width", "height", "grid_height", "grid_width")
_SMALL = ["image_id", *_NUMBERS, "status", "error", "scores"]
# A row's numbers in memory: those above, and its regions' first, end, and row group.
_ROW = Struct("=7i")

# Boxes, scores, classes and features of a row group's regions.
Quadruple = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any] | None]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows side by side, padded with zeros to the most regions among them.

    `mask` (b, r) bool is True for a real region; `boxes` (b, r, 4) float32 pixels; `scores` (b, r)
    float32; `classes` (b, r) int32; `features` (b, r, D), or None for regions alone; `sizes` (b, 2)
    float32 width and height in pixels.
    """

    image_ids: tuple[str, ...]
    mask: NDArray[np.bool_]
    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    features: NDArray[Any] | None
    sizes: NDArray[np.float32]

    def to_torch(
        self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> TorchBatch:
        """Return the batch as tensors on `device`, the features as `dtype` if it is given.

        On the CPU and without a `dtype` they share the arrays' memory.
        """
        import torch

        arrays = (self.mask, self.boxes, self.scores, self.classes, self.sizes)
        mask, boxes, scores, classes, sizes = (torch.from_numpy(a).to(device) for a in arrays)
        features = None
        if self.features is not None:
            features = torch.from_numpy(self.features).to(device=device, dtype=dtype)
        return TorchBatch(self.image_ids, mask, boxes, scores, classes, features, sizes)


@dataclass(frozen=True, eq=False)
class TorchBatch:
    """A batch as tensors, named and shaped as in `Batch`."""

    image_ids: tuple[str, ...]
    mask: torch.Tensor
    boxes: torch.Tensor
    scores: torch.Tensor
    classes: torch.Tensor
    features: torch.Tensor | None
    sizes: torch.Tensor

    def to(self, device: torch.device | str) -> TorchBatch:
        """Return the batch on another device; from pinned memory it does not wait."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> TorchBatch:
        """Return the batch in pinned memory, as `DataLoader(pin_memory=True)` asks for it."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TorchBatch:
        return TorchBatch(
            self.image_ids,
            change(self.mask),
            change(self.boxes),
            change(self.scores),
            change(self.classes),
            None if self.features is None else change(self.features),
            change(self.sizes),
        )


class Rows(ABC):
    """Rows by image id: what a folder's store and several joined ones have in common.

    It is a map-style dataset whose keys are ids: `DataLoader(store, sampler=store.order(seed=1),
    collate_fn=store.collate)`, with any number of workers, forked or spawned.
    """

    @abstractmethod
    def __getitem__(self, image_id: str) -> ImageRow: ...

    @abstractmethod
    def __iter__(self) -> Iterator[str]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def ids(self) -> list[str]:
        """Return the image ids in the order of the shards."""
        return list(self)

    def order(self, seed: int | None = None) -> list[str]:
        """Return the image ids in the order of the shards, or shuffled by `seed`."""
        ids = self.ids
        if seed is None:
            return ids
        return [ids[place] for place in np.random.default_rng(seed).permutation(len(ids))]

    def rows(self, seed: int | None = None) -> Iterator[ImageRow]:
        """Iterate over all rows, in the order of the shards or shuffled by `seed`."""
        return (self[image_id] for image_id in self.order(seed))

    def get_batch(self, image_ids: Iterable[str]) -> Batch:
        """Return a padded copy of the rows of `image_ids`, in their order."""
        return pad_rows([self[image_id] for image_id in image_ids])

    @staticmethod
    def collate(rows: Sequence[ImageRow]) -> TorchBatch:
        """Return rows as one padded batch of tensors: a DataLoader's `collate_fn`."""
        return pad_rows(rows).to_torch()


class FeatureStore(Rows):
    """The rows of a finished folder by image id: `store["42"].features` is a view of the file.

    Opening reads the plan and the manifest and compares every part's size with it; a part is mapped
    at its first use. Arrays are read-only. A store may be pickled and forked: it opens its files
    anew where it arrives. Raises MissingError for a folder that is not finished, StorageError for a
    damaged part, MismatchError for parts of another plan.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.plan, self.manifest = _open(self.folder)
        self._size = self.plan.shard_size
        self._index = {name: place for place, name in enumerate(self.plan.image_ids)}
        self._parts: list[_Part | None] = [None] * self.plan.shard_count

    def __reduce__(self) -> tuple[Callable[..., FeatureStore], tuple[Any, ...]]:
        return _reopened, (self.folder, self.ids if self._is_subset else None)

    def __repr__(self) -> str:
        return f"FeatureStore({str(self.folder)!r}, {len(self)} images)"

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, image_id: object) -> bool:
        return image_id in self._index

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __getitem__(self, image_id: str) -> ImageRow:
        place = self._index.get(image_id)
        if place is None:
            raise KeyError(_no_such(image_id, self))
        number, row = divmod(place, self._size)
        part = self._parts[number]
        if part is None:
            part = self._parts[number] = _open_part(self.folder, self.plan, self.manifest, number)
        return part.row(image_id, row)

    @property
    def fingerprint(self) -> str:
        """Return the plan's SHA-256: what was made from what, and how."""
        return self.plan.fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the settings that the rows were made under, and their stage."""
        return {"stage": self.plan.stage, **self.plan.settings}

    @property
    def feature_width(self) -> int | None:
        """Return how many values a region has; None for regions alone."""
        return self.manifest.columns.feature_width

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Return the features' type; None for regions alone."""
        columns = self.manifest.columns
        return None if columns.feature_width is None else np.dtype(columns.dtype)

    @property
    def grid(self) -> tuple[int, int] | None:
        """Return the grid's height and width where all usable images have the same, else None."""
        grids = {(high, wide) for part in self.manifest.parts for high, wide in part.grids}
        only = grids.pop() if len(grids) == 1 else (0, 0)
        return only if only != (0, 0) else None

    @property
    def statuses(self) -> dict[str, int]:
        """Return how many images have which status."""
        if self._is_subset:
            return dict(Counter(row.status for row in self.rows()))
        return dict(sum((Counter(part.statuses) for part in self.manifest.parts), Counter()))

    @property
    def _is_subset(self) -> bool:
        return len(self._index) < len(self.plan.image_ids)

    def subset(self, image_ids: Iterable[str]) -> FeatureStore:
        """Return the store of some images only, in the order of the shards.

        It shares what this one has mapped. Raises KeyError for ids that are not here.
        """
        wanted = set(image_ids)
        absent = sorted(wanted - self._index.keys())
        if absent:
            raise KeyError(_no_such(absent[0], self) + _and_more(len(absent) - 1))
        chosen = object.__new__(FeatureStore)
        chosen.__dict__ |= self.__dict__
        chosen._index = {name: place for name, place in self._index.items() if name in wanted}
        return chosen

    def split(self, name: str) -> FeatureStore:
        """Return the store of one split's images, by `images.parquet` of the folder's workspace.

        Raises MissingError outside a workspace and for images of the split that are not here,
        InputError for a split that there is not.
        """
        from regionprep.pipeline.tables import read_images
        from regionprep.workspace import Workspace

        workspace = Workspace.find(self.folder)
        splits = {image.image_id: image.split for image in read_images(workspace)}
        if name not in splits.values():
            known = sorted(set(splits.values()))
            raise InputError(unknown("split", name, known), where=workspace.images)
        ids = [image_id for image_id, split in splits.items() if split == name]
        absent = [image_id for image_id in ids if image_id not in self]
        if absent:
            raise MissingError(
                f"{len(absent)} of the {len(ids)} images of {name} are not here: "
                + ", ".join(absent[:5]),
                where=self.folder,
                mend=f"Make them: `{command(self.plan.stage, self.folder)} --force`.",
            )
        return self.subset(ids)


def pad_rows(rows: Sequence[ImageRow]) -> Batch:
    """Return a padded copy of rows, in their order; InputError for none."""
    if not rows:
        raise InputError("a batch of no images")
    return Batch(
        tuple(row.image_id for row in rows),
        _mask(rows),
        _padded([row.boxes for row in rows]),
        _padded([row.scores for row in rows]),
        _padded([row.classes for row in rows]),
        None if rows[0].features is None else _padded([row.features for row in rows]),
        np.array([(row.width, row.height) for row in rows], np.float32),
    )


def read_part(path: Path) -> list[ImageRow]:
    """Return the rows of one part, wherever it lies: what they hold is mapped.

    Raises StorageError for what is no whole part.
    """
    footer = Footer.read(path)
    if footer is None:
        raise StorageError("is no whole part of a folder of regions or features", where=path)
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        ids = parquet.read(["image_id"], use_threads=False)["image_id"].to_pylist()
    part = _Part(path, record(path, footer), footer.columns, tuple(ids))
    return [part.row(image_id, row) for row, image_id in enumerate(ids)]


def _reopened(folder: Path, image_ids: list[str] | None) -> FeatureStore:
    store = FeatureStore(folder)
    return store if image_ids is None else store.subset(image_ids)


def _open(folder: Path) -> tuple[Plan, Manifest]:
    """Return the plan and the manifest of a folder that is finished and whole, or raise why not."""
    if not folder.is_dir():
        raise MissingError("no such folder", where=folder, mend=_mend("", folder))
    plan = Plan.read(folder)
    if plan is None:
        raise MissingError(f"has no {PLAN}", where=folder, mend=_mend("", folder))
    manifest = Manifest.read(folder)
    if manifest is None:
        raise MissingError(
            f"is not finished: it has no {MANIFEST}", where=folder, mend=_mend(plan.stage, folder)
        )
    rows = [len(plan.shard(number)) for number in range(plan.shard_count)]
    if manifest.fingerprint != plan.fingerprint or [part.rows for part in manifest.parts] != rows:
        raise MismatchError(
            f"{MANIFEST} and {PLAN} do not belong together",
            where=folder,
            mend=f"Start over: `{command(plan.stage, folder)} --force`.",
        )
    _check_sizes(folder, plan, manifest.parts)
    return plan, manifest


def _check_sizes(folder: Path, plan: Plan, parts: Sequence[PartRecord]) -> None:
    missing = [part.file for part in parts if not (folder / part.file).is_file()]
    if missing:
        raise MissingError(
            f"{len(missing)} of {len(parts)} parts are missing: {', '.join(missing[:5])}",
            where=folder,
            mend=_mend(plan.stage, folder),
        )
    for part in parts:
        size = (folder / part.file).stat().st_size
        if size != part.bytes:
            raise StorageError(
                f"has {size:,} bytes in place of {part.bytes:,}: cut, or rewritten",
                where=folder / part.file,
                mend=f"Make it again: `{command(plan.stage, folder)}`.",
            )


def _mend(stage: str, folder: Path) -> str:
    if not stage:
        stage = "regions" if folder.parent.name == "regions" else "features"
    return f"Make it, or go on where it stopped: `{command(stage, folder)}`."


def _open_part(folder: Path, plan: Plan, manifest: Manifest, number: int) -> _Part:
    told = manifest.parts[number]
    path = folder / told.file
    try:
        part = _Part(path, told, manifest.columns, plan.shard(number))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, plan, str(error)) from error
    if part.footer is not None and not part.footer.is_of(plan, number):
        raise _damaged(path, plan, "it is a part of another plan")
    return part


class _Part:
    """A mapped part: numbers of every row, and a view of every row group's values.

    Raises ValueError, OSError or ArrowException for what is not as `told`.
    """

    def __init__(
        self, path: Path, told: PartRecord, columns: Columns, image_ids: tuple[str, ...]
    ) -> None:
        # Closed at once, for the view outlives it: a thousand parts would need as many open files.
        with pa.memory_map(str(path)) as file:
            buffer = file.read_buffer()
        if buffer.size != told.bytes:
            raise ValueError(f"{buffer.size:,} bytes in place of {told.bytes:,}")
        with pq.ParquetFile(pa.BufferReader(buffer), pre_buffer=False) as parquet:
            table = parquet.read(_SMALL, use_threads=False)
            metadata = parquet.metadata
        if tuple(table["image_id"].to_pylist()) != image_ids:
            raise ValueError("its image ids are not the plan's")
        self.footer = Footer.parse(metadata, buffer.size)
        lengths = _integers(table["scores"].combine_chunks().value_lengths()).astype(np.int64)
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        groups = _map(buffer, metadata, columns, lengths, sizes) if self.footer else None
        self.mapped = groups is not None
        if groups is None:
            sizes = [len(lengths)]
            groups = [_quadruple(decode_part(path, told.sha256, columns, lengths))]
        self._groups = groups
        self._rows = _packed(table, lengths, sizes)
        reasons = zip(table["status"].to_pylist(), table["error"].to_pylist(), strict=True)
        self._told = {row: pair for row, pair in enumerate(reasons) if pair != ("ok", "")}

    def row(self, image_id: str, row: int) -> ImageRow:
        numbers = _ROW.unpack_from(self._rows, row * _ROW.size)
        width, height, grid_height, grid_width, first, end, group = numbers
        boxes, scores, classes, features = self._groups[group]
        status, error = self._told.get(row, ("ok", ""))
        return ImageRow(
            image_id,
            width,
            height,
            boxes[first:end],
            scores[first:end],
            classes[first:end],
            None if features is None else features[first:end],
            status,
            error,
            grid_height,
            grid_width,
        )


def _quadruple(values: Sequence[NDArray[Any]]) -> Quadruple:
    boxes, scores, classes, *features = values
    return boxes, scores, classes, features[0] if features else None


def _map(
    buffer: pa.Buffer,
    metadata: pq.FileMetaData,
    columns: Columns,
    lengths: NDArray[np.int64],
    sizes: Sequence[int],
) -> list[Quadruple] | None:
    """Return every row group's views, or None if one of its columns cannot be mapped."""
    leaves: list[Leaf] = [BOXES, SCORES, CLASSES]
    if columns.feature_width is not None:
        leaves.append(features_leaf(columns.feature_width, columns.dtype))
    groups: list[Quadruple] = []
    for group, rows in enumerate(np.split(lengths, np.cumsum(sizes)[:-1])):
        found = [map_values(buffer, metadata, group, leaf, rows) for leaf in leaves]
        views = [view for view in found if view is not None]
        if len(views) < len(leaves):
            return None
        groups.append(_quadruple(views))
    return groups


def _packed(table: pa.Table, lengths: NDArray[np.int64], sizes: Sequence[int]) -> bytes:
    """Return every row's numbers, as _ROW has them."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    ends = np.cumsum(lengths)
    # Regions are counted from the beginning of their row group.
    before = np.concatenate(([0], ends))[np.cumsum([0, *sizes[:-1]])][group]
    numbers = [_integers(table[name].combine_chunks()) for name in _NUMBERS]
    packed = np.stack([*numbers, ends - lengths - before, ends - before, group], axis=1)
    return packed.astype(np.int32).tobytes()


def _integers(array: pa.Array) -> NDArray[np.int32]:
    """Return an int32 array's values; `to_numpy` would import pandas wherever it is installed."""
    return np.asarray(np.from_dlpack(array), np.int32)


def _damaged(path: Path, plan: Plan, what: str) -> StorageError:
    return StorageError(
        f"is damaged: {what}",
        where=path,
        mend=f"Remove it and make it again: `{command(plan.stage, path.parent)}`.",
    )


def _no_such(image_id: str, store: FeatureStore) -> str:
    return f"{store.folder} has no image {image_id!r} among its {len(store):,}"


def _and_more(count: int) -> str:
    return f", nor {count:,} more that were asked for" if count else ""


def _mask(rows: Sequence[ImageRow]) -> NDArray[np.bool_]:
    lengths = np.array([len(row.boxes) for row in rows])
    return np.arange(lengths.max()) < lengths[:, None]


def _padded(arrays: Sequence[Any]) -> NDArray[Any]:
    longest = max(map(len, arrays))
    padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
    for target, array in zip(padded, arrays, strict=True):
        target[: len(array)] = array
    return padded
