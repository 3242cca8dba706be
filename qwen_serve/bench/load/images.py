"""Generated pictures as data URLs, all different: soft spots of colour, which compress like photographs."""

import base64
import random
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
from PIL import Image

SPOT = 16
"""Pixels from one colour to the next."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """Size of a picture, in pixels."""

    width: int
    height: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse WIDTHxHEIGHT. Raises ValueError."""
        width, cross, height = text.partition("x")
        if not (cross and width.isdecimal() and height.isdecimal() and int(width) and int(height)):
            raise ValueError(f"{text}: want WIDTHxHEIGHT in pixels, such as 1024x768")
        return cls(int(width), int(height))

    @property
    def tokens(self) -> int:
        """Approximate number of Qwen3.5's tokens for it: one for 32 by 32 pixels."""
        return -(-self.width // 32) * -(-self.height // 32)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


DEFAULT_SIZE = Resolution(1024, 1024)


def data_url(size: Resolution, rng: random.Random) -> str:
    """A JPEG's data URL. The picture depends only on ``size`` and the state of ``rng``."""
    rows, columns = (-(-side // SPOT) + 1 for side in (size.height, size.width))
    colours = np.frombuffer(rng.randbytes(rows * columns * 3), np.uint8).reshape(rows, columns, 3)
    image = Image.fromarray(colours).resize((size.width, size.height), Image.Resampling.BICUBIC)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
