"""Random regions and captions, and a tiny captioner to give them to."""

from __future__ import annotations

import dataclasses

import torch

from regionprep import models
from regionprep.models import Regions

SPECIAL = {"pad": 0, "bos": 1, "eos": 2}
GRID = (2, 3)
"""The feature map that grid models are tested on: six cells."""


def regions(counts, *, most=None, width=6, seed=0) -> Regions:
    """Return images of `counts` regions, padded to `most`; an image does not depend on others."""
    most = max(counts) if most is None else most
    features = torch.zeros(len(counts), most, width)
    boxes = torch.zeros(len(counts), most, 4)
    for image, count in enumerate(counts):
        random = torch.Generator().manual_seed(1000 * seed + image)
        features[image, :count] = torch.randn(count, width, generator=random)
        corner = torch.rand(count, 2, generator=random) * 50
        boxes[image, :count] = torch.cat([corner, corner + 10], -1)
    mask = torch.arange(most) < torch.tensor(counts)[:, None]
    return Regions(features, mask, boxes, torch.full((len(counts), 2), 64.0))


def feature_maps(counts, *, width=6, seed=0) -> Regions:
    """Return feature maps of GRID; an image of no regions is one whose features have failed."""
    cells = GRID[0] * GRID[1]
    batch = regions([cells if count else 0 for count in counts], most=cells, width=width, seed=seed)
    return dataclasses.replace(batch, grid=GRID)


def captions(images, count, length, *, vocabulary=11, seed=0) -> torch.Tensor:
    """Return captions of 1 to `length` words as a model reads them: bos, words, padding."""
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(3, vocabulary, (images, count, length), generator=random)
    lengths = torch.randint(1, length + 1, (images, count, 1), generator=random)
    words = words.masked_fill(torch.arange(length) >= lengths, SPECIAL["pad"])
    return torch.cat([torch.full((images, count, 1), SPECIAL["bos"]), words], -1)


def tiny(seed=0, **arguments) -> models.Captioner:
    """Return a tiny transformer in training mode, without dropout unless it is asked for."""
    torch.manual_seed(seed)
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "width": 16, "heads": 4, "feed_forward": 32}
    shape = {"feature_width": 6, "vocabulary_size": 11, "max_length": 5, **SPECIAL}
    return models.build("transformer", **{**shape, **sizes, "dropout": 0.0, **arguments})
