"""The check that features mean something: it finds meaning where there is some, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regionprep.errors import InputError, MissingError
from regionprep.evaluation.retrieval import check_features, content_words, retrieval
from regionprep.manifests import load
from regionprep.pipeline.executor import run_plan
from regionprep.pipeline.shards import Columns, ImageRow, Plan
from regionprep.pipeline.tables import CaptionRecord, ImageRecord, write_tables
from regionprep.workspace import Workspace

TOPICS = (["dog", "grass", "run"], ["cat", "sofa", "sleep"], ["train", "track"], ["pizza", "plate"])


def photographs(number: int, meaning: float) -> tuple[np.ndarray, list[set[str]]]:
    """Return features and words of images of four topics; features tell the topic by `meaning`."""
    generator = np.random.default_rng(0)
    topics = generator.integers(len(TOPICS), size=number)
    directions = generator.normal(size=(len(TOPICS), 32))
    features = meaning * directions[topics] + generator.normal(size=(number, 32))
    words = [
        {word for word in TOPICS[topic] if generator.random() < 0.7} | {f"w{generator.integers(9)}"}
        for topic in topics
    ]
    return features, words


def test_features_that_tell_topics_apart_share_more_words_than_chance() -> None:
    found = retrieval(*photographs(120, meaning=2.0))
    assert found.overlap > 2 * found.chance
    assert found.p_value == pytest.approx(1 / 1001)
    assert "p = 0.001" in str(found)


def test_features_of_noise_stay_at_chance() -> None:
    found = retrieval(*photographs(120, meaning=0.0))
    assert found.overlap == pytest.approx(found.chance, rel=0.2)
    assert found.p_value > 0.01


def test_meaning_that_is_shuffled_among_images_is_chance() -> None:
    features, words = photographs(120, meaning=2.0)
    found = retrieval(np.random.default_rng(1).permutation(features), words)
    assert found.p_value > 0.01


def test_overlap_is_the_mean_jaccard_index_of_nearest_neighbours() -> None:
    features, words = photographs(20, meaning=1.0)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    expected = []
    for image in range(20):
        cosine = [-2 if other == image else unit[image] @ unit[other] for other in range(20)]
        for other in np.argsort(cosine)[-3:]:
            both, either = words[image] & words[other], words[image] | words[other]
            expected.append(len(both) / len(either))
    found = retrieval(features, words, k=3, permutations=10)
    assert found.overlap == pytest.approx(np.mean(expected), abs=1e-6)


def test_the_same_seed_gives_the_same_result() -> None:
    data = photographs(40, meaning=0.5)
    assert retrieval(*data, seed=3) == retrieval(*data, seed=3)
    assert retrieval(*data, seed=3).chance != retrieval(*data, seed=4).chance


def test_images_that_cannot_be_told_apart_are_chance() -> None:
    found = retrieval(np.ones((12, 4)), [{"dog"}] * 12)
    assert (found.overlap, found.chance, found.p_value) == (1, 1, 1)


def test_words_that_say_nothing_are_left_out() -> None:
    captions = [["a", "dog", "'s", "bowl", "on", "the", "grass"], ["there", "is", "a", "dog"]]
    assert content_words(captions) == {"dog", "bowl", "grass"}


@pytest.mark.parametrize(
    ("features", "words", "message"),
    [
        (np.ones((4, 2)), [{"a"}] * 4, "4 images are too few to look for 5"),
        (np.ones((9, 2)), [{"a"}] * 8, "features of 9 images, but words of 8"),
        (np.full((9, 2), np.nan), [{"a"}] * 9, "not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    features: np.ndarray, words: list[set[str]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        retrieval(features, words)


class Topical:
    """A stage whose features tell an image's topic, three regions an image; image 7 fails."""

    schema = Columns(feature_width=32, dtype="float16")
    batch_size = 8

    def __init__(self, features: np.ndarray) -> None:
        self.features = features

    def read(self, image_id: str) -> str:
        return image_id

    def __call__(self, items: Sequence[Any]) -> list[ImageRow]:
        return [self.row(image_id) for image_id in items]

    def row(self, image_id: str) -> ImageRow:
        if image_id == "image-007":
            return ImageRow.failed(
                image_id, "unreadable", "torn", feature_width=32, dtype="float16"
            )
        around = self.features[int(image_id[-3:])] + np.array([[-1], [0], [1]])
        return ImageRow(
            image_id=image_id,
            width=8,
            height=8,
            boxes=np.tile(np.array([0, 0, 8, 8], np.float32), (3, 1)),
            scores=np.ones(3, np.float32),
            classes=np.zeros(3, np.int32),
            features=around.astype(np.float16),
        )


def test_a_workspaces_features_are_checked_by_their_means(tmp_path: Path) -> None:
    features, words = photographs(60, meaning=2.0)
    ids = [f"image-{number:03d}" for number in range(60)]
    workspace = Workspace.create(tmp_path, load("datasets", "scenes"))
    write_tables(
        workspace,
        [ImageRecord(name, f"{name}.jpg", 8, 8, "train") for name in ids],
        [
            CaptionRecord(name, name, " ".join(sorted(own)), [*sorted(own), "on", "the"])
            for name, own in zip(ids, words, strict=True)
        ],
    )
    with pytest.raises(MissingError, match="prep extract"):
        check_features(workspace, "boxes", "tiny")
    plan = Plan.make(ids, stage="features", settings={"detector": "boxes", "backbone": "tiny"})
    folder = workspace.features("boxes", "tiny")
    run_plan(plan, folder, lambda: Topical(features), progress=False)

    found = check_features(workspace, "boxes", "tiny", permutations=200)
    kept = [number for number in range(60) if number != 7]
    expected = retrieval(features[kept], [words[number] for number in kept], permutations=200)
    assert found.overlap == pytest.approx(expected.overlap, abs=0.01)
    assert found.images == 59
    assert found.p_value < 0.01
    assert check_features(workspace, "boxes", "tiny", most_images=30).images in (29, 30)
