"""ggml's tensors, and how functions of llama.cpp and ggml are declared.

Through `PyDLL` quick ones keep the GIL, rather than release it and queue for it again.
"""

import ctypes
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

_lib = ctypes.PyDLL(C._lib._name)


def quick(name: str, result: Any, *arguments: Any) -> Any:
    """Declares a function of llama.cpp or ggml that returns quickly, without waiting."""
    function = getattr(_lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """Declares a function that may take long; it releases the GIL."""
    function = getattr(C._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


class Tensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h; abi_checks.py checks it."""

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


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


_P, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t

init = quick("ggml_init", _P, InitParams)
free = quick("ggml_free", None, _P)
tensor_overhead = quick("ggml_tensor_overhead", _SIZE)
new_tensor = quick("ggml_new_tensor_2d", _P, _P, ctypes.c_int, _I64, _I64)
view_1d = quick("ggml_view_1d", _P, _P, _P, _I64, _SIZE)
get_rows = quick("ggml_get_rows", _P, _P, _P, _P)
op_name = quick("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
nbytes = quick("ggml_nbytes", _SIZE, ctypes.POINTER(Tensor))
is_host = quick("ggml_backend_buffer_is_host", ctypes.c_bool, _P)
tensor_set = quick("ggml_backend_tensor_set", None, _P, _P, _SIZE, _SIZE)
tensor_get = quick("ggml_backend_tensor_get", None, _P, _P, _SIZE, _SIZE)
supports_op = quick("ggml_backend_dev_supports_op", ctypes.c_bool, _P, _P)

I32 = 26
MUL_MAT, MUL_MAT_ID = (
    next(op for op in range(200) if op_name(op) == name) for name in (b"MUL_MAT", b"MUL_MAT_ID")
)
