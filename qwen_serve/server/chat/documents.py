"""Files of plain text in messages."""

import base64
import binascii
import re
from typing import Any

from .errors import PromptError, object_in

_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+=-]+)*?)(;base64)?,", re.ASCII)
_TEXTS = re.compile(r"text/.*|application/((.*\+)?(json|xml)|yaml|x-yaml|toml|javascript|x-sh)")


def text_of_file(file: Any, where: str) -> str:
    """The text of OpenAI's `file` object, after its name. Raises PromptError for a file that is no plain
    text."""
    object_in(file, where)
    if file.get("file_data") is None:
        for name in ("file_id", "file_url"):
            if file.get(name) is not None:
                where = f"{where}.{name}"
                raise PromptError(where, "this server keeps and fetches no files; send file_data")
    data, place = file.get("file_data"), f"{where}.file_data"
    found = _DATA.match(data) if isinstance(data, str) else None
    if not isinstance(data, str) or found is None:
        raise PromptError(place, "must be a data URL, such as data:text/plain;base64,...")
    kind = found[1] or "text/plain"
    if not _TEXTS.fullmatch(kind):
        raise PromptError(place, f"is of the type {kind}; only files of plain text are read")
    text = data[found.end() :]
    if found[3]:
        try:
            text = base64.b64decode(text, validate=True).decode("utf-8-sig")
        except (binascii.Error, ValueError):
            raise PromptError(place, "is not UTF-8 text in base64") from None
    return named(file.get("filename"), text)


def named(name: Any, text: str) -> str:
    """A text after its name, if it has one."""
    return f"{name}\n\n{text}" if isinstance(name, str) and name else text
