"""nano's vision tower in F32, and requests that show it pictures."""

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from qwen_serve.convert.checkpoint import Checkpoint
from qwen_serve.convert.source import Source
from qwen_serve.convert.vision import VisionTower, read_preprocessor, write_mmproj
from qwen_serve.llamacpp.vision import has_vision
from tests.drafters import NANO
from tests.messages import user
from tests.server.serving import Served

N = 24
"""Tokens of an answer."""

needs_vision = pytest.mark.skipif(not has_vision(), reason="llama.cpp was built without libmtmd")


def write_tower(folder: Path) -> Path:
    """In F32, in a folder."""
    preprocessor = read_preprocessor(NANO)
    assert preprocessor is not None
    path = folder / "mmproj-nano-F32.gguf"
    write_mmproj(path, VisionTower.open(Checkpoint.open(NANO), preprocessor), Source(NANO), "F32")
    return path


def noise(seed: int, width: int = 128, height: int = 96) -> Image.Image:
    """A picture of noise, large enough not to be enlarged: a token is 16 pixels wide."""
    values = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image) -> str:
    """A PNG in base64."""
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def url(image: Image.Image) -> str:
    """Its data URL."""
    return f"data:image/png;base64,{encoded(image)}"


def part(image: Image.Image, **fields: Any) -> dict[str, Any]:
    """A part of a message, with `fields` of its image_url."""
    return {"type": "image_url", "image_url": {"url": url(image), **fields}}


def text(words: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": words}


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A chat of one message."""
    return {"messages": [user(*parts)], "max_tokens": N, "ignore_eos": True, **fields}


async def post(served: Served, path: str, request: dict[str, Any], status: int = 200) -> Any:
    """The response, which must have this status."""
    async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
        answer = await http.post(path, json=request)
        assert answer.status_code == status, answer.text
        return answer.json()


async def ask(served: Served, request: dict[str, Any], status: int = 200) -> Any:
    """The answer to a chat."""
    return await post(served, "/v1/chat/completions", request, status)


def content(answer: Any) -> str:
    """Of a chat's answer."""
    found: str = answer["choices"][0]["message"]["content"]
    return found
