"""A workspace over made-up images, and imports into it."""

from __future__ import annotations

import pytest
from exchange_data import IDS

from regionprep.pipeline.datasets import initialise
from regionprep.pipeline.exchange import run_import
from regionprep.pipeline.store import FeatureStore
from regionprep.pipeline.tables import ImageRecord, write_tables


@pytest.fixture
def workspace_of(tmp_path, photographs):
    """Return a function that gives a workspace over images of these ids."""

    def workspace_of(ids=IDS, sizes=(320, 240), paths="{}.jpg"):
        found = initialise(tmp_path / "workspace", dataset=None, images=photographs, captions=[])
        images = [ImageRecord(name, paths.format(name), *sizes, "train") for name in sorted(ids)]
        write_tables(found, images, None)
        return found

    return workspace_of


@pytest.fixture
def imported(workspace_of):
    """Return a function that imports into a workspace and gives store and outcome."""

    def imported(form, *paths, ids=IDS, workspace=None, backbone="theirs", rule="exact", **options):
        workspace = workspace or workspace_of(ids)
        outcome = run_import(
            workspace,
            form,
            list(paths),
            detector="found",
            backbone=backbone,
            ids=rule,
            progress=False,
            **options,
        )
        return FeatureStore(outcome.features.folder), outcome

    return imported
