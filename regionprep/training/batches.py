"""Batches of images with their captions, read from a feature store.

An image comes once, with all its captions, so that the encoder runs once an image. The order of an
epoch and the choice of captions depend on (seed, epoch) alone, never on the past or on a worker, so
that an epoch can be entered at any batch.

An image with fewer captions than asked for is padded by empty rows, which no loss counts, instead
of repeats, which would weigh its captions more than those of other images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.models import Regions
from regionprep.pipeline.shards import ImageRow, command
from regionprep.pipeline.splits import read_captions, read_images
from regionprep.pipeline.store import FeatureStore, pad_rows
from regionprep.pipeline.vocab import Vocabulary
from regionprep.workspace import Workspace


class Batch:
    """Images with their regions and captions.

    `inputs` are [bos, w1 .. wn], `targets` [w1 .. wn, eos], `pad` elsewhere; of an empty caption
    only the input's bos is there. `tokens` counts the targets. Not a dataclass: Fabric would take
    one apart, and convert boxes to a low precision with the features.
    """

    def __init__(
        self,
        image_ids: list[str],
        regions: Regions,
        inputs: Int[Tensor, "b c t"],
        targets: Int[Tensor, "b c t"],
        tokens: int,
    ) -> None:
        self.image_ids = image_ids
        self.tokens = tokens
        self.regions = regions
        self.inputs = inputs
        self.targets = targets

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on `device`; the copy overlaps with work where memory is pinned."""
        return Batch(
            self.image_ids,
            self.regions.to(device),
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            self.tokens,
        )

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from where a GPU copies without waiting."""
        regions = self.regions
        pinned = replace(
            regions,
            features=regions.features.pin_memory(),
            mask=regions.mask.pin_memory(),
            boxes=regions.boxes.pin_memory(),
            sizes=regions.sizes.pin_memory(),
        )
        inputs, targets = self.inputs.pin_memory(), self.targets.pin_memory()
        return Batch(self.image_ids, pinned, inputs, targets, self.tokens)


@dataclass(frozen=True, eq=False)
class EncodedCaptions:
    """The captions of many images in three flat arrays, which forked workers share uncopied.

    Image i has captions `first_caption[i]` up to `first_caption[i + 1]`, caption j has the tokens
    `first_token[j]` up to `first_token[j + 1]`.
    """

    tokens: np.ndarray
    first_token: np.ndarray
    first_caption: np.ndarray

    @classmethod
    def encode(cls, captions: Sequence[Sequence[list[int]]]) -> EncodedCaptions:
        """Return the captions (lists of token ids) of each image, in their order."""
        flat = [caption for of_image in captions for caption in of_image]
        return cls(
            np.array([token for caption in flat for token in caption], dtype=np.int32),
            _offsets([len(caption) for caption in flat]),
            _offsets([len(of_image) for of_image in captions]),
        )

    def count(self, image: int) -> int:
        """Return how many captions an image has."""
        return int(self.first_caption[image + 1] - self.first_caption[image])

    def get(self, image: int, number: int) -> np.ndarray:
        """Return the tokens of an image's caption."""
        caption = self.first_caption[image] + number
        return self.tokens[self.first_token[caption] : self.first_token[caption + 1]]


class CaptionedImages:
    """The images of a split that can be trained on, with their features and captions."""

    def __init__(
        self,
        store: FeatureStore,
        captions: Mapping[str, Sequence[Sequence[str]]],
        vocabulary: Vocabulary,
        *,
        split: str,
        captions_per_image: int,
        seed: int = 0,
    ) -> None:
        """Take the tokens of each image's captions.

        Images whose features failed are left out and listed in `failed`; those in which the
        detector found nothing are kept. Raises MissingError for images without features and
        InputError for images without captions.
        """
        _require_features(store, captions, split)
        _require_captions(captions, split)
        self.store = store
        self.vocabulary = vocabulary
        self.captions_per_image = captions_per_image
        self.seed = seed
        self.failed = sorted(key for key in captions if store[key].status != "ok")
        self.ids = sorted(captions.keys() - set(self.failed))
        self.captions = EncodedCaptions.encode([self._encode(captions[key]) for key in self.ids])

    def _encode(self, captions: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the ids of captions that have a word, cut to the vocabulary's longest."""
        vocabulary = self.vocabulary
        return [vocabulary.cut(vocabulary.encode(tokens)) for tokens in captions if len(tokens)]

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, members: Sequence[int], *, epoch: int = 0) -> Batch:
        """Return images by their numbers as one padded batch."""
        ids = [self.ids[member] for member in members]
        chosen = [self._choose(member, epoch) for member in members]
        inputs, targets = pad_captions(chosen, self.captions_per_image, self.vocabulary)
        tokens = sum(len(caption) + 1 for of_image in chosen for caption in of_image)
        return Batch(ids, pad_regions([self.store[key] for key in ids]), inputs, targets, tokens)

    def _choose(self, image: int, epoch: int) -> list[np.ndarray]:
        """Return the captions of an image for an epoch: all, or as many as asked for."""
        numbers = list(range(self.captions.count(image)))
        if len(numbers) > self.captions_per_image:
            random = np.random.default_rng([self.seed, epoch, image])
            numbers = sorted(random.permutation(len(numbers))[: self.captions_per_image].tolist())
        return [self.captions.get(image, number) for number in numbers]


