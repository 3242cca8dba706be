"""Pictures in messages: data URLs to pixels, with limits."""

from __future__ import annotations

import binascii
import math
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from io import BytesIO
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from qwen_serve.server.engine import Engine
from qwen_serve.server.engine.encoder import PictureEncoder
from qwen_serve.server.engine.errors import PromptTooLong
from qwen_serve.server.engine.pictures import Picture

from .decoding import TooLarge, decoded
from .errors import PromptError

MAX_IMAGES = 16
"""Most pictures of a request."""

MAX_BYTES = 32 * 1024**2
"""Most bytes of a picture's file."""

MAX_PIXELS = 2**25
"""Most pixels of a picture's file. Its memory has a bound of its own (decoding.py)."""

MAX_RATIO = 200
"""Largest ratio of a picture's sides, as in transformers (smart_resize)."""

MAX_SCANS = 100
"""Most scans of a JPEG; a progressive one usually has ten. Each costs a pass over all pixels, even one of a
dozen bytes."""

LOW_PIXELS = 512 * 512
"""Most pixels of a picture with `detail` low."""

MOST_BOUND = 2**31 - 1
"""Largest value of `min_pixels` and `max_pixels`."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
DETAILS = ("auto", "high", "low")

HEAD = 64 * 1024
"""Characters of base64 in which a picture's size is searched. If it is not there, the whole file is
decoded."""

_BLANKS = b" \t\r\n"

_decoding = BoundedSemaphore(2)
"""Limits how many decoded pictures are in memory at once; others wait."""


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """A picture's lower and upper size in pixels, under transformers' names (smart_resize of Qwen's
    processors). None stands for the server's own bounds, which always apply."""

    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any], where: str) -> PixelBounds:
        """The `min_pixels` and `max_pixels` in the fields of `where`. Raises PromptError."""
        for name in ("min_pixels", "max_pixels"):
            value = fields.get(name)
            if value is not None and (type(value) is not int or not 1 <= value <= MOST_BOUND):
                raise PromptError(f"{where}.{name}", f"must be an integer from 1 to {MOST_BOUND:,}")
        return cls(fields.get("min_pixels"), fields.get("max_pixels"))

    def within(self, others: PixelBounds) -> PixelBounds:
        """These bounds, with `others` for those that are None."""
        return PixelBounds(self.min_pixels or others.min_pixels, self.max_pixels or others.max_pixels)

    def size(self, width: int, height: int, side: int) -> tuple[int, int]:
        """A picture's size within the bounds. If it is changed, both sides are whole tokens of `side` pixels;
        otherwise the vision tower rounds it."""
        whole = [max(side, round(n / side) * side) for n in (width, height)]
        pixels, area = whole[0] * whole[1], width * height
        if self.max_pixels is not None and pixels > self.max_pixels:
            scale = math.sqrt(area / self.max_pixels)
            whole = [max(side, math.floor(n / scale / side) * side) for n in (width, height)]
        elif self.min_pixels is not None and pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            whole = [math.ceil(n * scale / side) * side for n in (width, height)]
        else:
            return width, height
        return whole[0], whole[1]


NO_BOUNDS = PixelBounds()


