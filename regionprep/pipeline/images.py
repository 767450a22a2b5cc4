"""Decode whatever images people have; say what is wrong with the rest."""

from __future__ import annotations


class ImageFault(Exception):  # noqa: N818 - a fault of one image, not an error of the run
    """One image that cannot be used: it becomes a row with this status and reason.

    `width` and `height` are the upright size in pixels where the header told it, else 0.
    """

    def __init__(self, status: str, error: str, *, width: int = 0, height: int = 0) -> None:
        self.status, self.error, self.width, self.height = status, error, width, height
        super().__init__(f"{status}: {error}")
