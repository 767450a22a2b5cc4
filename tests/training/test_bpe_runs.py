"""A run on the pieces of a BPE tokenizer, from the vocabulary to captions and scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up import BACKBONE, DETECTOR, captions, make_workspace, manifest, right
from tokenizers import ByteLevelBPETokenizer

from regionprep.captioning import caption_split
from regionprep.errors import MismatchError
from regionprep.pipeline.splits import read_images
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.vocab import BpeVocabulary, load_vocabulary, make_vocabulary
from regionprep.training import load_run, train
from regionprep.training.batches import open_data
from regionprep.workspace import Workspace


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tokenizer that cuts the words into pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = ByteLevelBPETokenizer()
    texts = [" ".join(caption) for index in range(16) for caption in captions(index)]
    made.train_from_iterator(texts, vocab_size=280, min_frequency=1, show_progress=False)
    made.save_model(str(folder))
    return folder


def fit(workspace: Workspace, **options: object) -> Path:
    return train(
        workspace,
        manifest(epochs=30, captions_per_image=2),
        detector=DETECTOR,
        backbone=BACKBONE,
        device="cpu",
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Workspace:
    """Return a workspace with a BPE vocabulary."""
    made = make_workspace(tmp_path_factory.mktemp("bpe") / "work")
    make_vocabulary(made, bpe=str(tokenizer), max_length=16)
    return made


def test_batches_are_padded_by_the_vocabularys_own_marks(workspace: Workspace) -> None:
    vocabulary = load_vocabulary(workspace)
    assert isinstance(vocabulary, BpeVocabulary)
    assert vocabulary.pad == 280
    store = FeatureStore(workspace.features(DETECTOR, BACKBONE))
    data = open_data(workspace, store, vocabulary, captions_per_image=2, seed=0)
    batch = data.train.batch([0])
    told = [vocabulary.decode(row) for row in batch.inputs[0].tolist()]
    assert told == captions(int(data.train.ids[0][-4:]))
    assert (batch.inputs[0, :, 0] == vocabulary.bos).all()
    assert ((batch.targets == vocabulary.eos).sum(-1) == 1).all()
    assert (batch.targets[0, 0] == vocabulary.pad).any()
    assert (batch.targets != vocabulary.pad).sum() == batch.tokens


def test_a_run_learns_and_captions_in_whole_words_without_the_tokenizer(
    workspace: Workspace,
) -> None:
    folder = fit(workspace)
    workspace.vocabulary.unlink()
    path = caption_split(workspace, run=folder.name, split="val", device="cpu").path
    rows = json.loads(path.read_text())
    said = {row["image_id"]: row["caption"].split() for row in rows}
    assert said.keys() == {
        image.image_id for image in read_images(workspace) if image.split == "val"
    }
    assert right(said)["right"] == 1, said
    assert {word for caption in said.values() for word in caption} <= {
        word for index in range(16) for caption in captions(index) for word in caption
    }


def test_a_run_on_words_refuses_the_other_kind(tmp_path: Path, tokenizer: Path) -> None:
    workspace = make_workspace(tmp_path / "work")
    folder = fit(workspace, max_steps=1)
    make_vocabulary(workspace, bpe=str(tokenizer))
    with pytest.raises(MismatchError, match="vocabulary"):
        fit(workspace, max_steps=1)
    (folder / "vocab.json").write_bytes(workspace.vocabulary.read_bytes())
    with pytest.raises(MismatchError, match="is another vocabulary"):
        load_run(folder, "cpu")
