"""Every image that people have: right pixels, or a fault that says why not."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from regionprep.manifests import MAX_PIXELS, CaptionSource, DatasetManifest, ImageSource
from regionprep.pipeline.images import (
    FORMATS,
    STATUSES,
    Header,
    ImageFault,
    ImageReader,
    decode,
    locate,
    probe,
)
from regionprep.pipeline.names import decode_path, encode_path
from regionprep.workspace import Workspace

# What EXIF's orientation asks of the pixels as stored.
TURNED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


def gradient(height: int = 20, width: int = 30) -> np.ndarray:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    pixels[:5, :5] = 255
    return pixels


def png(
    width: int,
    height: int,
    *,
    depth: int,
    colour: int,
    rows: bytes,
    after: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """A PNG by hand, for what Pillow does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), *after, (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


def status_of(path: Path, **options: int) -> str:
    with pytest.raises(ImageFault) as caught:
        decode(path, **options)
    assert caught.value.status in STATUSES
    assert caught.value.error
    return caught.value.status


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    Image.fromarray(gradient(120, 160)).save(path, quality=95)
    return path


def test_decoded_images_are_writable_rgb_bytes(photo: Path):
    pixels = decode(photo)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (120, 160, 3)
    assert pixels.flags.writeable
    assert pixels.flags.c_contiguous


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif", "avif"])
def test_exif_orientation_turns_pixels_and_size(tmp_path: Path, ending: str, orientation: int):
    path = tmp_path / f"image.{ending}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {
        "tif": {"tiffinfo": {274: orientation}, "compression": "tiff_lzw"},
        "png": {"exif": exif},
        "webp": {"exif": exif, "lossless": True},
    }.get(ending, {"exif": exif, "quality": 100})
    Image.fromarray(gradient()).save(path, **options)
    expected = TURNED[orientation](gradient())
    pixels = decode(path)
    tolerance = 0 if ending in ("png", "webp", "tif") else 40
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).max() <= tolerance
    assert probe(path) == Header(expected.shape[1], expected.shape[0])


def test_orientation_behind_a_pngs_pixels_counts_before_they_are_read(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    rows = b"".join(b"\0" + bytes(30 * 3) for _ in range(20))
    path = tmp_path / "late.png"
    late = (b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    path.write_bytes(png(30, 20, depth=8, colour=2, rows=rows, after=(late,)))
    assert probe(path) == Header(20, 30)
    assert decode(path).shape == (30, 20, 3)


def test_probe_reads_no_pixels(tmp_path: Path):
    path = tmp_path / "header.png"
    whole = png(30, 20, depth=8, colour=2, rows=bytes(20 * 91))
    path.write_bytes(whole[: whole.index(b"IDAT") + 8])
    assert probe(path) == Header(30, 20)
    assert status_of(path) == "truncated"


def test_broken_exif_turns_nothing(tmp_path: Path):
    path = tmp_path / "broken.jpg"
    Image.fromarray(gradient()).save(path, exif=b"Exif\0\0MM\0\x2a\0\0\xff\xff no exif at all")
    assert decode(path).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("1", 1, (255, 255, 255)),
        ("L", 90, (90, 90, 90)),
        ("LA", (90, 255), (90, 90, 90)),
        ("LA", (0, 0), (255, 255, 255)),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", (10, 20, 30, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 128), (127, 127, 127)),
        ("I;16", 65535, (255, 255, 255)),
        ("I;16", 32896, (128, 128, 128)),
        ("I;16", 255, (1, 1, 1)),
    ],
)
def test_modes_of_png_become_rgb(tmp_path: Path, mode: str, colour, expected: tuple[int, ...]):
    path = tmp_path / "image.png"
    Image.new(mode, (4, 3), colour).save(path)
    assert (decode(path) == expected).all()


def test_palettes_become_rgb_and_their_transparency_white(tmp_path: Path):
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.putpixel((0, 0), 0)
    image.save(tmp_path / "opaque.png")
    image.save(tmp_path / "clear.png", transparency=b"\x00\xff")
    image.save(tmp_path / "clear.gif", transparency=0)
    assert tuple(decode(tmp_path / "opaque.png")[0, 0]) == (0, 0, 0)
    for name in ("clear.png", "clear.gif"):
        pixels = decode(tmp_path / name)
        assert tuple(pixels[0, 0]) == (255, 255, 255)
        assert tuple(pixels[1, 1]) == (200, 100, 50)


