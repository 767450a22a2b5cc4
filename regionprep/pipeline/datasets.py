"""Make a workspace: from a shipped dataset, the user's own YAML, or a folder of images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from regionprep import manifests
from regionprep.errors import InputError, ManifestError, MissingError, unknown
from regionprep.manifests import CaptionSource, DatasetManifest, Defaults, Download
from regionprep.pipeline import captions as caption_files
from regionprep.pipeline.splits import walk
from regionprep.workspace import Workspace


def initialise(
    root: Path,
    *,
    dataset: str | None = None,
    images: Path | None = None,
    captions: Sequence[Path] = (),
) -> Workspace:
    """Write `workspace.yaml` into `root` and return the workspace.

    `dataset` is a name in `manifests/datasets/` or a YAML file; `images` and `captions` take the
    place of what it names. Without a dataset, `images` alone is a workspace for detection and
    extraction, and `captions` make it a dataset.

    Paths given here count from the current folder, those in the user's YAML from its folder, those
    in a shipped manifest from the workspace. They are stored so that the workspace works from
    everywhere: relative to the workspace if they lie in it, else absolute.

    Raises InputError for options that do not go together and for files of unknown formats, and
    MissingError with what to download where a dataset's files are not there. Nothing is written
    then.
    """
    root = root.absolute()
    manifest = _chosen(dataset, images, captions)
    base = Path(dataset).absolute().parent if dataset and _is_file(dataset) else root
    if manifest.images.kind == "folder":
        manifest = _resolved(manifest, base, root, images, captions)
        _check_present(manifest, root)
        manifest = _detected(manifest, root)
    elif images is not None or captions:
        raise InputError(
            f"'{manifest.name}' is drawn, so --images and --captions do not go with it"
        )
    return Workspace.create(root, manifest)


def _is_file(dataset: str) -> bool:
    return Path(dataset).suffix in (".yaml", ".yml")


def _chosen(dataset: str | None, images: Path | None, captions: Sequence[Path]) -> DatasetManifest:
    if dataset is not None:
        manifest: DatasetManifest = manifests.load("datasets", dataset)
        if _is_file(dataset):  # those that ship are right
            _check_defaults(manifest.defaults, dataset)
        return manifest
    if images is None:
        raise InputError(
            "names neither a dataset nor a folder of images",
            where="prep init",
            mend=f"Give --dataset NAME ({', '.join(manifests.names('datasets'))} or your own YAML) "
            "or --images FOLDER.",
        )
    folder = images.absolute()
    name = re.sub(r"[^A-Za-z0-9_.\-]+", "-", folder.name).lstrip("_.-") or "images"
    what = "Images and captions" if captions else "Images"
    return DatasetManifest(name=name, summary=f"{what} in the folder '{name}'.")


def _check_defaults(defaults: Defaults, where: str) -> None:
    """Refuse names that no later command would know, all together.

    A YAML in the place of a name is read by the command that uses it.
    """
    checks = {"detector": _check_detector, "backbone": _check_backbone, "model": _check_model}
    faults = []
    for key, check in checks.items():
        name = getattr(defaults, key)
        if name is None or _is_file(name):
            continue
        try:
            check(defaults)
        except ManifestError as fault:
            faults.append(f"defaults.{key}: {fault.what}")
    if faults:
        raise ManifestError("; ".join(faults), where=where)


def _check_detector(defaults: Defaults) -> None:
    manifests.load("detectors", defaults.detector)


def _check_backbone(defaults: Defaults) -> None:
    from regionprep.pipeline import backbones

    backbones.manifest(str(defaults.backbone))


def _check_model(defaults: Defaults) -> None:
    presets = {"base", *manifests.load("models", defaults.model).presets}
    if defaults.preset not in presets:
        raise ManifestError(
            f"{unknown('preset', defaults.preset, presets)} (of '{defaults.model}')"
        )


def _resolved(
    manifest: DatasetManifest,
    base: Path,
    root: Path,
    images: Path | None,
    captions: Sequence[Path],
) -> DatasetManifest:
    """Return the manifest with paths that work from everywhere."""
    folder = images.absolute() if images is not None else base / manifest.images.root
    if images is None and not manifest.images.root:
        raise InputError(
            "names no folder of images", where=manifest.name, mend="Give it with --images FOLDER."
        )
    source = manifest.captions
    if captions:
        source = CaptionSource(files=tuple(_stored(file.absolute(), root) for file in captions))
    elif source is not None:
        files = tuple(_stored(base / file, root) for file in source.files)
        source = source.model_copy(update={"files": files})
    where = manifest.images.model_copy(update={"root": _stored(folder, root)})
    return manifest.model_copy(update={"images": where, "captions": source})


def _stored(path: Path, root: Path) -> str:
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def _check_present(manifest: DatasetManifest, root: Path) -> None:
    files = [root / file for file in _files(manifest)]
    absent = [file for file in files if not file.is_file()]
    folder = root / manifest.images.root
    _check_kinds(folder, files)
    if not folder.is_dir():
        absent.insert(0, folder)
    elif next(walk(folder), None) is None:
        raise InputError("is an empty folder", where=folder, mend="Put the images into it.")
    if absent:
        raise MissingError(
            f"not there: {', '.join(str(path) for path in absent)}",
            where=manifest.name,
            mend=_how_to_get(manifest, root),
        )


def _check_kinds(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a file of images and a folder of captions: both are there, but not what is meant."""
    if folder.exists() and not folder.is_dir():
        raise InputError(
            "is a file, not a folder", where=folder, mend="Give the folder of images: --images."
        )
    for file in files:
        if file.is_dir():
            raise InputError(
                "is a folder, not a file", where=file, mend="Give the file of captions: --captions."
            )


def _files(manifest: DatasetManifest) -> tuple[str, ...]:
    return manifest.captions.files if manifest.captions is not None else ()


def _how_to_get(manifest: DatasetManifest, root: Path) -> str:
    """Return what to download and where to put it, or that the paths are to be checked."""
    if not manifest.downloads:
        return "Check --images and --captions, or the paths in the YAML."
    lines = ["Download and unpack:"]
    lines += [f"  {_download_line(download, root)}" for download in manifest.downloads]
    lines += [
        "or say where they are: --images FOLDER --captions FILE.",
        f"Licence: {manifest.licence} See {manifest.homepage}",
    ]
    return "\n  ".join(lines)


def _download_line(download: Download, root: Path) -> str:
    facts = [f"{download.bytes:,} bytes"] if download.bytes is not None else []
    facts += [f"md5 {download.md5}"] if download.md5 else []
    facts += [f"sha256 {download.sha256}"] if download.sha256 else []
    about = f" ({', '.join(facts)})" if facts else ""
    return f"{download.url}{about} -> {root / download.unpack}"


def _detected(manifest: DatasetManifest, root: Path) -> DatasetManifest:
    """Return the manifest with the format of its caption files, which must be one and the same."""
    source = manifest.captions
    if source is None:
        return manifest
    kinds = {file: caption_files.detect(root / file) for file in source.files}
    if len(set(kinds.values())) != 1:
        found = ", ".join(f"'{file}' is {kind}" for file, kind in kinds.items()) or "no file"
        raise InputError(
            f"caption files must be of one format: {found}",
            where=manifest.name,
            mend="Give files of one format with --captions.",
        )
    kind = next(iter(kinds.values()))
    if source.kind not in (None, kind):
        raise InputError(
            f"is {kind}, not {source.kind} as the manifest says", where=source.files[0]
        )
    return manifest.model_copy(update={"captions": CaptionSource(kind=kind, files=source.files)})
