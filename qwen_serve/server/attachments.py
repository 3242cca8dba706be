"""Files that a message in the terminal names as `@FILE`: pictures and text."""

import base64
import codecs
import mimetypes
import re
from pathlib import Path
from typing import Any

NAMED = re.compile(r"(?<!\S)@(?:\"([^\"]+)\"|(\S+))")
PICTURES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}
"""File name extension of a picture -> its type."""

MAX_TEXT = 2**19
"""Most bytes of a text file: a context of 100,000 tokens and more."""

Content = str | list[dict[str, Any]]


class AttachmentError(Exception):
    """A file that a message names cannot be sent; the message says which and why."""


def with_files(text: str) -> Content:
    """The typed message with the files that it names: pictures in their places, text in front of it as code.

    A word that begins with @ and names no file stays a word, unless it looks like a file. Raises
    AttachmentError.
    """
    parts: list[dict[str, Any]] = []
    files: list[str] = []
    said, done = "", 0
    for found in NAMED.finditer(text):
        path, rest = _path_of(found)
        if path is None:
            continue
        before = text[done : found.start()]
        done = found.end() - len(rest)
        if (kind := PICTURES.get(path.suffix.lower())) is None:
            said += f"{before}{path.name}"
            files.append(_quoted(path))
            continue
        url = f"data:image/{kind};base64,{base64.b64encode(_bytes_of(path)).decode()}"
        parts += [
            {"type": "text", "text": said + before},
            {"type": "image_url", "image_url": {"url": url}},
        ]
        said = ""
    said += text[done:]
    if not parts:
        return "\n\n".join([*files, said])
    parts = [{"type": "text", "text": one} for one in files] + [*parts, {"type": "text", "text": said}]
    return [part for part in parts if part.get("text", "x").strip()]


def spoken(content: Content) -> str:
    """A message's text, with a placeholder for each picture."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"].strip() if part["type"] == "text" else "[picture]" for part in content)


def _path_of(found: re.Match[str]) -> tuple[Path | None, str]:
    """The file that is meant, or None, and the punctuation behind it."""
    if found[1]:
        return Path(found[1]).expanduser(), ""
    word = found[2]
    path = Path(word).expanduser()
    bare = word.rstrip(",.;:!?)")
    if bare != word and not path.exists():
        path = Path(bare).expanduser()
    else:
        bare = word
    looks = bare.startswith(("/", "./", "../", "~/")) or bool(mimetypes.guess_type(bare)[0])
    is_file = path.exists() or looks or path.suffix.lower() in PICTURES
    return (path if is_file else None), word[len(bare) :]


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AttachmentError(f"{path}: {error.strerror or error}") from None


def _quoted(path: Path) -> str:
    """A text file's name, and its text in a block of code that nothing inside ends."""
    data = _bytes_of(path)
    if len(data) > MAX_TEXT:
        raise AttachmentError(f"{path}: larger than {MAX_TEXT // 1024} KiB")
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise AttachmentError(
            f"{path}: neither a picture ({', '.join(PICTURES)}) nor text in UTF-8 or UTF-16"
        )
    fence = "`" * (max([2, *map(len, re.findall("`+", text))]) + 1)
    newline = "" if text.endswith("\n") else "\n"
    return f"{path.name}\n\n{fence}\n{text}{newline}{fence}"
