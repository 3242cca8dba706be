"""Decoding: bounded memory for every mode and format, and the same pixels as Pillow makes of the whole."""

import json
import math
import sys
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from qwen_serve.server.chat import decoding
from qwen_serve.server.chat.decoding import MAX_DECODED, TooLarge, coefficients, decoded
from qwen_serve.server.chat.pictures import FORMATS, MAX_PIXELS, PixelBounds
from tests.marks import slow_but
from tests.processes import run

ROOT = Path(__file__).parents[3]

ROTATED = Image.Exif()
ROTATED[0x0112] = 6

KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"PNG {mode}": ("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")},
    "PNG P, transparent": ("PNG", "P", {"transparency": 0}),
    "PNG L, transparent": ("PNG", "L", {"transparency": 0}),
    "PNG RGB, transparent": ("PNG", "RGB", {"transparency": (0, 0, 0)}),
    "PNG RGB, rotated": ("PNG", "RGB", {"exif": ROTATED}),
    "PNG RGB, animated": ("PNG", "RGB", {"frames": 2}),
    **{f"JPEG {mode}": ("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")},
    **{f"JPEG {mode}, progressive": ("JPEG", mode, {"progressive": True}) for mode in ("L", "RGB", "CMYK")},
    "JPEG RGB, every sample": ("JPEG", "RGB", {"progressive": True, "subsampling": 0}),
    "JPEG RGB, rotated": ("JPEG", "RGB", {"exif": ROTATED}),
    **{f"WEBP {mode}": ("WEBP", mode, {}) for mode in ("RGB", "RGBA")},
    "WEBP RGBA, lossless": ("WEBP", "RGBA", {"lossless": True}),
    "WEBP RGB, animated": ("WEBP", "RGB", {"frames": 2}),
    **{f"GIF {mode}": ("GIF", mode, {}) for mode in ("L", "P", "RGB", "RGBA")},
    "GIF P, transparent": ("GIF", "P", {"transparency": 0}),
    "GIF RGB, animated": ("GIF", "RGB", {"frames": 2}),
}
QUICK = ["PNG I;16", "PNG RGBA", "JPEG RGB, every sample", "WEBP RGB"]


def file_of(kind: str, side: int) -> bytes:
    """A picture with some structure, which a file of a few hundred KB holds."""
    form, mode, options = KINDS[kind]
    options, grey = dict(options), np.zeros((side, side), np.uint8)
    grey[:: max(2, side // 9)], grey[:, : side // 3] = 200, 90
    picture = Image.fromarray(grey)
    if mode == "I;16":
        picture = Image.fromarray(grey.astype(np.uint16) << 8)
    elif mode in ("LA", "RGBA"):
        alpha, picture = picture, picture.convert(mode)
        picture.putalpha(alpha)
    else:
        picture = picture.convert(mode)
    if options.pop("frames", 1) > 1:
        options |= {"save_all": True, "append_images": [picture.rotate(90)]}
    buffer = BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def test_there_is_one_of_each_format() -> None:
    assert {form for form, _, _ in KINDS.values()} == set(FORMATS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", slow_but(QUICK, KINDS))
def test_no_picture_takes_more_memory_than_is_promised(kind: str, tmp_path: Path) -> None:
    """The largest square that is decoded, and the largest that may be tried: decoded, or refused before."""
    sides = [math.isqrt(MAX_PIXELS), 4400, math.isqrt(MAX_DECODED // 12) - 1]
    files = []
    for side in sides:
        files.append(tmp_path / f"{side}")
        files[-1].write_bytes(file_of(kind, side))
    done = run([sys.executable, "-m", "tests.server.chat.decoding_memory", *map(str, files)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(files)
    for side, one in zip(sides, told, strict=True):
        assert one["peak"] <= MAX_DECODED * 1.02, (side, one)
        assert one["left"] <= MAX_DECODED / 5, (side, one)
        if isinstance(one["result"], str):
            assert "MB of memory to decode; a picture may take 100 MB" in one["result"]
    assert isinstance(told[-1]["result"], list), told


def whole(data: bytes, bounds: PixelBounds) -> np.ndarray[Any, Any]:
    """What Pillow makes of the whole picture at once."""
    with Image.open(BytesIO(data)) as image:
        seen = decoding._eight_bits(ImageOps.exif_transpose(image))  # noqa: SLF001 - of all rows in place of a strip
    if (size := bounds.size(*seen.size, 32)) != seen.size:
        seen = seen.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(seen)


@pytest.mark.parametrize(
    "bounds", [PixelBounds(), PixelBounds(max_pixels=9000), PixelBounds(min_pixels=90_000)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_strips_are_the_whole(kind: str, bounds: PixelBounds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, unless it is resized: Pillow may take the axes in another order, which rounds differently."""
    monkeypatch.setattr(decoding, "STRIP", 5000)
    data = file_of(kind, 200)
    with Image.open(BytesIO(data)) as image:
        found = decoded(image, data, partial(bounds.size, side=32))
    expected = whole(data, bounds)
    assert found.shape == expected.shape
    differ = np.abs(found.astype(int) - expected)
    assert differ.max() <= (40 if bounds != PixelBounds() else 0)
    assert differ.mean() < 2


@pytest.mark.parametrize("factor", [2, 4])
def test_a_large_jpeg_is_shrunk_while_it_is_decoded(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of("JPEG RGB", 64 * factor)
    monkeypatch.setattr(decoding, "MAX_DECODED", decoding.CONVERTING + 4 * 64 * 64 + 3 * 64 * 64)
    with Image.open(BytesIO(data)) as image:
        found = decoded(image, data, lambda width, height: (64, 64))
        assert image.size == (64, 64)
    assert np.abs(found.astype(int) - whole(data, PixelBounds(max_pixels=64 * 64))).mean() < 12
    with Image.open(BytesIO(data)) as image, pytest.raises(TooLarge, match="MB of memory to decode"):
        decoded(image, data, lambda width, height: (width, height))


def test_what_libjpeg_holds() -> None:
    assert coefficients(file_of("JPEG RGB", 32)) == 0
    assert coefficients(file_of("JPEG L, progressive", 32)) == 2
    assert coefficients(file_of("JPEG RGB, progressive", 32)) == 3
    assert coefficients(file_of("JPEG RGB, every sample", 32)) == 6
    assert coefficients(file_of("JPEG CMYK, progressive", 32)) == 8
    assert coefficients(b"\xff\xd8" + b"\0" * 9) == 8, "what is not understood takes the most"
