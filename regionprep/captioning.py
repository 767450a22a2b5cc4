"""A run captions images: a split from its shards, or photographs from detection on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regionprep.errors import InputError, MismatchError, MissingError, unknown
from regionprep.workspace import Workspace, write_text

if TYPE_CHECKING:
    from regionprep.pipeline.shards import ImageRow
    from regionprep.pipeline.store import FeatureStore
    from regionprep.training import Run

BATCH = 50
"""Images decoded together."""


@dataclass(frozen=True)
class SplitCaptions:
    """What captioning a split came to."""

    path: Path
    count: int
    blind: int
    empty: int

    def __str__(self) -> str:
        blind = f", {self.blind} of them without any region to see" if self.blind else ""
        empty = f", {self.empty} of them empty" if self.empty else ""
        return f"{self.count} captions in {self.path}{blind}{empty}"


def find_run(workspace: Workspace, name: str | None) -> Path:
    """Return the folder of run `name`, or of the only one that is trained, or begun if none is.

    Raises MissingError when there is none, InputError when several could be meant.
    """
    begun = sorted(workspace.begun_runs())
    if not begun:
        raise MissingError(
            "no run yet", where=workspace.root / "runs", mend="Train one with `prep train`."
        )
    if name is not None and name not in begun:
        raise InputError(unknown("run", name, begun), where=workspace.root / "runs")
    meant = [name] if name else sorted(set(workspace.trained_runs()) & set(begun)) or begun
    if len(meant) > 1:
        raise InputError(
            f"several runs: {', '.join(meant)}",
            where=workspace.root / "runs",
            mend="Name one with --run.",
        )
    return workspace.run(meant[0])


def result_file(run: Path, kind: str, split: str) -> Path:
    """Return where a run keeps its captions or scores of a split; those of test bear no suffix."""
    return run / (f"{kind}.json" if split == "test" else f"{kind}-{split}.json")


def caption_split(
    workspace: Workspace,
    *,
    run: str | None = None,
    split: str = "test",
    beam_size: int = 3,
    device: str = "auto",
) -> SplitCaptions:
    """Caption every image of a split by a run, and write `captions.json` into its folder.

    The whole split is captioned: an image without regions gets what the model says blindly, and
    is counted. Raises MismatchError when the features are not those that the run was trained on.
    """
    from regionprep.evaluation import write_captions
    from regionprep.training import load_run

    loaded = load_run(find_run(workspace, run), device)
    store = run_features(workspace, loaded)
    ids = image_ids(workspace, split)
    captions = dict(zip(ids, _words(loaded, (store[key] for key in ids), beam_size), strict=True))
    path = result_file(loaded.folder, "captions", split)
    write_captions(path, captions)
    blind = sum(len(store[key].boxes) == 0 for key in ids)
    empty = sum(not words for words in captions.values())
    return SplitCaptions(path, len(ids), blind, empty)


def evaluate_split(workspace: Workspace, *, run: str | None = None, split: str = "test") -> str:
    """Score a run's captions of a split, write `scores.json` beside them; return the table."""
    from regionprep.evaluation import evaluate, read_captions, read_references, table

    folder = find_run(workspace, run)
    image_ids(workspace, split)  # A split that is not there has no command that makes captions.
    path = result_file(folder, "captions", split)
    if not path.is_file():
        raise MissingError(
            f"the run has no captions of {split} yet",
            where=folder,
            mend=f"Make them with `prep caption --run {folder.name} --split {split}`.",
        )
    scores = evaluate(read_captions(path), read_references(workspace, split))
    write_text(
        result_file(folder, "scores", split),
        json.dumps({"corpus": scores.corpus, "per_image": scores.per_image}, indent=1) + "\n",
    )
    return table({folder.name: scores})


