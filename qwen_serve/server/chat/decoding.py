"""Decodes a picture's file in bounded memory.

A JPEG is shrunk while it is decoded if it must be. Pixels are converted and resized in strips.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, _webp

from qwen_serve.common.memory import give_back

Pixels = npt.NDArray[np.uint8]
"""[height, width, 3]."""

MAX_DECODED = 100_000_000
"""Most bytes of memory that the decoding of a picture takes, its result included."""

STRIP = 2**18
"""Pixels that are converted at a time."""

CONVERTING = 28 * STRIP
"""Bytes that this takes: of every pixel, its copies in four modes of Pillow, and as a 64-bit number."""

LARGE = 16_000_000
"""Bytes of a decoded picture after which memory is given back to the system."""

BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""Bytes of a pixel in Pillow's modes; any other takes four, even with three bands."""

WEBP = 12
"""Bytes of a pixel while a WebP file is decoded: libwebp's two canvases, and the result."""

BICUBIC = 2.0
"""Pixels on either side on which a resized one depends, in the larger of both scales."""

TURNS: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}
"""EXIF's orientation -> what undoes it."""


class TooLarge(ValueError):
    """Decoding would take too much memory; the message says how much."""


def decoded(image: Image.Image, data: bytes, size_for: Callable[[int, int], tuple[int, int]]) -> Pixels:
    """The pixels [height, width, 3] of an opened `image` and its file's `data`: of the first frame, turned as
    EXIF says, white where it is transparent.

    `size_for`: from the picture's width and height, those of the result; the same if both change places.
    Raises TooLarge before it decodes, and what Pillow raises.
    """
    size = size_for(*image.size)
    _make_room(image, data, size)
    whole = _first_frame(image, data)
    orientation = image.getexif().get(0x0112)  # after the check, since a PNG is decoded for it
    n_bytes = whole.width * whole.height * _bytes_of(whole)
    result = _in_strips(whole, size)
    if n_bytes >= LARGE:
        del whole
        image.close()
        give_back()
    return np.ascontiguousarray(TURNS[orientation](result)) if orientation in TURNS else result


def _make_room(image: Image.Image, data: bytes, size: tuple[int, int]) -> None:
    """Sets a JPEG to be decoded at a half, a quarter or an eighth of its size if it is too large otherwise.
    Raises TooLarge."""
    full = image.size
    if _peak(image, data, full, size) > MAX_DECODED:
        image.draft(None, size)  # None leaves the mode; other formats ignore it
    if (peak := _peak(image, data, full, size)) > MAX_DECODED:
        raise TooLarge(
            f"has {full[0]} x {full[1]} pixels, which as {image.format} in the mode {image.mode} take "
            f"{peak / 1e6:,.0f} MB of memory to decode; a picture may take {MAX_DECODED / 1e6:,.0f} MB"
        )


def _peak(image: Image.Image, data: bytes, full: tuple[int, int], size: tuple[int, int]) -> int:
    """Bytes that decoding takes: of the file's `full` pixels, those of the image, and the result's `size`."""
    if image.format == "WEBP":
        decoding, kept = WEBP * math.prod(full), 4 * math.prod(full)
    else:
        kept = _bytes_of(image) * math.prod(image.size)
        held = coefficients(data) if image.format == "JPEG" else 0
        decoding = kept + math.ceil(held * math.prod(full))
    return max(decoding, kept + CONVERTING + 3 * math.prod(size))


def _bytes_of(image: Image.Image) -> int:
    return BYTES.get(image.mode, 4)


def coefficients(data: bytes) -> float:
    """Bytes of a pixel that libjpeg holds of a JPEG until all of it is read: none if one scan has everything,
    else a 16-bit number for each sample."""
    place, factors, progressive = 2, [(1, 1)] * 4, True
    while data[place : place + 1] == b"\xff" and place + 4 <= len(data):
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xFF or marker == 0x01 or 0xD0 <= marker <= 0xD8:  # padding, or a marker alone
            place += 1 if marker == 0xFF else 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = data[place + 4 : place + 2 + length]
            factors = [(frame[at] >> 4, frame[at] & 15) for at in range(7, len(frame) - 1, 3)]
            progressive = marker not in (0xC0, 0xC1, 0xC3, 0xC9)
        elif marker == 0xDA:
            if not progressive and data[place + 4] == len(factors):
                return 0
            break
        place += 2 + length
    widest = max((across for across, _ in factors), default=0) or 1
    highest = max((down for _, down in factors), default=0) or 1
    return 2 * sum(across * down for across, down in factors) / (widest * highest)


def _first_frame(image: Image.Image, data: bytes) -> Image.Image:
    """The decoded image. Of a WebP Pillow would make a copy while libwebp still holds its own two."""
    if image.format != "WEBP":
        image.load()
        return image
    decoder = _webp.WebPAnimDecoder(data)
    mode = decoder.get_info()[-1]
    frame = decoder.get_next()
    if frame is None:
        raise OSError("it has no frame")
    del decoder
    return Image.frombuffer(mode, image.size, frame[0], "raw", mode, 0, 1)


def _in_strips(image: Image.Image, size: tuple[int, int]) -> Pixels:
    """The image in RGB and in this size [height, width, 3]. A strip of the result is made of the rows on
    which it depends."""
    width, height = size
    result = np.empty((height, width, 3), np.uint8)
    scale = image.height / height
    reach = math.ceil(BICUBIC * max(scale, 1.0)) + 1 if size != image.size else 0
    n_rows = max(1, int((STRIP / max(width, image.width) - 2 * reach) / max(scale, 1.0)))
    for top in range(0, height, n_rows):
        bottom = min(top + n_rows, height)
        first, last = top * scale, min(bottom * scale, image.height)
        above, below = max(0, math.floor(first) - reach), min(image.height, math.ceil(last) + reach)
        strip = _eight_bits(image.crop((0, above, image.width, below)))
        if size != image.size:
            box = (0, first - above, image.width, last - above)
            strip = strip.resize((width, bottom - top), Image.Resampling.BICUBIC, box=box)
        result[top:bottom] = np.asarray(strip)
    return result


def _eight_bits(image: Image.Image) -> Image.Image:
    """The image in RGB. 16-bit grey is scaled, since Pillow would clip it; transparency becomes white."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        grey = np.asarray(image.convert("I"), np.int64) >> 8
        return Image.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        seen = image.convert("RGBA")
        white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, seen).convert("RGB")
    return image.convert("RGB")