class Epoch(Dataset[Batch]):
    """The batches of one epoch by their numbers."""

    def __init__(
        self, images: CaptionedImages, epoch: int, batch_images: int, *, shuffle: bool
    ) -> None:
        self.images = images
        self.epoch = epoch
        self.batch_images = batch_images
        self.order = shuffled(len(images), images.seed, epoch) if shuffle else range(len(images))

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_images)

    def __getitem__(self, number: int) -> Batch:
        members = self.order[number * self.batch_images : (number + 1) * self.batch_images]
        return self.images.batch(members, epoch=self.epoch)

    def loader(self, *, start: int = 0, workers: int = 0, pin: bool = False) -> DataLoader[Batch]:
        """Return a loader of the batches from number `start` on, in order."""
        return DataLoader(
            self,
            batch_size=None,
            sampler=range(start, len(self)),
            num_workers=workers,
            pin_memory=pin,
            # Its own, since a loader draws from the common one and so would move dropout's.
            generator=torch.Generator(),
        )


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Return 0 .. count - 1 in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()  # type: ignore[no-any-return]


def pad_captions(
    captions: Sequence[Sequence[np.ndarray]], per_image: int, vocabulary: Vocabulary
) -> tuple[Int[Tensor, "b c t"], Int[Tensor, "b c t"]]:
    """Return the inputs and targets of captions, trimmed to the longest of them."""
    longest = max((len(tokens) for of_image in captions for tokens in of_image), default=0)
    inputs = np.full((len(captions), per_image, longest + 1), vocabulary.pad, dtype=np.int64)
    targets = inputs.copy()
    inputs[:, :, 0] = vocabulary.bos
    for image, of_image in enumerate(captions):
        for number, tokens in enumerate(of_image):
            inputs[image, number, 1 : len(tokens) + 1] = tokens
            targets[image, number, : len(tokens)] = tokens
            targets[image, number, len(tokens)] = vocabulary.eos
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def pad_regions(rows: Sequence[ImageRow]) -> Regions:
    """Return the regions of images, padded to the most of them and to one at least.

    Features become float32; padding is zeros under a False in the mask. Images of one grid keep
    its shape.
    """
    padded = pad_rows(rows)
    assert padded.features is not None, "rows of features, not of regions"
    # A batch in which nothing was found keeps one column, for no model to meet an empty axis.
    missing = 0 if padded.mask.shape[1] else 1
    grids = {(row.grid_height, row.grid_width) for row in rows if row.ok} - {(0, 0)}
    return Regions(
        features=F.pad(torch.from_numpy(padded.features).float(), (0, 0, 0, missing)),
        mask=F.pad(torch.from_numpy(padded.mask), (0, missing)),
        boxes=F.pad(torch.from_numpy(padded.boxes), (0, 0, 0, missing)),
        sizes=torch.from_numpy(padded.sizes),
        grid=grids.pop() if len(grids) == 1 else None,
    )


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _require_features(store: FeatureStore, ids: Mapping[str, object], split: str) -> None:
    missing = sorted(image_id for image_id in ids if image_id not in store)
    if missing:
        raise MissingError(
            f"{len(missing)} of the {len(ids)} {split} images have no features ({_few(missing)})",
            where=store.folder,
            mend=f"Make them with `{command('features', store.folder)} --force`: "
            "the images have changed since.",
        )


def _require_captions(captions: Mapping[str, Sequence[Sequence[str]]], split: str) -> None:
    bare = sorted(key for key, of_image in captions.items() if not any(map(len, of_image)))
    if bare:
        raise InputError(
            f"{len(bare)} of the {len(captions)} {split} images have no caption ({_few(bare)})",
            where="captions.parquet",
            mend="Leave such images out with `prep splits --skip-unmatched`.",
        )


def _few(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")


@dataclass(frozen=True, eq=False)
class Data:
    """The images that are trained on, and those that epochs are compared by, if there are any."""

    train: CaptionedImages
    val: CaptionedImages | None


def open_data(
    workspace: Workspace,
    store: FeatureStore,
    vocabulary: Vocabulary,
    *,
    captions_per_image: int,
    seed: int,
) -> Data:
    """Return the workspace's train and val; see `CaptionedImages` for what is refused."""
    captions: dict[str, dict[str, list[Sequence[str]]]] = {"train": {}, "val": {}}
    of_image = {}
    for image in read_images(workspace):
        if image.split in captions:
            of_image[image.image_id] = captions[image.split][image.image_id] = []
    for caption in read_captions(workspace):
        if caption.image_id in of_image:
            of_image[caption.image_id].append(caption.tokens)
    if not captions["train"]:
        raise InputError(
            "no image is in the train split",
            where=workspace.images,
            mend="Draw the splits: `prep splits --seed N --val N --test N`.",
        )
    opened = {
        split: CaptionedImages(
            store,
            captions[split],
            vocabulary,
            split=split,
            captions_per_image=captions_per_image,
            seed=seed,
        )
        for split in captions
        if captions[split]
    }
    if not len(opened["train"]):
        raise InputError(
            f"the features of all {len(captions['train'])} train images have failed",
            where=store.folder,
            mend="Look at their status: the images may not be where they were.",
        )
    return Data(opened["train"], opened.get("val"))


def require_own_boxes(workspace: Workspace, store: FeatureStore, detector: str) -> str:
    """Return the fingerprint of the boxes that features were made with, "" for a feature map.

    Raises MismatchError where the detector's boxes in the workspace are others by now.
    """
    made_with = str(store.metadata.get("boxes", ""))
    folder = workspace.regions(detector)
    if not made_with or not folder.is_dir():
        return made_with
    now = FeatureStore(folder).fingerprint
    if now != made_with:
        raise MismatchError(
            f"these features were made with other boxes, of another detection "
            f"({made_with[:12]}) than those that {folder} has ({now[:12]})",
            where=store.folder,
            mend=f"Make them anew: `{command('features', store.folder)} --force`.",
        )
    return made_with
