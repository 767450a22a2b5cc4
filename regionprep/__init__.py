"""Region features for image captioning: detect, extract, shard, train, caption, score."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regionprep.pipeline.joined import JoinedStore as JoinedStore
    from regionprep.pipeline.store import FeatureStore as FeatureStore

__version__ = "0.1.0"
__all__ = ["FeatureStore", "JoinedStore", "__version__"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    """Import what is heavy when it is first asked for (PEP 562)."""
    if name == "FeatureStore":
        from regionprep.pipeline.store import FeatureStore

        return FeatureStore
    if name == "JoinedStore":
        from regionprep.pipeline.joined import JoinedStore

        return JoinedStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
