"""Weights: found by name or file, fingerprinted, and read without running any code in them."""

from __future__ import annotations

import hashlib
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from regionprep.errors import InputError, MismatchError, MissingError, PrepError, StorageError

# Keys under which training scripts keep the network's own tensors.
WRAPPERS = ("state_dict", "model_state_dict", "model")
SHOWN = 5


@dataclass(frozen=True)
class Weights:
    """A file of weights on this machine; `origin` tells where it came from."""

    path: Path
    origin: str

    @classmethod
    def of_file(cls, path: Path) -> Weights:
        """Return the weights in the user's file, or raise MissingError when there is none."""
        if not path.is_file():
            raise MissingError("no such file of weights", where=path, mend="Check --weights.")
        return cls(path.absolute(), "file")

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 of the file."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", where=self.path) from error

    @property
    def provenance(self) -> dict[str, str]:
        """Return what a plan records."""
        return {"origin": self.origin, "sha256": self.sha256}

    def read(self) -> dict[str, Tensor]:
        """Return the tensors by name, on the CPU.

        A pickle is read by torch's weights-only loader, which builds tensors and plain containers
        and calls nothing else. Raises InputError for what needs more, or is no file of weights.
        """
        with refusing_code(self.path):
            safe = self.path.suffix == ".safetensors"
            return _tensors(load_file(self.path) if safe else _load_pickle(self.path), self.path)


def fetch_url(url: str, *, origin: str, hash_prefix: str | None = None) -> Weights:
    """Return the weights at `url`, from torch's cache or downloaded into it.

    Raises MissingError naming the file, the address and the place when that cannot be done.
    """
    name = Path(urllib.parse.urlparse(url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), hash_prefix)
        except (OSError, RuntimeError) as error:
            raise MissingError(
                f"the weights of {origin} are not on this machine and cannot be fetched: {error}",
                mend=f"Fetch {url} where there is a network; put it at {path}, "
                "or give it with --weights FILE.",
            ) from error
    return Weights(path, origin)


def fetch_hub(repository: str, files: Sequence[str], *, origin: str) -> Weights:
    """Return the first of `files` that a repository on the Hugging Face hub has.

    It comes from the hub's cache or is downloaded into it. Raises MissingError naming the file and
    the address when that cannot be done.
    """
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import EntryNotFoundError

    for name in files:
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return Weights(Path(cached), origin)
    reason: Exception | None = None
    for name in files:
        try:
            # Asked first, for the download itself would try for a minute to find a network.
            get_hf_file_metadata(hf_hub_url(repository, name))
            return Weights(Path(hf_hub_download(repository, name)), origin)
        except EntryNotFoundError as error:
            reason = error
        except Exception as error:  # whichever the hub's HTTP library of the day raises
            reason = error
            break
    summary = str(reason).partition("\n")[0]
    raise MissingError(
        f"the weights of {origin} are not on this machine and cannot be fetched: {summary}",
        mend=f"Fetch https://huggingface.co/{repository}/resolve/main/{files[0]} where there is a "
        "network, and give it with --weights FILE.",
    ) from reason


def fit(module: nn.Module, tensors: Mapping[str, Tensor], *, where: object) -> None:
    """Load `tensors` into `module`, or raise MismatchError with the first few that do not fit."""
    differ = differences(module, tensors)
    if differ:
        raise misfit(type(module).__name__, differ, where=where)
    # Strict is checked above: a checkpoint may do without the counters of batch norms.
    module.load_state_dict(dict(tensors), strict=False)


def differences(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return how the names and shapes of `tensors` differ from those of `module`."""
    own = module.state_dict()
    return [
        *(
            f"{name}: {_shape(tensors[name])} in the file, {_shape(own[name])} in the network"
            for name in own
            if name in tensors and tensors[name].shape != own[name].shape
        ),
        *(
            f"{name} is not in the file"
            for name in own
            if name not in tensors and not name.endswith(".num_batches_tracked")
        ),
        *(f"{name} is not in the network" for name in tensors if name not in own),
    ]


def misfit(network: str, differ: Sequence[str], *, where: object) -> MismatchError:
    """Return the error that lists the first few differences."""
    more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    return MismatchError(
        f"these weights do not fit {network}: " + "; ".join(differ[:SHOWN]) + more,
        where=where,
        mend="Give the weights of this very network, or name the network they belong to.",
    )


@contextmanager
def refusing_code(path: Path) -> Iterator[None]:
    """Turn what loaders raise over a file into an InputError or StorageError about it."""
    try:
        yield
    except PrepError:
        raise
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror or error}", where=path) from error
    except (SafetensorError, EOFError) as error:
        raise InputError(f"is no file of weights: {error}", where=path) from error
    except Exception as error:  # a pickle of anything fails in any way
        raise InputError(
            f"holds more than tensors, or is no file of weights; it was not run: {_brief(error)}",
            where=path,
            mend="Save its tensors as safetensors where you trust the file: "
            "safetensors.torch.save_file(network.state_dict(), 'weights.safetensors').",
        ) from error


def _load_pickle(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    with warnings.catch_warnings():
        # torch says of an archive of TorchScript what the error says as well.
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:  # noqa: ANN401 - checked here
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise InputError("holds no tensors by name", where=path)
    strangers = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if strangers:
        raise InputError(f"holds other things than tensors, such as {strangers[0]!r}", where=path)
    parallel = all(name.startswith("module.") for name in content)
    return {name.removeprefix("module.") if parallel else name: content[name] for name in content}


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "GLOBAL" in line or "global" in line), lines[0:1])
    text = told if isinstance(told, str) else " ".join(told)
    return text[:200] or type(error).__name__