def test_a_colour_key_is_transparency(tmp_path: Path):
    path = tmp_path / "key.png"
    Image.new("RGB", (4, 3), (1, 2, 3)).save(path, transparency=(1, 2, 3))
    assert (decode(path) == 255).all()


@pytest.mark.parametrize("colour", [0, 2, 4, 6])
def test_sixteen_bit_pngs_are_scaled_in_every_colour_type(tmp_path: Path, colour: int):
    """Values of 0x8000 and more would be clipped to 255 by a plain conversion."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    alpha = colour in (4, 6)
    pixel = struct.pack(f">{channels}H", *([0x8080] * (channels - alpha) + [0xFFFF] * alpha))
    path = tmp_path / "deep.png"
    path.write_bytes(png(4, 3, depth=16, colour=colour, rows=(b"\0" + pixel * 4) * 3))
    assert (decode(path) == 128).all()


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_sixteen_bit_tiffs_are_scaled(tmp_path: Path, order: str):
    path = tmp_path / "deep.tif"
    values = np.array([[0, 257, 32896, 65535]], dtype=order)
    Image.fromarray(values).save(path)
    assert decode(path)[0, :, 0].tolist() == [0, 1, 128, 255]


def test_sixteen_bit_pgm_is_scaled_by_its_own_maximum(tmp_path: Path):
    path = tmp_path / "deep.pgm"
    path.write_bytes(b"P5 3 1 1023\n" + struct.pack(">3H", 0, 512, 1023))
    assert decode(path)[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.25, 0.5, 0.5], [64, 128, 128]),
        ([-10.0, 0.0, 10.0], [0, 128, 255]),
        ([100.0, 150.0, 200.0], [0, 128, 255]),
        ([5.0, 5.0, 5.0], [0, 0, 0]),
        ([0.0, np.nan, 1.0], [0, 0, 255]),
        ([0.0, np.inf, 4.0], [0, 255, 255]),
        ([np.nan, np.nan, np.nan], [0, 0, 0]),
    ],
)
def test_float_tiffs_are_taken_as_they_are_or_stretched(tmp_path: Path, values, expected):
    path = tmp_path / "float.tif"
    Image.fromarray(np.array([values], np.float32)).save(path)
    assert decode(path)[0, :, 0].tolist() == expected


def test_integer_tiffs_are_stretched(tmp_path: Path):
    path = tmp_path / "integers.tif"
    Image.fromarray(np.array([[-(2**31), 0, 2**31 - 1]], np.int32)).save(path)
    assert decode(path)[0, :, 0].tolist() == [0, 128, 255]


def test_cmyk_jpeg_has_the_right_colours(tmp_path: Path):
    path = tmp_path / "cmyk.jpg"
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(path, quality=100)
    assert np.abs(decode(path).astype(int) - (255, 0, 0)).max() <= 3


def test_ycck_jpeg_has_the_right_colours(tmp_path: Path):
    """Photoshop's JPEG of print files: the first three channels are YCbCr, marked by Adobe's byte.

    Red is stored as the YCbCr of cyan, for Adobe stores inks inverted; Pillow inverts on saving.
    """
    luma, blue, red = Image.new("RGB", (1, 1), (0, 255, 255)).convert("YCbCr").getpixel((0, 0))
    stored = (luma, blue, red, 255)
    path = tmp_path / "ycck.jpg"
    Image.new("CMYK", (16, 16), tuple(255 - value for value in stored)).save(path, quality=100)
    data = bytearray(path.read_bytes())
    marker = data.index(b"Adobe") + 11
    assert data[marker] == 0
    data[marker] = 2
    path.write_bytes(data)
    assert np.abs(decode(path).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("ending", ["gif", "webp", "png", "tif"])
def test_the_first_frame_of_several_is_taken_and_noted(tmp_path: Path, ending: str):
    path = tmp_path / f"frames.{ending}"
    frames = [Image.new("RGB", (8, 6), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    options = {"lossless": True} if ending == "webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)
    assert (decode(path) == (255, 0, 0)).all()
    assert probe(path) == Header(8, 6, animated=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_every_listed_format_is_decoded(tmp_path: Path, kind: str):
    path = tmp_path / "image"
    image = Image.new("RGB", (16, 16), (200, 100, 50))
    if kind == "QOI":  # two runs of one colour: Pillow of 11.3 cannot write it
        pixels = b"\xfe\xc8\x64\x32" + bytes([0xC0 | 61]) * 4 + bytes([0xC0 | 6])
        path.write_bytes(b"qoif" + struct.pack(">IIBB", 16, 16, 3, 0) + pixels + bytes(7) + b"\1")
    else:
        image.save(path, format=kind)
    assert np.abs(decode(path).astype(int) - (200, 100, 50)).max() <= 12


def test_a_wrong_extension_does_not_matter(photo: Path):
    assert decode(photo.rename(photo.with_suffix(".png"))).shape == (120, 160, 3)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", "not_an_image"),
        (b"this is text, not a photograph\n" * 100, "not_an_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not_an_image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not_an_image"),
        (b"\xff\xd8\xff", "not_an_image"),
        (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00", "not_an_image"),
    ],
)
def test_what_is_no_image_is_said_to_be_none(tmp_path: Path, content: bytes, status: str):
    path = tmp_path / "image.jpg"
    path.write_bytes(content)
    assert status_of(path) == status


def test_a_missing_file_a_folder_and_a_pipe_have_their_status(tmp_path: Path):
    folder, pipe, dangling = tmp_path / "folder.jpg", tmp_path / "pipe.jpg", tmp_path / "link.jpg"
    folder.mkdir()
    os.mkfifo(pipe)
    dangling.symlink_to(tmp_path / "nowhere.jpg")
    assert status_of(tmp_path / "none.jpg") == "missing"
    assert status_of(dangling) == "missing"
    assert status_of(folder) == "not_a_file"
    assert status_of(pipe) == "not_a_file"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_the_system_refuses_is_unreadable(photo: Path, monkeypatch, number: int):
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    assert status_of(photo) == "unreadable"


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_cut_jpeg_is_truncated_and_keeps_its_size(photo: Path, options: dict[str, bool]):
    Image.fromarray(gradient(120, 160)).save(photo, **options)
    photo.write_bytes(photo.read_bytes()[: photo.stat().st_size * 2 // 3])
    with pytest.raises(ImageFault) as caught:
        decode(photo)
    fault = caught.value
    assert (fault.status, fault.width, fault.height) == ("truncated", 160, 120)


def test_a_flipped_bit_in_a_png_is_damage(tmp_path: Path):
    path = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    assert status_of(path) in ("damaged", "truncated")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("samples")
    files = []
    for ending in ("jpg", "png", "webp", "gif", "tif", "bmp", "avif"):
        path = folder / f"image.{ending}"
        Image.fromarray(gradient()).save(path)
        files.append(path.read_bytes())
    return files


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_anywhere_gives_pixels_or_a_fault(samples: list[bytes], tmp_path: Path, data):
    content = bytearray(data.draw(st.sampled_from(samples)))
    content = content[: data.draw(st.integers(0, len(content)))]
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "image"
    path.write_bytes(content)
    try:
        pixels = decode(path, max_pixels=10_000)
    except ImageFault as fault:
        assert fault.status in STATUSES
    else:
        assert pixels.dtype == np.uint8
        assert pixels.ndim == 3
        assert pixels.shape[2] == 3
        header = probe(path, max_pixels=10_000)
        assert (header.height, header.width) == pixels.shape[:2]


@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (12_000, 12_000)])
def test_a_decompression_bomb_is_refused_from_its_header(tmp_path: Path, width: int, height: int):
    path = tmp_path / "bomb.png"
    path.write_bytes(png(width, height, depth=1, colour=0, rows=bytes(1000)))
    assert width * height > MAX_PIXELS
    assert status_of(path) == "too_large"
    with pytest.raises(ImageFault, match="too_large"):
        probe(path)


def test_the_limit_is_in_pixels_and_can_be_raised(photo: Path, monkeypatch):
    with pytest.raises(ImageFault, match="160 x 120 pixels, more than max_pixels = 19199"):
        decode(photo, max_pixels=19_199)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow refuses from 201 pixels on
    assert decode(photo, max_pixels=19_200).shape == (120, 160, 3)


def test_pillows_own_limit_is_never_lowered(photo: Path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**9)
    decode(photo, max_pixels=20_000)
    assert Image.MAX_IMAGE_PIXELS == 10**9


@pytest.mark.parametrize("shape", [(1, 1), (20_000, 1), (1, 20_000)])
def test_extreme_shapes_work(tmp_path: Path, shape: tuple[int, int]):
    path = tmp_path / "thin.png"
    Image.new("RGB", shape).save(path)
    assert decode(path).shape == (shape[1], shape[0], 3)


def test_warnings_of_pillow_do_not_leak_from_any_thread(photo: Path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)  # warns of 19,200 pixels
    with pytest.warns(Image.DecompressionBombWarning):
        Image.open(photo).close()
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as threads:
        shapes = {image.shape for image in threads.map(decode, [photo] * 64)}
    assert shapes == {(120, 160, 3)}
    assert list(warnings.filters) == before


def test_a_fault_survives_the_way_between_processes():
    fault = pickle.loads(pickle.dumps(ImageFault("truncated", "ends early", width=3, height=4)))
    assert (fault.status, fault.error, fault.width, fault.height) == (
        "truncated",
        "ends early",
        3,
        4,
    )


@pytest.mark.parametrize("path", ["../secret.jpg", "a/../../secret.jpg", "/etc/passwd", "a\0b.jpg"])
def test_paths_that_lead_out_of_the_root_are_refused(tmp_path: Path, path: str):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    root = tmp_path / "images"
    root.mkdir()
    with pytest.raises(ImageFault, match="outside_root"):
        locate(root, path)


def test_symlinks_that_lead_out_of_the_root_are_refused(photo: Path, tmp_path: Path):
    root = tmp_path / "images"
    (root / "inner").mkdir(parents=True)
    (root / "out.jpg").symlink_to(photo)
    (root / "away").symlink_to(tmp_path)
    (root / "loop.jpg").symlink_to("loop.jpg")
    for path in ("out.jpg", "away/photo.jpg"):
        with pytest.raises(ImageFault, match="outside_root"):
            locate(root, path)
    with pytest.raises(ImageFault, match="unreadable"):
        decode(locate(root, "loop.jpg"))


def test_a_root_that_is_a_symlink_and_symlinks_inside_it_work(photo: Path, tmp_path: Path):
    (tmp_path / "root").symlink_to(tmp_path)
    (tmp_path / "again.jpg").symlink_to("photo.jpg")
    assert decode(locate(tmp_path / "root", "again.jpg")).shape == (120, 160, 3)


ODD_NAMES = [
    b"with space.jpg",
    b'quo\'te "s".jpg',
    b"new\nline.jpg",
    b"tab\t.jpg",
    b"-rf.jpg",
    b"100%.jpg",
    b"bytes:looks like an escape%41.jpg",
    "émoji-😀.jpg".encode(),
    b"latin-\xe9.jpg",
    b"x" * 251 + b".jpg",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_work_and_are_stored_as_utf8(photo: Path, tmp_path: Path, name: bytes):
    root = tmp_path / "images"
    root.mkdir()
    (root / os.fsdecode(name)).write_bytes(photo.read_bytes())
    stored = encode_path(os.fsdecode(name))
    assert stored.encode()
    assert decode(locate(root, stored)).shape == (120, 160, 3)


@given(st.binary(min_size=1, max_size=40))
def test_escaped_names_come_back(name: bytes):
    path = os.fsdecode(name)
    assert decode_path(encode_path(path)) == path
    encode_path(path).encode()


def reader_of(root: Path, source: ImageSource) -> ImageReader:
    return ImageReader(Workspace(root, DatasetManifest(name="x", summary="x", images=source)))


def test_the_reader_reads_below_the_manifests_root_with_its_limit(photo: Path, tmp_path: Path):
    reader = reader_of(tmp_path / "workspace", ImageSource(root=str(tmp_path)))
    assert pickle.loads(pickle.dumps(reader)).read("photo.jpg").shape == (120, 160, 3)
    assert reader.probe("photo.jpg") == Header(160, 120)
    strict = reader_of(tmp_path, ImageSource(root="", max_pixels=100))
    with pytest.raises(ImageFault, match="too_large"):
        strict.read("photo.jpg")


def test_the_reader_draws_scenes_by_their_id():
    from regionprep.scenes import draw, scene

    source = ImageSource(kind="scenes", seed=3)
    workspace = Workspace(
        Path(), DatasetManifest(name="x", summary="x", images=source, captions=CaptionSource())
    )
    reader = ImageReader(workspace)
    pixels = reader.read("scene-000007")
    assert (pixels == draw(scene(3, 7))).all()
    header = reader.probe("scene-000007")
    assert (header.height, header.width) == pixels.shape[:2]
    for name in ("scene-7", "scene-x", "photo.jpg", "../scene-000007"):
        with pytest.raises(ImageFault, match="missing"):
            reader.read(name)


def test_png_text_bombs_are_faults(tmp_path: Path):
    path = tmp_path / "text.png"
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "a" * (PngImagePlugin.MAX_TEXT_CHUNK + 1), zip=True)
    Image.new("RGB", (4, 4)).save(path, pnginfo=info)
    assert status_of(path) in ("damaged", "truncated", "too_large")
