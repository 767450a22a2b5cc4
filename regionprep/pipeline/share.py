"""A share of a plan's shards, cut by hand for a batch system: "0-99/1000"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from regionprep.errors import InputError
from regionprep.pipeline.shards import Plan

_FORM = re.compile(r"(\d+)(?:-(\d+))?/(\d+)", re.ASCII)


@dataclass(frozen=True)
class Share:
    """The shards `first` to `last`, both of them too, of a plan that has `total`."""

    first: int
    last: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return the share that "0-99/1000", or "7/1000" for one shard, names; or InputError."""
        form = _FORM.fullmatch(text)
        if form is None:
            raise InputError(
                f"'{text}' names no shards",
                where="--shards",
                mend="Say 0-99/1000 for the first hundred shards of a plan that has 1000.",
            )
        first, last, total = (int(number or form[1]) for number in form.groups())
        if not first <= last < total:
            raise InputError(
                f"{first}-{last} does not lie in 0-{total - 1}, the shards of a plan of {total}",
                where="--shards",
            )
        return cls(first, last, total)

    @classmethod
    def chosen(cls, text: str | None) -> Share | None:
        """Return the share that a command's option names, None without the option."""
        return None if text is None else cls.parse(text)

    def of(self, plan: Plan) -> range:
        """Return the numbers of the shards; InputError if the plan has another number of them.

        A batch script that counts on another number would leave shards out and never know.
        """
        if plan.shard_count != self.total:
            raise InputError(
                f"the plan has {plan.shard_count:,} shards of {plan.shard_size:,} images, not "
                f"{self.total:,}",
                where=f"--shards {self}",
                mend=f"Name shards of 0-{plan.shard_count - 1}/{plan.shard_count}, or change their "
                "number by --shard-size.",
            )
        return range(self.first, self.last + 1)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}/{self.total}"
