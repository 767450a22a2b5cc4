"""Every model that ships learns eight scenes by heart, by the loss that it is trained on."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from samples import SPECIAL
from test_captioners import MODELS, POOLED, build, on_grid

from regionprep import models, scenes
from regionprep.models import Regions
from regionprep.training.losses import cross_entropy

SCENES = [scenes.scene(0, index) for index in range(8)]
CAPTIONS = [scenes.captions(scene)[0].split() for scene in SCENES]
WORDS = sorted({word for caption in CAPTIONS for word in caption})
LONGEST = max(map(len, CAPTIONS))
GRID = (3, 4)
SIDE = 6
MOST_STEPS, RATE, LEARNED = 800, 3e-3, 0.01
"""At most so many updates, until the captions cost less than LEARNED nats a word."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_eight_scenes_by_heart(name):
    batch = feature_maps() if on_grid(name) else regions()
    model = build(
        name,
        feature_width=batch.features.shape[-1],
        vocabulary_size=len(SPECIAL) + len(WORDS),
        max_length=LONGEST,
        grid=batch.grid,
        dropout=0.0,
    )
    inputs, targets = captions()
    criterion = partial(cross_entropy, pad=SPECIAL["pad"])
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(MOST_STEPS):
        model.train()
        model.loss(batch, inputs, targets, criterion).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 25 == 24 and cost(model, batch, criterion) < LEARNED:
            break
    if name in POOLED:  # Word by word they are another function than the one that was trained.
        taught = model.eval()(batch, inputs).argmax(-1)
        assert torch.equal(taught.where(targets != SPECIAL["pad"], SPECIAL["pad"]), targets)
        return
    written = models.beam_search(model.eval(), batch, beam_size=3)
    assert [spell(best[0].tokens) for best in written] == CAPTIONS


@torch.no_grad()
def cost(model, batch, criterion):
    inputs, targets = captions()
    return criterion(model.eval()(batch, inputs), targets)


def regions() -> Regions:
    """Return the pixels of each object, made small, and its true box."""
    boxes = [scenes.boxes(scene)[0] for scene in SCENES]
    most = max(map(len, boxes))
    features = torch.zeros(len(SCENES), most, SIDE * SIDE * 3)
    corners = torch.zeros(len(SCENES), most, 4)
    for image, (scene, found) in enumerate(zip(SCENES, boxes, strict=True)):
        for region, box in enumerate(found):
            features[image, region] = small(scenes.draw(scene), box)
            corners[image, region] = torch.from_numpy(box)
    mask = torch.arange(most) < torch.tensor([len(found) for found in boxes])[:, None]
    return Regions(features, mask, corners, sizes())


def feature_maps() -> Regions:
    """Return the pixels of each cell of an even grid, made small."""
    down, right = scenes.HEIGHT // GRID[0], scenes.WIDTH // GRID[1]
    cells = torch.tensor(
        [
            [column * right, row * down, (column + 1) * right, (row + 1) * down]
            for row in range(GRID[0])
            for column in range(GRID[1])
        ]
    ).float()
    features = torch.stack(
        [
            torch.stack([small(scenes.draw(scene), cell) for cell in cells.numpy()])
            for scene in SCENES
        ]
    )
    mask = torch.ones(features.shape[:2], dtype=torch.bool)
    return Regions(features, mask, cells.expand(len(SCENES), -1, -1), sizes(), GRID)


def small(image, box):
    left, top, right, bottom = (int(edge) for edge in box)
    pixels = torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])).float() / 64 - 2
    return torch.nn.functional.adaptive_avg_pool2d(pixels.permute(2, 0, 1), SIDE).flatten()


def sizes():
    return torch.tensor([[scenes.WIDTH, scenes.HEIGHT]]).float().expand(len(SCENES), -1)


def captions():
    """Return one caption an image as a model reads it, and as it shall be written."""
    words = torch.full((len(SCENES), 1, LONGEST + 2), SPECIAL["pad"])
    for image, caption in enumerate(CAPTIONS):
        ids = [SPECIAL["bos"], *(len(SPECIAL) + WORDS.index(word) for word in caption)]
        words[image, 0, : len(ids) + 1] = torch.tensor([*ids, SPECIAL["eos"]])
    inputs = words[..., :-1]
    return inputs.where(inputs != SPECIAL["eos"], SPECIAL["pad"]), words[..., 1:]


def spell(tokens):
    return [WORDS[token - len(SPECIAL)] for token in tokens]
