"""Options that come from YAML, checked against the signature of what they are for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from regionprep.errors import InputError, unknown

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]


def checked(
    target: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    owner: str,
    reserved: Collection[str] = (),
) -> dict[str, Any]:
    """Return `given` as keyword arguments of `target`; `owner` names it in messages.

    `reserved` are the arguments that are not the user's to give.

    Raises InputError for a name that `target` does not take, and for a value that its annotation
    does not allow: "8" is no number of heads, and 1.5 no rate of dropout.
    """
    signature = inspect.signature(target, eval_str=True)
    parameters = {key: it for key, it in signature.parameters.items() if key not in reserved}
    for name in given:
        if name not in parameters:
            raise InputError(unknown(f"argument of {owner}", name, parameters))
    return {
        name: _value(parameters[name].annotation, value, f"argument '{name}' of {owner}")
        for name, value in given.items()
    }


def takes(target: Callable[..., Any], name: str) -> bool:
    """Return whether `target` has an argument of that name."""
    return name in inspect.signature(target).parameters


def require_grid(grid: tuple[int, int] | None, *, owner: str) -> tuple[int, int]:
    """Return a grid's height and width, or raise InputError that says how to make one."""
    if grid is None:
        raise InputError(
            f"{owner} needs a feature map, and these features are sets of regions",
            mend="Make one with `prep extract --backbone NAME --grid`, then train on it with "
            "`--detector feature_map --backbone NAME`.",
        )
    return grid


def _value(annotation: Any, value: Any, place: str) -> Any:  # noqa: ANN401 - of any type
    adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise InputError(f"{place}: {reason} (got {value!r})") from None
