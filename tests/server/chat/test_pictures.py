"""Pictures in data URLs: decoding, and refusals."""

import base64
import struct
import tracemalloc
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_serve.server.chat import PromptError
from qwen_serve.server.chat.messages import check_messages
from qwen_serve.server.chat.pictures import HEAD, MAX_IMAGES, MAX_PIXELS, GivenPicture

WHERE = "messages[0].content[1]"


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def given(data: bytes | str, detail: str | None = None) -> GivenPicture:
    address = data if isinstance(data, str) else url(data)
    part = {"image_url": {"url": address} | ({"detail": detail} if detail else {})}
    return GivenPicture.of_part(part, WHERE)


def halves(mode: str = "RGB") -> Image.Image:
    """A picture of 6 x 4 pixels, red above and blue below."""
    image = Image.new("RGB", (6, 4), (255, 0, 0))
    image.paste((0, 0, 255), (0, 2, 6, 4))
    return image.convert(mode)


RED, BLUE, WHITE = [255, 0, 0], [0, 0, 255], [255, 255, 255]


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "JPEG"])
def test_each_format(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    pixels = given(saved(halves(), kind, **options)).pixels(32)
    assert (pixels.shape, pixels.dtype) == ((4, 6, 3), np.uint8)
    near = 60 if kind == "JPEG" else 0
    assert np.abs(pixels[0, 0].astype(int) - RED).max() <= near
    assert np.abs(pixels[3, 5].astype(int) - BLUE).max() <= near


def test_a_progressive_jpeg() -> None:
    assert np.abs(given(scans(20)).pixels(32)[0, 0].astype(int) - RED).max() <= 5


def test_it_is_turned_as_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera stood on its right side
    pixels = given(saved(halves(), "PNG", exif=exif)).pixels(32)
    assert pixels.shape == (6, 4, 3)
    assert pixels[0, 3].tolist() == RED
    assert pixels[0, 0].tolist() == BLUE


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue", "green")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50, loop=0)
    assert given(data).pixels(32)[0, 0].tolist() == RED


@pytest.mark.parametrize("mode", ["L", "P", "1", "CMYK", "YCbCr"])
def test_other_colours(mode: str) -> None:
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    pixels = given(saved(halves(mode), kind)).pixels(32)
    assert pixels.shape == (4, 6, 3)
    if mode in ("P", "CMYK"):
        assert np.abs(pixels[0, 0].astype(int) - RED).max() < 60


def test_sixteen_bits_are_scaled() -> None:
    deep = Image.fromarray(np.array([[0, 0x8000, 0xFFFF]], np.uint16))
    assert given(saved(deep)).pixels(32)[0, :, 0].tolist() == [0, 0x80, 0xFF]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 0, 255))
    pixels = given(saved(clear.convert(mode), "PNG")).pixels(32)
    assert pixels[0].tolist() == [WHITE, [0, 0, 0]]


def test_little_detail_is_a_small_picture() -> None:
    data = saved(Image.new("RGB", (2048, 1024)))
    assert given(data, "high").pixels(32).shape == (1024, 2048, 3)
    height, width, _ = given(data, "low").pixels(32).shape
    assert height * width <= 512 * 512
    assert abs(width - 2 * height) <= 2
    assert given(saved(Image.new("RGB", (300, 400))), "low").pixels(32).shape == (400, 300, 3)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + data + chunk(b"IEND", b"")


