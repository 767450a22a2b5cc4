"""Decode whatever images people have; say what is wrong with the rest.

What is decoded, and how:

- EXIF orientation is applied: pixels, sizes and boxes are those of the upright image.
- Transparency is laid over white. Palettes, grey, 1-bit, CMYK and YCCK become RGB; colour profiles
  are ignored, as the models' own preprocessing ignores them.
- 16-bit values are scaled to 8, never clipped. Floats within [0, 1] are taken as they are; other
  floats and 32-bit integers have no fixed range and are stretched from their own minimum to their
  own maximum.
- Of several frames or pages the first is taken, and `Header.animated` says so.
- An image of more than `max_pixels` is refused from its header, before any pixel is decoded.
"""

from __future__ import annotations

import errno
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from regionprep.manifests import MAX_PIXELS
from regionprep.pipeline.names import decode_path

if TYPE_CHECKING:
    from regionprep.workspace import Workspace

# Photographs' formats that Pillow decodes itself. Not EPS, which starts another program, nor
# formats without a signature, for which any text could pass. (MPO is opened as JPEG.)
FORMATS = (
    *("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000"),
    *("PNG", "PPM", "QOI", "SGI", "TIFF", "WEBP"),
)
SUFFIXES = frozenset(
    (
        *(".apng", ".avif", ".avifs", ".bmp", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe"),
        *(".jpeg", ".jpf", ".jpg", ".jpx", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm"),
        *(".qoi", ".rgb", ".sgi", ".tif", ".tiff", ".webp"),
    )
)
BACKGROUND = (255, 255, 255, 255)
ORIENTATION = 0x0112
BITS_PER_SAMPLE = 258
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
STATUSES = {
    "missing": "there is no such file",
    "outside_root": "the path leads out of the folder of images",
    "not_a_file": "a folder, a pipe or a device",
    "unreadable": "the system refuses to read it",
    "not_an_image": "no decoder knows it",
    "too_large": "more pixels than the manifest's max_pixels, or than memory holds",
    "truncated": "the file ends before the image does",
    "damaged": "the decoder fails on it",
    "changed": "another size than when its regions were found",
    "crashed": "reading it kills the process",
}

Pixels = NDArray[np.uint8]


class ImageFault(Exception):  # noqa: N818 - a fault of one image, not an error of the run
    """One image that cannot be used: it becomes a row with this status and reason.

    `status` is one of STATUSES. `width` and `height` are the upright size in pixels where the
    header told it, else 0.
    """

    def __init__(self, status: str, error: str, *, width: int = 0, height: int = 0) -> None:
        self.status, self.error, self.width, self.height = status, error, width, height
        super().__init__(f"{status}: {error}")

    def __reduce__(self) -> tuple[object, ...]:
        return _fault, (self.status, self.error, self.width, self.height)


def _fault(status: str, error: str, width: int, height: int) -> ImageFault:
    return ImageFault(status, error, width=width, height=height)


@dataclass(frozen=True)
class Header:
    """What an image's header tells: its upright size in pixels, and whether frames follow."""

    width: int
    height: int
    animated: bool = False


class ImageReader:
    """Reads a workspace's images by the paths that `images.parquet` gives them.

    It holds no open file and can be sent to other threads and processes.
    """

    def __init__(self, workspace: Workspace) -> None:
        source = workspace.dataset.images
        self.kind, self.seed, self.max_pixels = source.kind, source.seed, source.max_pixels
        self.root = workspace.image_root()

    def read(self, path: str) -> Pixels:
        """Return the image at `path` as uint8 (height, width, 3), RGB and upright.

        Raises ImageFault when it cannot be used.
        """
        if self.kind == "scenes":
            return self._draw(path)
        return decode(self.locate(path), max_pixels=self.max_pixels)

    def probe(self, path: str) -> Header:
        """Return the header of the image at `path`, or raise ImageFault."""
        if self.kind == "scenes":
            from regionprep.scenes import HEIGHT, WIDTH

            return Header(WIDTH, HEIGHT)
        return probe(self.locate(path), max_pixels=self.max_pixels)

    def locate(self, path: str) -> Path:
        """Return where `path` lies on this machine; raise ImageFault if outside the root."""
        return locate(self.root, path)

    def _draw(self, path: str) -> Pixels:
        from regionprep.scenes import draw, image_id, scene

        index = path.rpartition("-")[2]
        if not index.isdecimal() or image_id(int(index)) != path:
            raise ImageFault("missing", f"'{path}' names no scene")
        return draw(scene(self.seed, int(index)))


def locate(root: Path, path: str) -> Path:
    """Return the file that a table's `path` names below `root`.

    Raises ImageFault `outside_root` for absolute paths, `..`, and symlinks that lead elsewhere.
    """
    inside = Path(decode_path(path))
    if inside.is_absolute() or ".." in inside.parts or "\0" in str(inside):
        raise ImageFault("outside_root", f"'{path}' does not stay inside the folder of images")
    file = root / inside
    try:
        real = file.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks, before 3.13
        raise ImageFault("unreadable", f"'{path}' cannot be followed: {error}") from None
    if not real.is_relative_to(root.resolve()):
        raise ImageFault("outside_root", f"'{path}' is a symlink out of the folder of images")
    return file


def decode(file: Path, *, max_pixels: int = MAX_PIXELS) -> Pixels:
    """Return the image in `file` as uint8 (height, width, 3), RGB and upright.

    Raises ImageFault when it cannot be used.
    """
    with _opened(file, max_pixels) as (image, orientation):
        pixels = _rgb(image)
        if orientation in UPRIGHT:
            pixels = pixels.transpose(UPRIGHT[orientation])
        return np.array(pixels)


def probe(file: Path, *, max_pixels: int = MAX_PIXELS) -> Header:
    """Return the upright size of the image in `file` from its header alone, or raise ImageFault."""
    with _opened(file, max_pixels) as (image, orientation):
        # The further pictures of an MPO are previews and depth maps, not frames.
        animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
        return Header(*_upright_size(image, orientation), animated)


@contextmanager
def _opened(path: Path, max_pixels: int) -> Iterator[tuple[Image.Image, int]]:
    """Open an image and its orientation; whatever fails inside becomes an ImageFault."""
    width = height = 0
    _raise_pillow_limit(max_pixels)
    try:
        with ExitStack() as stack:
            stack.enter_context(_quiet_pillow())
            file = stack.enter_context(_open_file(path))
            image = stack.enter_context(Image.open(file, formats=FORMATS))
            orientation = _orientation(image, file)
            width, height = _upright_size(image, orientation)
            if width * height > max_pixels:
                raise ImageFault(
                    "too_large",
                    f"{width} x {height} pixels, more than max_pixels = {max_pixels}; "
                    "`prep splits --max-pixels` raises it",
                    width=width,
                    height=height,
                )
            yield image, orientation
    except ImageFault:
        raise
    except Exception as error:  # decoders of foreign bytes raise anything
        status, reason = _explain(error, path)
        raise ImageFault(status, reason, width=width, height=height) from error


def _open_file(path: Path) -> BinaryIO:
    # A pipe would block for ever when opened, so the kind is asked for first.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ImageFault("not_a_file", f"'{path.name}' is a folder, a pipe or a device")
    return path.open("rb")


def _explain(error: Exception, path: Path) -> tuple[str, str]:
    """Return status and reason for what a file or Pillow raised."""
    reason = str(error) or type(error).__name__
    match error:
        case UnidentifiedImageError():
            empty = path.stat().st_size == 0
            return "not_an_image", "the file is empty" if empty else "no decoder knows this file"
        case Image.DecompressionBombError():
            return "too_large", reason
        case MemoryError():
            return "too_large", "decoding it needs more memory than there is"
        case OSError(errno=errno.ENOENT | errno.ENOTDIR):
            return "missing", f"there is no '{path.name}'"
        case OSError(errno=int()):
            return "unreadable", error.strerror or reason
    if isinstance(error, EOFError) or "truncat" in reason.lower():
        return "truncated", reason
    return "damaged", reason


def _raise_pillow_limit(max_pixels: int) -> None:
    """Let Pillow open what the manifest allows; its own limit is one for the whole process.

    Pillow refuses images of more than twice MAX_IMAGE_PIXELS. The limit is never lowered here.
    """
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = (max_pixels + 1) // 2


class _Quiet:
    """Ignores Pillow's warnings while any thread decodes.

    `warnings.catch_warnings` belongs to the process, so threads that entered and left it on their
    own would restore each other's filters: the first in installs it, the last out restores.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._caught = warnings.catch_warnings()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._caught.__exit__(None, None, None)


_quiet_pillow = _Quiet()


def _upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if orientation >= 5 else (width, height)


def _orientation(image: Image.Image, file: BinaryIO) -> int:
    """Return the EXIF orientation that is still to be applied, 1 to 8."""
    if image.format == "TIFF":
        return 1  # Pillow turns TIFF itself, size and pixels
    if image.format == "PNG" and (exif := _late_exif(file)):
        image.info.setdefault("exif", exif)
    try:
        # Not image.getexif(): PNG's own decodes the whole image first.
        value = Image.Image.getexif(image).get(ORIENTATION, 1)
    except Exception:  # EXIF that cannot be read turns nothing
        return 1
    return value if value in UPRIGHT else 1


def _late_exif(file: BinaryIO) -> bytes:
    """Return a PNG's eXIf chunk, which may stand behind the pixels; b"" when there is none."""
    position = file.tell()
    try:
        file.seek(8)
        while len(header := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            if kind == b"eXIf":
                return file.read(length)
            file.seek(length + 4, 1)
        return b""
    finally:
        file.seek(position)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format != "TIFF"):
        return _from_integers(image)
    if image.mode in ("I", "F"):
        return _stretched(image)
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, BACKGROUND)
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    return image.convert("RGB")


def _from_integers(image: Image.Image) -> Image.Image:
    """Scale grey values of 16 bits (or of the fewer that a TIFF declares) to 8."""
    bits = 16
    if image.format == "TIFF":
        bits = dict(getattr(image, "tag_v2", {})).get(BITS_PER_SAMPLE, (16,))[0]
    full = (1 << bits) - 1
    values = np.asarray(image).astype(np.uint32)
    grey = (values * np.uint32(255) + np.uint32(full // 2)) // np.uint32(full)
    return Image.fromarray(np.minimum(grey, 255).astype(np.uint8)).convert("RGB")


def _stretched(image: Image.Image) -> Image.Image:
    """Take values within [0, 1] as they are; stretch others over their own finite range."""
    values = np.asarray(image).astype(np.float64 if image.mode == "I" else np.float32)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / (high - low or 1.0)
    return Image.fromarray(np.rint(scaled * 255).astype(np.uint8)).convert("RGB")
