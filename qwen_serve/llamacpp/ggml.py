"""ggml operations for device samplers, and the sampler interface that adds them to a graph.

Each call takes about a microsecond while a graph is built. Through `PyDLL` they keep the GIL, rather than
release it and queue for it again.
"""

from __future__ import annotations

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
    """`struct ggml_tensor` of ggml.h; inside.py checks it."""

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
view_2d = quick("ggml_view_2d", _P, _P, _P, _I64, _I64, _SIZE, _SIZE)
reshape_3d = quick("ggml_reshape_3d", _P, _P, _P, _I64, _I64, _I64)
add = quick("ggml_add", _P, _P, _P, _P)
sub = quick("ggml_sub", _P, _P, _P, _P)
scale = quick("ggml_scale", _P, _P, _P, ctypes.c_float)
argmax = quick("ggml_argmax", _P, _P, _P)
top_k = quick("ggml_top_k", _P, _P, _P, ctypes.c_int)
sum_rows = quick("ggml_sum_rows", _P, _P, _P)
soft_max = quick("ggml_soft_max", _P, _P, _P)
soft_max_ext = quick("ggml_soft_max_ext", _P, _P, _P, _P, ctypes.c_float, ctypes.c_float)
mul = quick("ggml_mul", _P, _P, _P, _P)
step = quick("ggml_step", _P, _P, _P)
cumsum = quick("ggml_cumsum", _P, _P, _P)
argsort = quick("ggml_argsort", _P, _P, _P, ctypes.c_int)
scale_bias = quick("ggml_scale_bias", _P, _P, _P, ctypes.c_float, ctypes.c_float)
get_rows = quick("ggml_get_rows", _P, _P, _P, _P)
cast = quick("ggml_cast", _P, _P, _P, ctypes.c_int)
clamp = quick("ggml_clamp", _P, _P, _P, ctypes.c_float, ctypes.c_float)
concat = quick("ggml_concat", _P, _P, _P, _P, ctypes.c_int)
cpy = quick("ggml_cpy", _P, _P, _P, _P)
expand = quick("ggml_build_forward_expand", None, _P, _P)
op_name = quick("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
nbytes = quick("ggml_nbytes", _SIZE, ctypes.POINTER(Tensor))
is_host = quick("ggml_backend_buffer_is_host", ctypes.c_bool, _P)
alloc_tensors = quick("ggml_backend_alloc_ctx_tensors_from_buft", _P, _P, _P)
free_buffer = quick("ggml_backend_buffer_free", None, _P)
tensor_set = quick("ggml_backend_tensor_set", None, _P, _P, _SIZE, _SIZE)
tensor_get = quick("ggml_backend_tensor_get", None, _P, _P, _SIZE, _SIZE)
device_of = quick("ggml_backend_buft_get_device", _P, _P)
device_name = quick("ggml_backend_dev_name", ctypes.c_char_p, _P)
supports_op = quick("ggml_backend_dev_supports_op", ctypes.c_bool, _P, _P)


def missing_operation(device: int, tensor: int) -> str | None:
    """An operation that computes `tensor` and that the device lacks."""
    seen, ahead = {tensor}, [tensor]  # a cast is a source of its own
    while ahead:
        address = ahead.pop()
        node = Tensor.from_address(address)
        if node.op and not supports_op(device, address):
            return str(op_name(node.op).decode())
        ahead += {source for source in node.src if source} - seen
        seen.update(ahead)
    return None


F32, I32 = 0, 26
DESCENDING = 1
"""GGML_SORT_ORDER_DESC"""
PAD, MUL_MAT, MUL_MAT_ID = (
    next(op for op in range(200) if op_name(op) == name) for name in (b"PAD", b"MUL_MAT", b"MUL_MAT_ID")
)


# --- samplers ----------------------------------------------------------------------------------------------

Name = ctypes.CFUNCTYPE(ctypes.c_char_p, _P)
Apply = ctypes.CFUNCTYPE(None, _P, _P)
BackendInit = ctypes.CFUNCTYPE(ctypes.c_bool, _P, _P, ctypes.c_uint32)
BackendApply = ctypes.CFUNCTYPE(None, _P, _P, _P, _P)
BackendReset = ctypes.CFUNCTYPE(None, _P)


class SamplerInterface(ctypes.Structure):
    """`struct llama_sampler_i` of llama.h. Omitted functions are NULL."""

    _fields_ = [
        ("name", Name),
        ("accept", _P),
        ("apply", Apply),
        ("reset", _P),
        ("clone", _P),
        ("free", _P),
        ("backend_init", BackendInit),
        ("backend_accept", _P),
        ("backend_apply", BackendApply),
        ("backend_set_input", _P),
        ("backend_reset", BackendReset),
        ("copy_state", _P),
    ]


# These two are read for every row of every graph: plain arrays, because a structure's fields take twice as
# long.

SamplerData = ctypes.c_size_t * 4
"""`struct llama_sampler_data`: a sampler's input and output tensors, in the order below."""
LOGITS, PROBS, CANDIDATES = 0, 1, 3

View = ctypes.c_size_t * 2
"""`view_src` and `view_offs` of a tensor, from VIEW on."""
VIEW = Tensor.view_src.offset


sampler_init = quick("llama_sampler_init", _P, ctypes.POINTER(SamplerInterface), _P)
sampler_free = quick("llama_sampler_free", None, _P)
chain_init = quick("llama_sampler_chain_init", _P, C.llama_sampler_chain_params)
chain_add = quick("llama_sampler_chain_add", None, _P, _P)
set_sampler = quick("llama_set_sampler", ctypes.c_bool, _P, ctypes.c_int32, _P)
sampled_candidates = quick("llama_get_sampled_candidates_ith", _P, _P, ctypes.c_int32)
sampled_logits = quick("llama_get_sampled_logits_ith", _P, _P, ctypes.c_int32)
sampled_probs = quick("llama_get_sampled_probs_ith", _P, _P, ctypes.c_int32)
n_sampled_probs = quick("llama_get_sampled_probs_count_ith", ctypes.c_uint32, _P, ctypes.c_int32)
