"""What is called of llama.cpp and ggml, their log, and what becomes of their failures."""

from __future__ import annotations

import ctypes
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

# Before numpy, and this module before the others here: where libggml-cuda exports C++ runtime symbols, the
# other order crashes at model load.
import llama_cpp as _package
from llama_cpp import llama_cpp as api

import numpy as np  # isort: skip
from numpy.typing import NDArray

from qwen_serve.convert.errors import ConvertError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LLAMA_VERSION: Final[str] = _package.__version__

FLOATS = ctypes.POINTER(ctypes.c_float)

Floats = NDArray[np.float32]


class LlamaError(ConvertError):
    """llama.cpp refused or failed; the message says at what, and its own last words."""


class Tensor(ctypes.Structure):
    """`struct ggml_tensor` of `ggml.h`, as far as a callback reads it; its size is checked below."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class GgufParams(ctypes.Structure):
    """`struct gguf_init_params` of `gguf.h`."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """A function of libllama or of the ggml that it brings, with its types."""
    function = getattr(api._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


ggml_op_name = declare("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
ggml_nbytes = declare("ggml_nbytes", ctypes.c_size_t, ctypes.POINTER(Tensor))
ggml_is_host = declare("ggml_backend_buffer_is_host", ctypes.c_bool, ctypes.c_void_p)
ggml_read = declare(
    "ggml_backend_tensor_get",
    None,
    ctypes.POINTER(Tensor),
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
)
gguf_open = declare("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, GgufParams)
gguf_find = declare("gguf_find_tensor", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
gguf_close = declare("gguf_free", None, ctypes.c_void_p)
_OBJECT_HEADER = 32  # sizeof(struct ggml_object)
if declare("ggml_tensor_overhead", ctypes.c_size_t)() != _OBJECT_HEADER + ctypes.sizeof(Tensor):
    raise LlamaError(
        f"llama-cpp-python {LLAMA_VERSION}: struct ggml_tensor is not what convert/llama/bindings.py declares"
    )
MUL_MAT, MUL_MAT_ID = (
    next(op for op in range(100) if ggml_op_name(op) == name) for name in (b"MUL_MAT", b"MUL_MAT_ID")
)

_LOG_LEVEL_ERROR = 4  # enum ggml_log_level
_complaints: deque[str] = deque(maxlen=3)
_listener: Callable[[str], None] | None = None


@api.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes | None, _: Any) -> None:
    line = (text or b"").decode("utf-8", "replace")
    if _listener is not None:
        _listener(line)
    if level == _LOG_LEVEL_ERROR:
        _complaints.append(line.strip())


api.llama_log_set(_log, None)
api.llama_backend_init()


@contextmanager
def log_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Has `listener` called with each line that llama.cpp logs, whoever else in this process listens."""
    global _listener
    before, data = api.llama_log_callback(), ctypes.c_void_p()
    api.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    api.llama_log_set(_log, None)
    _listener = listener
    try:
        yield
    finally:
        _listener = None
        api.llama_log_set(before, data)


def failure(what: str) -> LlamaError:
    """What failed, and llama.cpp's last words about it."""
    words = " / ".join(_complaints)
    _complaints.clear()
    return LlamaError(f"{what}: {words}" if words else what)


class Handle:
    """Something of llama.cpp's that has to be freed, as the end of a `with` block does."""

    _free: Callable[[Any], None]
    _pointer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees it. Idempotent."""
        if self._pointer:
            self._free(self._pointer)
            self._pointer = None
