"""The structures that Python mirrors, field by field, against values that the built ggml writes."""

import ctypes
from typing import Any

import pytest
from llama_cpp import llama_cpp as api

from qwen_serve.llamacpp import ggml

F32, MUL_MAT, FLAG_INPUT, FLAG_OUTPUT = 0, ggml.MUL_MAT, 1, 2
LIBRARY: Any = api._lib  # noqa: SLF001 - what has no binding
P, I64 = ctypes.c_void_p, ctypes.c_int64


def call(name: str, result: Any, *arguments: tuple[Any, Any]) -> Any:
    function = ctypes.CFUNCTYPE(result, *(kind for kind, _ in arguments))((name, LIBRARY))
    return function(*(value for _, value in arguments))


@pytest.fixture
def graph() -> Any:
    """A context whose tensors have memory, and (pointer of a, b, their product, a view of b)."""
    context = ggml.init(ggml.InitParams(1 << 20, None, False))
    shape = [(I64, n) for n in (4, 3, 2, 5)]
    a = call("ggml_new_tensor_4d", P, (P, context), (ctypes.c_int, F32), *shape)
    b = call("ggml_new_tensor_4d", P, (P, context), (ctypes.c_int, F32), *shape)
    product = call("ggml_mul_mat", P, (P, context), (P, a), (P, b))
    view = call("ggml_view_1d", P, (P, context), (P, b), (I64, 7), (ctypes.c_size_t, 12))
    scaled = call("ggml_scale", P, (P, context), (P, b), (ctypes.c_float, 2.5))
    call("ggml_set_name", P, (P, a), (ctypes.c_char_p, b"weight"))
    call("ggml_set_input", None, (P, a))
    call("ggml_set_output", None, (P, a))
    yield a, b, product, view, scaled
    ggml.free(context)


def test_tensors(graph: tuple[int, ...]) -> None:
    a, b, product, view, scaled = map(ggml.Tensor.from_address, graph)
    assert (a.type, list(a.ne), list(a.nb)) == (F32, [4, 3, 2, 5], [4, 16, 48, 96])
    assert a.name == b"weight"
    assert a.flags == FLAG_INPUT | FLAG_OUTPUT
    assert a.data == call("ggml_get_data", ctypes.c_void_p, (ctypes.c_void_p, graph[0]))
    assert (a.buffer, a.extra, a.view_src) == (None, None, None)
    assert product.op == MUL_MAT
    assert list(product.src) == [graph[0], graph[1]] + [None] * 8
    assert (view.view_src, view.view_offs, view.data) == (graph[1], 12, b.data + 12)
    assert list(view.ne) == [7, 1, 1, 1]
    assert ctypes.c_float.from_buffer(scaled.op_params).value == 2.5


def test_tensors_of_a_backends_buffer() -> None:
    context = ggml.init(ggml.InitParams(1 << 16, None, True))
    pointer = call("ggml_new_tensor_1d", P, (P, context), (ctypes.c_int, F32), (ctypes.c_int64, 8))
    kind = call("ggml_backend_cpu_buffer_type", P)
    buffer = call("ggml_backend_alloc_ctx_tensors_from_buft", P, (P, context), (P, kind))
    try:
        tensor = ggml.Tensor.from_address(pointer)
        assert tensor.buffer == buffer
        assert tensor.data == call("ggml_backend_buffer_get_base", P, (P, buffer))
    finally:
        call("ggml_backend_buffer_free", None, (P, buffer))
        ggml.free(context)
