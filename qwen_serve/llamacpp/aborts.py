"""What llama.cpp prints before it aborts: one line, in place of a native stack trace."""

import ctypes
import os
from collections.abc import Callable

from .ggml import quick

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_kept: list[object] = []
"""Callbacks, which must live as long as llama.cpp may call them."""


def end_with_a_line(line_of: Callable[[str], str], status: int) -> None:
    """From now on a failed assertion in llama.cpp or ggml ends this process with `status`, after the line on
    stderr that `line_of` makes of llama.cpp's message."""

    def end(message: bytes | None) -> None:
        try:
            line = line_of((message or b"").decode("utf-8", "replace").strip())
            os.write(2, f"{line}\n".encode())
        finally:
            os._exit(status)

    callback = _Callback(end)
    _kept.append(callback)
    quick("ggml_set_abort_callback", ctypes.c_void_p, _Callback)(callback)