def caption_photos(
    workspace: Workspace,
    photos: Sequence[Path],
    *,
    run: str | None = None,
    beam_size: int = 3,
    device: str = "auto",
) -> list[tuple[Path, str]]:
    """Return each photograph with its caption, through the run's own detector and backbone.

    Raises InputError for a file that is no usable image, MismatchError when the detector or the
    backbone at hand are not those that the run's features came from.
    """
    from regionprep.pipeline.extract import FeaturePipeline
    from regionprep.pipeline.images import ImageFault, decode
    from regionprep.training import load_run

    images = []
    for photo in photos:
        try:
            images.append(decode(photo, max_pixels=workspace.dataset.images.max_pixels))
        except ImageFault as fault:
            raise InputError(f"{fault.status}: {fault.error}", where=photo) from None
    loaded = load_run(find_run(workspace, run), device)
    pipeline = FeaturePipeline(run_features(workspace, loaded), device=device)
    rows = [
        row
        for photo, image in zip(photos, images, strict=True)
        for row in pipeline([image], [str(photo)])
    ]
    texts = [" ".join(words) or "(an empty caption)" for words in _words(loaded, rows, beam_size)]
    return list(zip(photos, texts, strict=True))


def draw_sheet(
    workspace: Workspace, *, run: str | None = None, split: str = "test", count: int = 12
) -> Path:
    """Draw the first `count` images of a split with boxes, captions and CIDEr-D; return the PNG."""
    from regionprep.evaluation import Entry, contact_sheet, read_captions
    from regionprep.pipeline.images import ImageReader
    from regionprep.pipeline.splits import read_captions as read_told
    from regionprep.pipeline.splits import read_images
    from regionprep.pipeline.store import FeatureStore
    from regionprep.training import RunConfig

    folder = find_run(workspace, run)
    captions = read_captions(result_file(folder, "captions", split))
    shown = [image for image in read_images(workspace) if image.split == split][:count]
    config = RunConfig.load(folder)
    # The cells of a feature map are no boxes to show.
    regions = None if config.grid else FeatureStore(workspace.regions(config.detector))
    seen = regions or FeatureStore(workspace.features(config.detector, config.backbone))
    names = seen.metadata.get("classes", []) if regions else []
    told: dict[str, list[str]] = {image.image_id: [] for image in shown}
    for caption in read_told(workspace):
        if caption.image_id in told:
            told[caption.image_id].append(caption.text)
    scores = _scores_of_images(folder, split)
    reader = ImageReader(workspace)
    entries = []
    for image in shown:
        row = seen[image.image_id]
        if row.ok:
            entry = Entry(
                image.image_id,
                reader.read(image.path),
                row.boxes if regions else row.boxes[:0],
                captions[image.image_id],
                labels=[names[index] for index in row.classes] if names else None,
                references=told[image.image_id],
                score=scores.get(image.image_id),
            )
            entries.append(entry)
    path = result_file(folder, "sheet", split).with_suffix(".png")
    contact_sheet(entries, path)
    return path


def _scores_of_images(run: Path, split: str) -> dict[str, float]:
    """Return CIDEr-D by image id, nothing before `prep evaluate`."""
    path = result_file(run, "scores", split)
    if not path.is_file():
        return {}
    per_image = json.loads(path.read_text(encoding="utf-8"))["per_image"]
    return {image_id: values["cider_d"] for image_id, values in per_image.items()}


def image_ids(workspace: Workspace, split: str) -> list[str]:
    """Return the image ids of a split; InputError names the splits there are."""
    from regionprep.pipeline.splits import read_images

    images = read_images(workspace)
    ids = [image.image_id for image in images if image.split == split]
    if not ids:
        known = {image.split for image in images}
        raise InputError(unknown("split", split, known), where=workspace.images)
    return ids


def run_features(workspace: Workspace, run: Run) -> FeatureStore:
    """Return the features that a run was trained on, or raise MismatchError for others."""
    from regionprep.pipeline.store import FeatureStore

    config = run.config
    store = FeatureStore(workspace.features(config.detector, config.backbone))
    if store.fingerprint != config.features:
        raise MismatchError(
            f"these features ({store.fingerprint[:12]}) are not those that run '{config.name}' "
            f"was trained on ({config.features[:12]})",
            where=store.folder,
            mend=f"Train anew: `{config.command} --force`.",
        )
    return store


def _words(run: Run, rows: Iterable[ImageRow], beam_size: int) -> Iterator[list[str]]:
    """Yield the words of the best caption of each row."""
    from regionprep.models import beam_search
    from regionprep.training.batches import pad_regions

    rows = iter(rows)
    while batch := list(itertools.islice(rows, BATCH)):
        regions = pad_regions(batch).to(run.device)
        found = beam_search(
            run.model, regions, beam_size=beam_size, forbidden=run.vocabulary.forbidden
        )
        for best, *_ in found:
            yield run.vocabulary.decode(best.tokens)
