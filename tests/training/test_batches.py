"""Batches: what is in them, in which order, and which data are refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up import (
    BACKBONE,
    DETECTOR,
    WIDTH,
    Rows,
    captions,
    image_id,
    row,
    write_dataset,
    write_features,
)

from regionprep.errors import InputError, MismatchError, MissingError
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import ImageRow, Plan
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.vocab import WordVocabulary, load_vocabulary
from regionprep.training.batches import (
    CaptionedImages,
    EncodedCaptions,
    Epoch,
    open_data,
    pad_captions,
    require_own_boxes,
    shuffled,
)
from regionprep.workspace import Workspace

VOCABULARY = WordVocabulary(["a", "b", "c", "d", "e"], range(5, 0, -1), max_length=4)


def open_store(workspace: Workspace) -> FeatureStore:
    return FeatureStore(workspace.features(DETECTOR, BACKBONE))


def some_images(workspace: Workspace, texts: dict[str, list[list[str]]], **options: int):
    options = {"captions_per_image": 2} | options
    store = open_store(workspace)
    return CaptionedImages(store, texts, VOCABULARY, split="train", **options)


def test_captions_become_shifted_inputs_and_targets(workspace: Workspace) -> None:
    images = some_images(workspace, {image_id(0): [["a", "b"], ["c"]]})
    batch = images.batch([0])
    assert batch.inputs.tolist() == [[[1, 4, 5], [1, 6, 0]]]
    assert batch.targets.tolist() == [[[4, 5, 2], [6, 2, 0]]]
    assert batch.tokens == 5


def test_missing_captions_are_rows_that_no_loss_counts(workspace: Workspace) -> None:
    images = some_images(workspace, {image_id(0): [["a"]]}, captions_per_image=3)
    batch = images.batch([0])
    assert batch.targets[0, 1:].eq(VOCABULARY.pad).all()
    assert batch.inputs[0, 1:].tolist() == [[1, 0], [1, 0]]
    assert batch.tokens == 2


def test_captions_are_cut_to_the_vocabularys_longest_and_empty_ones_dropped(
    workspace: Workspace,
) -> None:
    images = some_images(workspace, {image_id(0): [list("abcdea"), []]})
    assert images.batch([0]).targets.tolist() == [[[4, 5, 6, 7, 2], [0, 0, 0, 0, 0]]]


def test_batch_is_trimmed_to_its_longest_caption(workspace: Workspace) -> None:
    texts = {image_id(0): [["a"]], image_id(1): [["a", "b", "c"]]}
    images = some_images(workspace, texts)
    assert images.batch([0]).inputs.shape == (1, 2, 2)
    assert images.batch([0, 1]).inputs.shape == (2, 2, 4)


def test_features_come_as_float32_under_a_mask(workspace: Workspace) -> None:
    one = row(0)
    short = replace(
        row(1),
        boxes=one.boxes[:1],
        scores=one.scores[:1],
        classes=one.classes[:1],
        features=row(1).features[:1],
    )
    write_features(workspace, [one, short], force=True)
    regions = some_images(workspace, {image_id(i): [["a"]] for i in (0, 1)}).batch([0, 1]).regions
    assert regions.features.dtype == torch.float32
    np.testing.assert_array_equal(regions.features[0].numpy(), one.features.astype(np.float32))
    assert regions.mask.tolist() == [[True, True], [True, False]]
    assert regions.features[1, 1].eq(0).all()
    assert regions.boxes[0].tolist() == one.boxes.tolist()
    assert regions.sizes.tolist() == [[40, 30], [40, 30]]


def empty(index: int) -> ImageRow:
    return ImageRow.failed(image_id(index), "ok", "", width=40, height=30, feature_width=WIDTH)


def test_images_without_regions_are_kept_and_a_batch_of_them_has_one_masked_region(
    workspace: Workspace,
) -> None:
    write_features(workspace, [empty(0), empty(1)], force=True)
    images = some_images(workspace, {image_id(i): [["a"]] for i in (0, 1)})
    assert images.ids == [image_id(0), image_id(1)]
    regions = images.batch([0, 1]).regions
    assert regions.mask.tolist() == [[False], [False]]
    assert regions.features.shape == (2, 1, WIDTH)


def test_images_whose_features_failed_are_left_out_and_named(workspace: Workspace) -> None:
    failed = ImageRow.failed(image_id(1), "truncated", "ends too early", feature_width=WIDTH)
    write_features(workspace, [row(0), failed], force=True)
    images = some_images(workspace, {image_id(i): [["a"]] for i in (0, 1)})
    assert (images.ids, images.failed) == ([image_id(0)], [image_id(1)])


def test_captions_beyond_those_asked_for_are_chosen_anew_each_epoch(workspace: Workspace) -> None:
    texts = {image_id(0): [[word] for word in "abcde"]}
    images = some_images(workspace, texts, captions_per_image=2, seed=3)
    chosen = [images.batch([0], epoch=epoch).targets[0, :, 0].tolist() for epoch in range(20)]
    assert len(set(map(tuple, chosen))) > 3
    assert {word for pair in chosen for word in pair} == {4, 5, 6, 7, 8}
    assert all(len(set(pair)) == 2 for pair in chosen)
    assert images.batch([0], epoch=7).targets[0, :, 0].tolist() == chosen[7]


def test_order_depends_on_seed_and_epoch_alone() -> None:
    assert sorted(shuffled(50, 1, 2)) == list(range(50))
    assert shuffled(50, 1, 2) == shuffled(50, 1, 2)
    assert len({tuple(shuffled(50, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


# Workers are forked: Python warns of that in a process with threads, from 3.12 on.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_entered_late_gives_the_batches_that_were_left(
    workspace: Workspace, workers: int
) -> None:
    images = some_images(workspace, {image_id(i): captions(i) for i in range(10)})
    epoch = Epoch(images, 1, 3, shuffle=True)
    whole = [batch.image_ids for batch in epoch.loader()]
    late = [batch.image_ids for batch in epoch.loader(start=2, workers=workers)]
    assert [len(ids) for ids in whole] == [3, 3, 3, 1]
    assert late == whole[2:]


def test_loading_leaves_the_random_state_of_training_alone(workspace: Workspace) -> None:
    images = some_images(workspace, {image_id(i): captions(i) for i in range(4)})
    before = torch.get_rng_state()
    assert len(list(Epoch(images, 0, 2, shuffle=True).loader())) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_images_can_be_sent_to_another_process(workspace: Workspace) -> None:
    images = some_images(workspace, {image_id(i): captions(i) for i in range(4)})
    there = pickle.loads(pickle.dumps(images))
    assert torch.equal(there.batch([3]).regions.features, images.batch([3]).regions.features)
    assert torch.equal(there.batch([3]).targets, images.batch([3]).targets)


@given(st.lists(st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=4), max_size=3)))
def test_flat_captions_are_those_that_were_encoded(nested: list[list[list[int]]]) -> None:
    flat = EncodedCaptions.encode(nested)
    there = [
        [flat.get(image, number).tolist() for number in range(flat.count(image))]
        for image in range(len(nested))
    ]
    assert there == nested


@given(
    st.lists(st.lists(st.lists(st.integers(3, 8), max_size=4), max_size=3), min_size=1, max_size=3)
)
def test_targets_are_inputs_one_token_later(nested: list[list[list[int]]]) -> None:
    arrays = [[np.array(tokens, np.int32) for tokens in of_image] for of_image in nested]
    inputs, targets = pad_captions(arrays, 3, VOCABULARY)
    for image, of_image in enumerate(nested):
        for number, tokens in enumerate(of_image):
            length = len(tokens) + 1
            assert inputs[image, number].tolist()[:length] == [VOCABULARY.bos, *tokens]
            assert targets[image, number].tolist()[:length] == [*tokens, VOCABULARY.eos]
            assert targets[image, number, length:].eq(VOCABULARY.pad).all()
        assert targets[image, len(of_image) :].eq(VOCABULARY.pad).all()


def opened(workspace: Workspace):
    return open_data(
        workspace,
        open_store(workspace),
        load_vocabulary(workspace),
        captions_per_image=2,
        seed=0,
    )


def test_data_are_the_images_of_train_and_val(workspace: Workspace) -> None:
    write_dataset(workspace, {"train": [0, 1, 2], "val": [3], "test": [4, 5]})
    data = opened(workspace)
    assert data.train.ids == [image_id(i) for i in (0, 1, 2)]
    assert data.val is not None
    assert data.val.ids == [image_id(3)]


def test_missing_features_are_refused_with_their_count_and_the_command(
    workspace: Workspace,
) -> None:
    write_features(workspace, [row(index) for index in range(2, 40)], force=True)
    with pytest.raises(MissingError) as refusal:
        opened(workspace)
    message = str(refusal.value)
    assert "2 of the 32 train images have no features (image-0000, image-0001)" in message
    assert f"prep extract --detector {DETECTOR} --backbone {BACKBONE}" in message


def test_missing_features_of_val_are_refused_too(workspace: Workspace) -> None:
    write_features(workspace, [row(index) for index in range(35)], force=True)
    with pytest.raises(MissingError, match="5 of the 8 val images"):
        opened(workspace)


def test_images_without_a_caption_are_refused(workspace: Workspace) -> None:
    texts = {image_id(0): [["a"]], image_id(1): [], image_id(2): [[]]}
    with pytest.raises(InputError, match=r"2 of the 3 train images have no caption.*image-0001"):
        some_images(workspace, texts)


def test_an_empty_train_split_is_refused(workspace: Workspace) -> None:
    vocabulary = load_vocabulary(workspace)
    write_dataset(workspace, {"train": [0], "val": [1]})
    images = workspace.images
    write_dataset_without_train(workspace)
    with pytest.raises(InputError, match="no image is in the train split") as refusal:
        open_data(workspace, open_store(workspace), vocabulary, captions_per_image=2, seed=0)
    assert str(images) in str(refusal.value)


def write_dataset_without_train(workspace: Workspace) -> None:
    from regionprep.pipeline.tables import ImageRecord, write_tables

    write_tables(workspace, [ImageRecord(image_id(0), "0.jpg", 40, 30, "test")], [])


def test_a_train_split_of_failed_images_is_refused(workspace: Workspace) -> None:
    failed = [
        ImageRow.failed(image_id(i), "missing", "no such file", feature_width=WIDTH)
        for i in range(32)
    ]
    write_features(workspace, [*failed, *map(row, range(32, 40))], force=True)
    with pytest.raises(InputError, match="all 32 train images have failed"):
        opened(workspace)


def test_features_of_other_boxes_are_refused_naming_both(workspace: Workspace) -> None:
    rows = [row(index) for index in range(40)]
    write_features(workspace, rows, boxes="b0c5" * 16, force=True)
    with pytest.raises(MismatchError, match="made with other boxes") as refusal:
        require_own_boxes(workspace, open_store(workspace), DETECTOR)
    now = FeatureStore(workspace.regions(DETECTOR)).fingerprint
    assert "b0c5b0c5" in str(refusal.value)
    assert now[:12] in str(refusal.value)
    assert "--force" in str(refusal.value)


def test_own_boxes_are_told_by_their_fingerprint(workspace: Workspace) -> None:
    now = FeatureStore(workspace.regions(DETECTOR)).fingerprint
    assert require_own_boxes(workspace, open_store(workspace), DETECTOR) == now


def test_features_of_no_boxes_have_none_to_differ(workspace: Workspace) -> None:
    rows = [row(index) for index in range(40)]
    by_id = {one.image_id: one for one in rows}
    plan = Plan.make(by_id, stage="features", settings={"boxes": "", "grid": True})
    run_plan(plan, workspace.features(DETECTOR, "map"), lambda: Rows(by_id, WIDTH), progress=False)
    store = FeatureStore(workspace.features(DETECTOR, "map"))
    assert require_own_boxes(workspace, store, DETECTOR) == ""