def scans(n: int) -> bytes:
    """A progressive JPEG with many copies of its last scan, which decoders accept."""
    data = saved(Image.new("RGB", (64, 64), "red"), "JPEG", progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * n + b"\xff\xd9"


BAD: dict[str, tuple[str | bytes, str]] = {
    "an address": ("https://example.com/a.png", "must be a data URL .*; addresses are not fetched"),
    "a file": ("file:///etc/passwd", "must be a data URL"),
    "no base64": ("data:image/png,abc", "must be a data URL in base64"),
    "bad base64": ("data:image/png;base64,a$b!", "is not valid base64"),
    "nothing": ("data:image/png;base64,", "is no picture of a known format: JPEG, PNG, WEBP, GIF"),
    "a text": (b"not a picture at all", "is no picture of a known format"),
    "another format": (saved(halves(), "BMP"), "is no picture of a known format"),
    "cut short": (saved(Image.effect_noise((64, 64), 50), "PNG")[:-900], "could not be decoded: "),
    "cut in its head": (saved(halves(), "JPEG")[:30], "(could not be decoded|is no picture)"),
    "a bomb": (bomb(50_000, 50_000), r"could not be decoded: Image size \(2500000000 pixels\) exceeds"),
    "a large bomb": (bomb(8192, 4097), "has 8192 x 4097 pixels; at most 33,554,432 are decoded"),
    "promises": (bomb(3000, 3000), "could not be decoded: "),
    "a bomb of time": (scans(1000), "has 1,010 scans; a JPEG may have at most 100"),
    "a line": (saved(Image.new("L", (10_000, 1))), "has 10000 x 1 pixels; one side may be at most 200 times"),
}


@pytest.mark.parametrize(
    ("width", "height", "fields"),
    [
        (300, 200, {}),
        (600, 1200, {"detail": "low"}),
        (640, 64, {"max_pixels": 9000}),
        (40, 30, {"min_pixels": 9000}),
    ],
)
def test_its_size_is_known_before_it_is_decoded(width: int, height: int, fields: dict[str, Any]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    for turned in (False, True):
        data = saved(Image.new("RGB", (width, height)), "JPEG", **({"exif": exif} if turned else {}))
        bounds = {name: value for name, value in fields.items() if name != "detail"}
        shown = {"image_url": {"url": url(data), "detail": fields.get("detail")}, **bounds}
        picture = GivenPicture.of_part(shown, WHERE)
        rows, columns, _ = picture.pixels(32).shape
        assert picture.size(32) == ((rows, columns) if turned else (columns, rows))


def noisy(side: int = 400) -> Image.Image:
    """A picture whose file is larger than what is looked at for its size."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side + 1, 3), np.uint8))


HEADS = {
    "a PNG": (saved(noisy()), 1),
    "a JPEG": (saved(noisy(), "JPEG", quality=95), 1),
    "a GIF": (saved(noisy(), "GIF"), 1),
    "a JPEG behind a long comment": (saved(noisy(), "JPEG", exif=b"Exif\0\0" + b"x" * 65_000), 2),
    "a WebP, which is read whole": (saved(noisy(), "WEBP", lossless=True), 2),
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_head_of_a_file_tells_its_size(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, times = HEADS[kind]
    decoded: list[int] = []

    def decode(text: bytes, *, validate: bool) -> bytes:
        decoded.append(len(text))
        return base64.b64decode(text, validate=validate)

    monkeypatch.setattr("qwen_serve.server.chat.pictures.b64decode", decode)
    assert given(data).size(32) == (401, 400)
    assert len(decoded) == times
    assert decoded[0] == HEAD


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused_is_named(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(PromptError, match=rf"url: {message}") as raised:
        given(data).pixels(32)
    assert raised.value.param == f"{WHERE}.image_url.url"


def test_blanks_in_base64_are_passed_over() -> None:
    """Without a string for each piece between them: nobody else runs while these are made."""
    spaced = " ".join(url(saved(halves()))[len("data:image/png;base64,") :])
    assert given(f"data:image/png;base64,{spaced}").pixels(32).shape == (4, 6, 3)
    many = given("data:image/png;base64," + "AA\r\n" * 250_000)
    tracemalloc.start()
    try:
        with pytest.raises(PromptError, match="is no picture"):
            many.pixels(32)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(many.url)
    finally:
        tracemalloc.stop()


def test_a_file_that_is_too_large() -> None:
    with pytest.raises(PromptError, match="is larger than 32 MiB"):
        given("data:image/png;base64," + "A" * 50_000_000).pixels(32)


def test_bounds_are_what_the_page_says() -> None:
    assert (MAX_IMAGES, MAX_PIXELS) == (16, 33_554_432)


@pytest.mark.parametrize(
    ("part", "message", "param"),
    [
        ({}, "image_url: must be an object", f"{WHERE}.image_url"),
        ({"image_url": {"url": 7}}, "image_url: must be an object", f"{WHERE}.image_url"),
        (
            {"image_url": {"url": "data:,", "detail": "most"}},
            "detail: must be one of auto, high, low",
            f"{WHERE}.image_url.detail",
        ),
    ],
)
def test_parts_that_are_none(part: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(PromptError, match=message) as raised:
        GivenPicture.of_part(part, WHERE)
    assert raised.value.param == param


def message(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": "What?"}, *parts]}


PART = {"type": "image_url", "image_url": {"url": url(saved(halves()))}}


def test_pictures_are_gathered_in_order() -> None:
    found: list[GivenPicture] = []
    other = {"type": "image_url", "image_url": "data:image/gif;base64,xx"}  # vLLM takes a string, too
    checked = check_messages([message("user", PART), message("user", other, PART)], found)
    assert [one.where for one in found] == [
        "messages[0].content[1].image_url.url",
        "messages[1].content[1].image_url.url",
        "messages[1].content[2].image_url.url",
    ]
    assert checked[0]["content"] == [{"type": "text", "text": "What?"}, {"type": "image"}]
    assert found[1].url == "data:image/gif;base64,xx"


@pytest.mark.parametrize(("role", "seen"), [("system", []), ("assistant", []), ("user", None)])
def test_who_shows_no_pictures(role: str, seen: list[GivenPicture] | None) -> None:
    """Neither a system nor an assistant does; and a model that sees none is shown none."""
    with pytest.raises(PromptError, match=r"\[1\]\.type: is 'image_url'; only 'text' and 'file' are"):
        check_messages([message(role, PART)], seen)


def test_too_many() -> None:
    with pytest.raises(PromptError, match=r"\[17\]\.image_url.* is picture 17 of 17; at most 16 are read"):
        check_messages([message("user", *[PART] * 17)], [])


@pytest.mark.parametrize("kind", ["video_url", "input_audio"])
def test_videos_and_sounds_stay_refused(kind: str) -> None:
    with pytest.raises(PromptError, match=rf"'{kind}'; 'text', 'file' and 'image_url' are served"):
        check_messages([message("user", {"type": kind, kind: {"url": "x"}})], [])
