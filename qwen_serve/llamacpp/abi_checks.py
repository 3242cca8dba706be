"""Checks what the server relies on in llama.cpp beyond its public interface.

Each `Check` fails under its own name: those of the library when llama.cpp starts, that of hidden rows when
they are first read, all of them with a model (abi_checks_model.py) in the tests and when the pin moves
(patches/bump.py). Code that parses llama.cpp's log fails where it parses: sizes of buffers (engine/planning)
and planned types (convert). Each start compares device samplers with the host (engine/warmup.py).
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
from llama_cpp import llama_cpp_ext

from . import ggml
from .errors import LlamaError


@dataclass(frozen=True)
class Check:
    """`found` says what differs, or is empty."""

    name: str
    relied_on: str
    """The code that relies on it, and its purpose."""
    found: Callable[[], str]


PARAMETERS = {
    "llama_model_params": "tensor_buft_overrides n_gpu_layers split_mode load_mode main_gpu tensor_split "
    "no_alloc load_mtp use_extra_bufts check_tensors",
    "llama_context_params": "ctx_other ctx_type n_ctx n_seq_max n_batch n_ubatch n_outputs_max "
    "n_rs_seq n_threads n_threads_batch flash_attn_type type_k type_v kv_unified "
    "offload_kqv op_offload no_perf cb_eval",
    "llama_batch": "n_tokens token embd pos n_seq_id seq_id logits",
    "llama_perf_context_data": "n_reused",
    "llama_model_quantize_params": "nthread ftype dry_run imatrix kv_overrides tt_overrides pure "
    "output_tensor_type token_embedding_type",
}
"""Fields of llama.h's structures that are set or read. ctypes silently accepts an assignment to any other
name."""

VISION_PARAMETERS = {
    "mtmd_context_params": "use_gpu print_timings n_threads flash_attn_type warmup image_min_tokens "
    "image_max_tokens",
}
"""Those of mtmd.h, checked when a vision tower is loaded."""

DEFAULTS = {
    "llama_model_default_params": {"split_mode": 1, "use_extra_bufts": True, "vocab_only": False},
    "llama_context_default_params": {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "flash_attn_type": -1,
        "type_k": 1,
        "type_v": 1,
        "offload_kqv": True,
    },
}
"""Values that show that the bindings' structures match the library's: an added or removed field shifts the
rest."""

TYPES = {0: b"f32", 1: b"f16", 2: b"q4_0", 3: b"q4_1", 6: b"q5_0", 7: b"q5_1", 8: b"q8_0", 20: b"iq4_nl"}
TYPES |= {ggml.I32: b"i32", 30: b"bf16"}
"""The numbers of `enum ggml_type` that are used."""

OBJECT_HEADER = 32
"""Bytes of `struct ggml_object`."""


def tensor_layout() -> str:
    """Checks the size and fields of `struct ggml_tensor` on a tensor and a view of it."""
    size = ggml.tensor_overhead() - OBJECT_HEADER
    if size != ctypes.sizeof(ggml.Tensor):
        return f"it has {size} bytes, not {ctypes.sizeof(ggml.Tensor)}"
    memory = ggml.init(ggml.InitParams(4 * ggml.tensor_overhead(), None, True))
    try:
        matrix = ggml.new_tensor(memory, ggml.I32, 6, 5)
        view = ggml.Tensor.from_address(ggml.view_1d(memory, matrix, 3, 24))
        one = ggml.Tensor.from_address(matrix)
        expected = {
            "type": (one.type, ggml.I32),
            "ne": (list(one.ne), [6, 5, 1, 1]),
            "nb": (list(one.nb), [4, 24, 120, 120]),
            "op": (ggml.op_name(view.op), b"VIEW"),
            "src": (view.src[0], matrix),
            "view_src": (view.view_src, matrix),
            "view_offs": (view.view_offs, 24),
            "name": (view.name, b" (view)"),
        }
    finally:
        ggml.free(memory)
    return "; ".join(f"{name} is {is_}, not {want}" for name, (is_, want) in expected.items() if is_ != want)


def type_numbers() -> str:
    """Names of ggml's types by number."""
    name = ggml.quick("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    return "; ".join(f"{i} is {name(i)!r}, not {want!r}" for i, want in TYPES.items() if name(i) != want)


def fields() -> str:
    """Fields that the bindings' structures lack."""
    return missing_fields(C, PARAMETERS)


def missing_fields(bindings: ModuleType, parameters: dict[str, str]) -> str:
    """Missing fields in the structures of one of llama-cpp-python's modules."""
    lacking = [
        f"{struct}.{field}"
        for struct, names in parameters.items()
        for field in names.split()
        if field not in {each[0] for each in getattr(bindings, struct)._fields_}
    ]
    return f"there is no {', '.join(lacking)}" if lacking else ""


def defaults() -> str:
    """Defaults that are not where the bindings expect them."""
    found = [
        f"{field} of {function} is {getattr(made, field)}, not {want}"
        for function, fields_ in DEFAULTS.items()
        for made in [getattr(C, function)()]
        for field, want in fields_.items()
        if getattr(made, field) != want
    ]
    return "; ".join(found)


def extensions() -> str:
    """Checks for the functions of src/llama-ext.h, which have C++ names."""
    names = ("llama_set_embeddings_nextn", "llama_get_embeddings_nextn")
    lacking = [name for name in names if not hasattr(llama_cpp_ext, name)]
    return f"llama_cpp_ext has no {', '.join(lacking)}" if lacking else ""


def state_flags() -> str:
    """Checks the flags of `llama_state_seq_get_data_ext`."""
    names = ("LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY", "LLAMA_STATE_SEQ_FLAGS_ON_DEVICE")
    values = [getattr(C, name, None) for name in names]
    return "" if values == [1, 2] else f"{' and '.join(names)} are {values}, not [1, 2]"


def system_info() -> str:
    """Checks the text of `llama_print_system_info`, which is searched for AMX."""
    said = C.llama_print_system_info()
    return "" if b" = 1 | " in said else f"{said!r} has no word like 'AVX2 = 1 | '"


LIBRARY = (
    Check(
        "struct ggml_tensor",
        "observed products, and tensors that are made",
        tensor_layout,
    ),
    Check("enum ggml_type", "the types of KV caches, and of tensors that are made", type_numbers),
    Check("fields of parameters", "every context and model", fields),
    Check("layout of parameters", "every context and model", defaults),
    Check("src/llama-ext.h", "hidden rows for drafts by the MTP head", extensions),
    Check("flags of a state's parts", "copies of recurrent states on the device", state_flags),
    Check("llama_print_system_info", "whether AMX's weights are used", system_info),
)


def require(checks: Iterable[Check]) -> None:
    """Raises LlamaError with the name of the first check that fails."""
    for check in checks:
        if different := check.found():
            raise LlamaError(
                f"llama-cpp-python {version('llama-cpp-python')} is not as this server expects it: "
                f"{check.name}: {different}. Relied on by {check.relied_on}; `make setup` builds the right "
                "one"
            )


# --- with a context ----------------------------------------------------------------------------------------


def hidden_rows(handle: Any, logits_size: int) -> Check:
    """Checks where the last batch's hidden rows are in a `llama_context`: after room for `logits_size` bytes
    of logits, so that they stay if the next batch reserves as much (src/llama-context.cpp)."""

    def found() -> str:
        logits = ctypes.addressof(C.llama_get_logits(handle).contents)
        hidden = ctypes.addressof(llama_cpp_ext.llama_get_embeddings_nextn(handle).contents)
        behind = hidden - logits
        return "" if behind == logits_size else f"they begin {behind} bytes behind logits, not {logits_size}"

    return Check("output_reserve", "drafts by the MTP head, which reads hidden rows a step later", found)
