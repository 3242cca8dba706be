"""Pictures in messages: from data URLs to pixels, within bounds."""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass
from io import BytesIO
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from qwen_serve.server.engine.errors import PromptTooLong

from .errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from qwen_serve.server.engine import Engine
    from qwen_serve.server.engine.pictures import Picture

MAX_IMAGES = 16
"""Of a request."""

MAX_BYTES = 32 * 1024**2
"""Of a picture's file."""

MAX_PIXELS = 2**25
"""Of a picture before it is decoded: 100 MB of memory."""

MAX_RATIO = 200
"""Of a picture's sides, as transformers has it (smart_resize)."""

MAX_SCANS = 100
"""Of a JPEG, which has ten if it is progressive: each, of a dozen bytes, takes a pass over all its pixels."""

LOW_PIXELS = 512 * 512
"""Of a picture of `detail` low, which is made so small."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
DETAILS = ("auto", "high", "low")

_BLANKS = b" \t\r\n"

_decoding = BoundedSemaphore(2)
"""Pictures that are in memory decoded: whoever has another waits."""


@dataclass(frozen=True, slots=True)
class GivenPicture:
    """A picture as a message has it; `where` is its field."""

    url: str
    detail: str
    where: str

    @classmethod
    def of_part(cls, part: Any, where: str) -> GivenPicture:
        """OpenAI's `image_url` part. Raises PromptError."""
        given = part.get("image_url")
        if isinstance(given, str):  # as vLLM takes it, too
            given = {"url": given}
        where = f"{where}.image_url"
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            raise PromptError(f'{where} must be an object {{"url": "data:image/...;base64,..."}}', where)
        detail = given.get("detail") or "auto"
        if detail not in DETAILS:
            raise PromptError(
                f"{where}.detail is {detail!r}; it must be one of {', '.join(DETAILS)}", f"{where}.detail"
            )
        return cls(given["url"], detail, f"{where}.url")

    def pixels(self) -> npt.NDArray[np.uint8]:
        """Decoded: shape [height, width, 3]; of an animation the first frame, turned as EXIF says, on white
        where it is transparent. Takes long: not for an event loop. Raises PromptError."""
        data = self._data()
        with _decoding:
            try:
                return self._decoded(data)
            except PromptError:
                raise
            except Exception as error:  # of any of Pillow's decoders
                raise self._wrong(f"could not be decoded: {error}") from None

    def _data(self) -> bytes:
        scheme, _, rest = self.url.partition(":")
        if scheme.lower() != "data":
            raise self._wrong("must be a data URL (data:image/png;base64,...); addresses are not fetched")
        head, comma, encoded = rest.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise self._wrong("must be a data URL in base64: data:image/png;base64,...")
        if len(encoded) * 3 // 4 > MAX_BYTES + 2:
            raise self._wrong(f"is larger than {MAX_BYTES // 1024**2} MiB")
        try:
            return b64decode(encoded.encode("ascii").translate(None, _BLANKS), validate=True)
        except (binascii.Error, ValueError):
            raise self._wrong("is not valid base64") from None

    def _decoded(self, data: bytes) -> npt.NDArray[np.uint8]:
        try:
            image = Image.open(BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise self._wrong(f"is no picture of a known format: {', '.join(FORMATS)}") from None
        with image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise self._wrong(f"has {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
            if max(width, height) > MAX_RATIO * min(width, height):
                raise self._wrong(
                    f"has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other"
                )
            if data.startswith(b"\xff\xd8") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
                raise self._wrong(f"has {scans:,} scans; a JPEG may have at most {MAX_SCANS}")
            image.load()
            turned = ImageOps.exif_transpose(image)
            if self.detail == "low" and width * height > LOW_PIXELS:
                scale = (LOW_PIXELS / (width * height)) ** 0.5
                width, height = (max(1, int(side * scale)) for side in turned.size)
                turned = _eight_bits(turned).resize((width, height), Image.Resampling.BICUBIC)
            return np.array(_eight_bits(turned), np.uint8)

    def _wrong(self, what: str) -> PromptError:
        return PromptError(f"{self.where} {what}", self.where)


def shown(
    ids: list[int], given: list[GivenPicture], engine: Engine, interrupt: Callable[[], None], salt: str
) -> tuple[list[int], list[tuple[int, Picture]]]:
    """The ids of a conversation without those that stand for its pictures, and these, encoded, each with the
    index of the token behind it.

    Those that are known of requests with this `salt` are not encoded again. `interrupt`, called before each,
    ends the work by what it raises. Raises PromptError, PromptTooLong and
    GenerationError.
    """
    if not given:
        return ids, []
    encoder = engine.encoder
    assert encoder is not None, "parts with pictures are refused where nothing reads them"
    stands_for = engine.vocab.picture_id
    places = [index for index, token in enumerate(ids) if token == stands_for]
    if len(places) != len(given):
        raise PromptError(
            f"the chat template shows {len(places)} of {len(given)} pictures in the messages", "messages"
        )
    length = len(ids)
    pictures: list[tuple[int, Picture]] = []
    for before, (place, picture) in enumerate(zip(places, given, strict=True)):
        interrupt()
        pixels = picture.pixels()
        length += encoder.measure(pixels) - 1
        if length >= engine.context_size:
            raise PromptTooLong(length, engine.context_size, exactly=False)
        pictures.append((place - before, encoder.encode(pixels, salt)))
    return [token for token in ids if token != stands_for], pictures


def _eight_bits(image: Image.Image) -> Image.Image:
    """In RGB: 16 bits of grey are scaled, which Pillow would cut off; what is transparent is white."""
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