@dataclass(frozen=True, slots=True)
class GivenPicture:
    """A picture in a message; `where` is the path of its field."""

    url: str
    where: str
    detail: str = "auto"
    bounds: PixelBounds = NO_BOUNDS
    data: bytes | None = None
    """The bytes fetched from its URL."""

    @property
    def is_address(self) -> bool:
        """Whether the picture is given by a remote URL."""
        return self.url[:5].lower() != "data:"

    @classmethod
    def of_part(cls, part: Mapping[str, Any], where: str) -> GivenPicture:
        """OpenAI's `image_url` part, with Qwen's `min_pixels` and `max_pixels`. Raises PromptError."""
        given = part.get("image_url")
        bounds = PixelBounds.of(part, where)
        if isinstance(given, str):  # as in vLLM
            given = {"url": given}
        where = f"{where}.image_url"
        if not isinstance(given, dict) or not isinstance(given.get("url"), str):
            raise PromptError(where, 'must be an object {"url": "data:image/...;base64,..."}')
        return cls(given["url"], f"{where}.url", known_detail(given.get("detail"), where), bounds)

    def pixels(
        self, side: int, asked: PixelBounds = NO_BOUNDS, most: int = MOST_BOUND
    ) -> npt.NDArray[np.uint8]:
        """The decoded pixels, shape [height, width, 3]: of an animation the first frame, with EXIF rotation
        applied and transparency made white. The picture is resized to its own bounds, else to `asked`, and
        to at most `most` pixels, which the tower takes. A token is `side` pixels high and wide. Slow: not for
        an event loop. Raises PromptError."""
        bounds, data = self._bounds(asked, most), self._data()
        with _decoding, self._opened(data) as image:
            return decoded(image, data, partial(bounds.size, side=side))

    def size(self, side: int, asked: PixelBounds = NO_BOUNDS, most: int = MOST_BOUND) -> tuple[int, int]:
        """The width and height of the result of `pixels`, swapped if EXIF rotates the picture by 90 degrees.
        For most pictures only the beginning of the file is decoded from base64. Raises PromptError."""
        bounds = self._bounds(asked, most)
        if self.data is None and len(self.url) > 2 * HEAD:
            with suppress(PromptError), self._opened(self._data(HEAD)) as image:
                return bounds.size(*image.size, side)
        with self._opened(self._data()) as image:
            return bounds.size(*image.size, side)

    def digest(self, asked: PixelBounds) -> bytes:
        """A hash of everything but `side` that the result of `pixels` depends on."""
        bounds = self._bounds(asked)
        made = sha256(b"%d %d " % (bounds.min_pixels or 0, bounds.max_pixels or 0))
        made.update(self.data if self.data is not None else self.url.encode("utf-8", "surrogatepass"))
        return made.digest()

    def _bounds(self, asked: PixelBounds, tower: int = MOST_BOUND) -> PixelBounds:
        bounds = self.bounds.within(asked)
        least, most = bounds.min_pixels, bounds.max_pixels
        if self.detail == "low":
            most = min(most or LOW_PIXELS, LOW_PIXELS)
        if least is not None and most is not None and least > most:
            raise self.wrong(f"has min_pixels {least:,}, which must be at most its max_pixels, {most:,}")
        return PixelBounds(least, min(most or tower, tower))

    def _data(self, most: int | None = None) -> bytes:
        """The file, or the part of it in its first `most` characters of base64."""
        if self.data is not None:
            return self.data
        if self.is_address:
            raise self.wrong(
                "must be a data URL (data:image/png;base64,...); addresses are not fetched (--image-urls)"
            )
        head, comma, encoded = self.url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise self.wrong("must be a data URL in base64: data:image/png;base64,...")
        if len(encoded) * 3 // 4 > MAX_BYTES + 2:
            raise self.wrong(f"is larger than {MAX_BYTES // 1024**2} MiB")
        try:
            text = encoded[:most].encode("ascii").translate(None, _BLANKS)
            return b64decode(text if most is None else text[: len(text) // 4 * 4], validate=True)
        except (binascii.Error, ValueError):
            raise self.wrong("is not valid base64") from None

    @contextmanager
    def _opened(self, data: bytes) -> Iterator[Image.Image]:
        """The picture, not yet decoded. An exception of Pillow in the context becomes a PromptError."""
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise self.wrong(f"has {width} x {height} pixels; at most {MAX_PIXELS:,} are decoded")
                if max(width, height) > MAX_RATIO * min(width, height):
                    raise self.wrong(
                        f"has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other"
                    )
                if data.startswith(b"\xff\xd8") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
                    raise self.wrong(f"has {scans:,} scans; a JPEG may have at most {MAX_SCANS}")
                yield image
        except PromptError:
            raise
        except TooLarge as error:
            raise self.wrong(str(error)) from None
        except UnidentifiedImageError:
            raise self.wrong(f"is no picture of a known format: {', '.join(FORMATS)}") from None
        except Exception as error:  # any of Pillow's decoders may raise
            raise self.wrong(f"could not be decoded: {error}") from None

    def wrong(self, what: str) -> PromptError:
        """An error about the picture's field."""
        return PromptError(self.where, what)


def known_detail(given: Any, where: str) -> str:
    """The `detail` of a picture in `where`. Raises PromptError."""
    detail = "auto" if given is None else given
    if detail not in DETAILS:
        raise PromptError(f"{where}.detail", f"must be one of {', '.join(DETAILS)}, not {detail!r}")
    return str(detail)


def cached_images(
    given: list[GivenPicture], engine: Engine, salt: str, asked: PixelBounds = NO_BOUNDS
) -> list[Picture]:
    """The first of the given pictures, as long as requests with this `salt` have encoded them and they are
    still cached. Raises PromptError."""
    known: list[Picture] = []
    encoder = engine.encoder
    for picture in given:
        if encoder is None or (seen := encoder.recall(picture.digest(asked), salt)) is None:
            break
        known.append(seen)
    return known


def insert_images(
    ids: list[int],
    given: list[GivenPicture],
    engine: Engine,
    interrupt: Callable[[], None],
    salt: str,
    asked: PixelBounds = NO_BOUNDS,
    known: Sequence[Picture] = (),
) -> tuple[list[int], list[tuple[int, Picture]]]:
    """A conversation's ids without picture placeholders, and the encoded pictures, each with the index of the
    token after it.

    Pictures that requests with this `salt` have encoded are reused; `known` has the first ones, which
    `cached_images` returned. `interrupt` is called before each picture and may raise to stop the work.
    `asked`: the request's bounds for every picture. Raises PromptError, PromptTooLong and GenerationError.
    """
    if not given:
        return ids, []
    if len(given) - len(known) > 1:  # a single new one is measured before it is encoded
        _check_room(ids, given, engine, interrupt, asked, known)
    length = len(ids)
    pictures: list[tuple[int, Picture]] = []
    for before, (place, picture, encoder) in enumerate(_placed(ids, given, engine, interrupt, asked)):
        seen: Picture | npt.NDArray[np.uint8]
        if before < len(known):
            seen = known[before]
        else:
            file = picture.digest(asked)
            seen = encoder.recall(file, salt) or picture.pixels(encoder.side, asked, encoder.max_pixels)
        length += (len(seen) if isinstance(seen, Picture) else encoder.measure(*seen.shape[1::-1])) - 1
        if length >= engine.context_size:
            raise PromptTooLong(length, engine.context_size, exactly=False)
        if not isinstance(seen, Picture):
            seen = encoder.encode(seen, salt, interrupt, file)
        pictures.append((place - before, seen))
    return [token for token in ids if token != engine.vocab.picture_id], pictures


def counted(
    ids: list[int],
    given: list[GivenPicture],
    engine: Engine,
    interrupt: Callable[[], None],
    asked: PixelBounds = NO_BOUNDS,
) -> list[int]:
    """A conversation's ids, with as many placeholders for each picture as it has tokens; nothing is encoded.
    Otherwise like `insert_images`."""
    made: list[int] = []
    done = 0
    for place, picture, encoder in _placed(ids, given, engine, interrupt, asked):
        height, width, _ = picture.pixels(encoder.side, asked, encoder.max_pixels).shape
        n_tokens = encoder.measure(width, height)
        made += ids[done:place] + ids[place : place + 1] * n_tokens
        done = place + 1
    return made + ids[done:]


def _check_room(
    ids: list[int],
    given: list[GivenPicture],
    engine: Engine,
    interrupt: Callable[[], None],
    asked: PixelBounds,
    known: Sequence[Picture],
) -> None:
    """Raises PromptTooLong if the ids and all pictures do not fit into the context, and PromptError. No
    picture is decoded, and the files of the `known` ones are not read."""
    length = len(ids)
    for before, (_, picture, encoder) in enumerate(_placed(ids, given, engine, interrupt, asked)):
        if before < len(known):
            length += len(known[before]) - 1
        else:
            length += encoder.measure(*picture.size(encoder.side, asked, encoder.max_pixels)) - 1
    if length >= engine.context_size:
        raise PromptTooLong(length, engine.context_size, exactly=False)


def _placed(
    ids: list[int],
    given: list[GivenPicture],
    engine: Engine,
    interrupt: Callable[[], None],
    asked: PixelBounds,
) -> Iterator[tuple[int, GivenPicture, PictureEncoder]]:
    """For each picture: the index of its placeholder in `ids`, the picture, and the function that encodes
    it."""
    encoder = engine.encoder
    assert encoder is not None, "parts with pictures are refused where nothing reads them"
    places = [index for index, token in enumerate(ids) if token == engine.vocab.picture_id]
    if len(places) != len(given):
        raise PromptError(
            "messages", f"the chat template shows {len(places)} of {len(given)} pictures in them"
        )
    for place, picture in zip(places, given, strict=True):
        interrupt()
        least = picture.bounds.within(asked).min_pixels or 0
        if least > encoder.max_pixels:
            most = f"at most {encoder.max_pixels:,} are read (--image-max-tokens)"
            raise picture.wrong(f"has min_pixels {least:,}; {most}")
        yield place, picture, encoder
