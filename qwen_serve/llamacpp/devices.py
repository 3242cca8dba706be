"""ggml's devices, and the sizes of its types."""

import ctypes
from dataclasses import dataclass
from typing import Final

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from . import ggml
from .errors import LlamaError
from .log import set_up
from .patches import F16_COPIES, brings

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
"""ggml's numbers (`enum ggml_type`) of the KV cache types."""


@dataclass(frozen=True)
class Device:
    """A device that can hold tensors. `free` and `total` are bytes."""

    name: str
    description: str
    is_gpu: bool
    free: int
    total: int


_dev_count = ggml.declare("ggml_backend_dev_count", ctypes.c_size_t)
_dev_get = ggml.declare("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_dev_name = ggml.declare("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_dev_description = ggml.declare("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
_dev_type = ggml.declare("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
_dev_by_name = ggml.declare("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)
_dev_buffer_type = ggml.declare("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
_dev_memory = ggml.declare(
    "ggml_backend_dev_memory", None, ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2
)
_row_size = ggml.declare("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)
_block_size = ggml.declare("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
_type_name = ggml.declare("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
_is_quantized = ggml.declare("ggml_is_quantized", ctypes.c_bool, ctypes.c_int)

HAS_F16_COPIES: Final = brings(F16_COPIES, "llama_model_keep_f16_copies")
"""Whether this build can keep FP16 copies of quantized weights."""


def devices() -> list[Device]:
    """Every GPU, then the CPU, with their current state in ggml."""
    set_up()
    found: list[Device] = []
    for index in range(_dev_count()):
        handle = _dev_get(index)
        kind = _dev_type(handle)
        if kind > 2:  # accelerators (BLAS, AMX) use the CPU's memory
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        names = _dev_name(handle).decode(), _dev_description(handle).decode()
        found.append(Device(*names, kind in (1, 2), free.value, total.value))
    return sorted(found, key=lambda device: not device.is_gpu)


def buffer_type(name: str) -> int:
    """ggml's handle for the plain memory of the named device. Raises LlamaError if there is none."""
    return int(_dev_buffer_type(_named(name)))


def takes_rows(name: str, ggml_type: int, width: int) -> bool:
    """Whether the named device can look up rows of `width` elements in a matrix of this type. Raises
    LlamaError if there is no such device."""
    device = _named(name)
    memory = ggml.init(ggml.InitParams(4 * ggml.tensor_overhead(), None, True))
    matrix = ggml.new_tensor(memory, ggml_type, width, 2)
    able = ggml.supports_op(device, ggml.get_rows(memory, matrix, ggml.new_tensor(memory, ggml.I32, 1, 1)))
    ggml.free(memory)
    return bool(able)


def keeps_f16_copies(name: str) -> bool:
    """Whether FP16 copies of quantized weights make products on the named device faster, above some number of
    columns, and this build can keep them. Raises LlamaError if there is no such device."""
    if not HAS_F16_COPIES:
        return False
    keeps = ggml.declare("llama_dev_keeps_f16_copies", ctypes.c_bool, ctypes.c_void_p)
    return bool(keeps(_named(name)))


def _named(name: str) -> int:
    if not (device := _dev_by_name(name.encode())):
        raise LlamaError(f"no device is named {name}: there are {', '.join(d.name for d in devices())}")
    return int(device)


def supports_gpu() -> bool:
    """Whether this build of llama.cpp can put layers on a GPU."""
    return bool(C.llama_supports_gpu_offload())


def is_quantized(ggml_type: int) -> bool:
    """Whether the type stores values with shared scales; False for a type unknown to this ggml."""
    return 0 <= ggml_type < C.GGML_TYPE_COUNT and bool(_is_quantized(ggml_type))


def row_bytes(ggml_type: int, elements: int) -> int:
    """Bytes of one row of `elements` values; 0 for a type that this ggml does not know, or no longer has."""
    if not 0 <= ggml_type < C.GGML_TYPE_COUNT or not _block_size(ggml_type):  # ggml divides by the block size
        return 0
    return int(_row_size(ggml_type, elements))


def type_name(ggml_type: int) -> str:
    """The name of a type known to this ggml, such as `Q4_K`."""
    return str(_type_name(ggml_type).decode().upper())
