"""The llama.cpp API, as much of it as the engine uses: the only module here that touches ctypes.

Errors are exceptions, batches and logits are numpy views of llama.cpp's own memory, and its log goes to
Python's logging (logger `llama.cpp`). Nothing but the tokenizer is safe to call from several threads at once.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from .errors import LlamaError, ModelLoadError, NoMemorySlot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

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
"""ggml's numbers (`enum ggml_type`) for the types a KV cache may have."""

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_ATTR_UNUSED, _ATTR_CONTROL, _ATTR_USER_DEFINED = 1 << 1, 1 << 3, 1 << 4


# --- log ---------------------------------------------------------------------------------------------------

log = logging.getLogger("llama.cpp")

_LEVELS = {1: 5, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
"""ggml's levels (debug, info, warning, error). Its info is our debug: it tells a developer's story."""

_tap: list[str] | None = None
_log_level = logging.DEBUG


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _route_log(level: int, text: bytes, _user_data: object) -> None:
    global _log_level
    if level != 5:  # 5 continues the line before
        _log_level = _LEVELS.get(level, logging.DEBUG)
    line = text.decode("utf-8", "replace").strip()
    if not line or not line.strip("."):  # loading draws its progress in dots
        return
    if _tap is not None:
        _tap.append(line)
        log.log(min(_log_level, logging.DEBUG), line)
    else:
        log.log(_log_level, line)


@cache
def set_up() -> None:
    """Start llama.cpp's backends and take over its log, once."""
    C.llama_log_set(_route_log, ctypes.c_void_p(0))
    C.llama_backend_init()


@contextmanager
def tapped_log() -> Iterator[list[str]]:
    """Collect llama.cpp's log lines while the block runs, and keep them off the console."""
    global _tap
    lines: list[str] = []
    _tap = lines
    try:
        yield lines
    finally:
        _tap = None


def _reason(lines: Sequence[str]) -> str:
    """The lines of a tapped log that tell why something failed: those that say so, else the last."""
    telling = [line for line in lines if any(word in line for word in ("error", "fail", "unable", "cannot"))]
    return "; ".join(telling[:3] or lines[-1:]) or "llama.cpp gave no reason"


# --- devices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A place that can hold tensors. `free` and `total` are bytes."""

    name: str
    description: str
    is_gpu: bool
    free: int
    total: int


def _ggml(name: str, restype: Any, *argtypes: Any) -> Any:
    function = getattr(C._lib, name)
    function.restype, function.argtypes = restype, list(argtypes)
    return function


_dev_count = _ggml("ggml_backend_dev_count", ctypes.c_size_t)
_dev_get = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_dev_name = _ggml("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_dev_description = _ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
_dev_type = _ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
_dev_memory = _ggml("ggml_backend_dev_memory", None, ctypes.c_void_p, *[ctypes.POINTER(ctypes.c_size_t)] * 2)
_row_size = _ggml("ggml_row_size", ctypes.c_size_t, ctypes.c_int, ctypes.c_int64)
_type_name = _ggml("ggml_type_name", ctypes.c_char_p, ctypes.c_int)


def devices() -> list[Device]:
    """Every GPU, then the CPU, as ggml sees them now."""
    set_up()
    found: list[Device] = []
    for index in range(_dev_count()):
        handle = _dev_get(index)
        kind = _dev_type(handle)
        if kind > 2:  # accelerators (BLAS, AMX) work in the CPU's memory
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        names = _dev_name(handle).decode(), _dev_description(handle).decode()
        found.append(Device(*names, kind in (1, 2), free.value, total.value))
    return sorted(found, key=lambda device: not device.is_gpu)


def supports_gpu() -> bool:
    """Whether this build of llama.cpp can put layers on a GPU."""
    return bool(C.llama_supports_gpu_offload())


def row_bytes(ggml_type: int, elements: int) -> int:
    """Bytes of one row of `elements` values; 0 for a type that this ggml does not know."""
    if not 0 <= ggml_type < C.GGML_TYPE_COUNT or _type_name(ggml_type) is None:
        return 0
    return int(_row_size(ggml_type, elements))


# --- model -------------------------------------------------------------------------------------------------


class Model:
    """Weights and vocabulary of one GGUF file.

    With `rehearse`, nothing is allocated for the weights and the KV cache of any context made from it; such
    a model serves only to learn what llama.cpp would allocate. Raises ModelLoadError.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_gpu_layers: int = -1,
        main_gpu: int = 0,
        use_mmap: bool = True,
        mlock: bool = False,
        rehearse: bool = False,
    ) -> None:
        set_up()
        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.split_mode = C.LLAMA_SPLIT_MODE_NONE
        params.main_gpu = main_gpu if n_gpu_layers else -1  # -1: no device but the CPU, not even for buffers
        mode = use_mmap * C.LLAMA_LOAD_MODE_MMAP | mlock * C.LLAMA_LOAD_MODE_MLOCK
        params.load_mode = C.LLAMA_LOAD_MODE_NONE if rehearse else mode
        params.no_alloc = rehearse
        params.load_mtp = False
        with tapped_log() as lines:
            self._handle = C.llama_model_load_from_file(str(path).encode(), params)
        self.log = lines
        if not self._handle:
            raise ModelLoadError(f"llama.cpp could not load {path}: {_reason(lines)}")
        self._vocab = C.llama_model_get_vocab(self._handle)
        self.n_vocab = int(C.llama_vocab_n_tokens(self._vocab))
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self._handle))
        self.n_params = int(C.llama_model_n_params(self._handle))
        self.size_bytes = int(C.llama_model_size(self._handle))
        self.eos = int(C.llama_vocab_eos(self._vocab))
        adds_bos = C.llama_vocab_get_add_bos(self._vocab)
        self.bos = int(C.llama_vocab_bos(self._vocab)) if adds_bos else None

    def description(self) -> str:
        """Architecture, size class and quantization, in llama.cpp's words."""
        return _string(C.llama_model_desc, self._handle)

    def metadata(self) -> dict[str, str]:
        """The scalar GGUF keys and their values, as text."""
        found = {}
        for index in range(C.llama_model_meta_count(self._handle)):
            key = _string(C.llama_model_meta_key_by_index, self._handle, index)
            found[key] = _string(C.llama_model_meta_val_str_by_index, self._handle, index)
        return found

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        """Ids of valid UTF-8 `text`; with `special`, the texts of control tokens become those tokens."""
        buffer = (C.llama_token * (len(text) + 1))()  # a token stands for at least one byte
        count = C.llama_tokenize(self._vocab, text, len(text), buffer, len(buffer), False, special)
        if count < 0:
            raise LlamaError(f"llama_tokenize returned {count} for {len(text)} bytes")
        return buffer[:count]  # type: ignore[no-any-return]

    def piece(self, token: int, *, special: bool) -> bytes:
        """The bytes a token stands for: for a control token none, or with `special` its own text."""
        buffer = ctypes.create_string_buffer(64)
        count = C.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = C.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return bytes(buffer.raw[:count])

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(C.llama_vocab_is_eog(self._vocab, token))

    def is_added(self, token: int) -> bool:
        """Whether llama.cpp looks for the token's text before it splits text (CONTROL, USER_DEFINED)."""
        return bool(C.llama_vocab_get_attr(self._vocab, token) & (_ATTR_CONTROL | _ATTR_USER_DEFINED))

    def is_unused(self, token: int) -> bool:
        """Whether the id only pads the vocabulary."""
        return bool(C.llama_vocab_get_attr(self._vocab, token) & _ATTR_UNUSED)

    def close(self) -> None:
        """Free the weights. Every context of this model must be closed before. Idempotent."""
        if self._handle:
            C.llama_model_free(self._handle)
            self._handle = None


def _string(function: Any, *arguments: Any) -> str:
    """Read a string from one of llama.cpp's `(..., char * buf, size_t size) -> length` functions."""
    buffer = ctypes.create_string_buffer(1024)
    length = function(*arguments, buffer, len(buffer))
    if length >= len(buffer):
        buffer = ctypes.create_string_buffer(length + 1)
        function(*arguments, buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace")


# --- context -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextOptions:
    """`n_ctx` is in tokens, all sequences together; `n_outputs`, at least `n_seq`, bounds the logits rows."""

    n_ctx: int
    n_seq: int
    n_batch: int
    n_ubatch: int
    n_outputs: int
    threads: int
    threads_batch: int
    flash_attn: str
    type_k: str
    type_v: str


class Context:
    """KV cache, recurrent states and compute buffers: what decodes batches.

    Fill `tokens`, `positions`, `sequences` and `outputs` (1 where logits are wanted) from the start, call
    `decode(n)`, read `logits(rows)`. One thread only. Raises LlamaError when llama.cpp refuses the options.
    """

    def __init__(self, model: Model, options: ContextOptions) -> None:
        params = C.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_seq_max = options.n_seq
        params.n_batch = options.n_batch
        params.n_ubatch = options.n_ubatch
        params.n_outputs_max = options.n_outputs
        params.n_threads = options.threads
        params.n_threads_batch = options.threads_batch
        params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
        params.type_k = CACHE_TYPES[options.type_k]
        params.type_v = CACHE_TYPES[options.type_v]
        params.kv_unified = True
        params.offload_kqv = True
        params.no_perf = True
        with tapped_log() as lines:
            self._handle = C.llama_init_from_model(model._handle, params)
        self.log = lines
        if not self._handle:
            raise LlamaError(_reason(lines))
        self._memory = C.llama_get_memory(self._handle)
        self._n_vocab = model.n_vocab
        self._n_outputs = options.n_outputs
        self.n_ctx = int(C.llama_n_ctx(self._handle))
        self.n_batch = int(C.llama_n_batch(self._handle))

        n = self.n_batch
        self.tokens: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.positions: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.sequences: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.outputs: npt.NDArray[np.int8] = np.zeros(n, np.int8)
        self._counts = np.ones(n, np.int32)
        self._pointers = self.sequences.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        self._batch = C.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(ctypes.POINTER(C.llama_token)),
            embd=None,
            pos=self.positions.ctypes.data_as(ctypes.POINTER(C.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(C.llama_seq_id))),
            logits=self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self._logits_address = 0
        self._logits: npt.NDArray[np.float32] = np.zeros((0, self._n_vocab), np.float32)

    def decode(self, n_tokens: int) -> None:
        """Run the first `n_tokens` of the batch. Positions must continue their sequences without a gap.

        Raises NoMemorySlot when the cache is full, LlamaError when the computation failed; after the latter
        the sequences of the batch are in an unknown state.
        """
        if not 0 < n_tokens <= self.n_batch:
            raise LlamaError(f"a batch of {n_tokens} tokens; it must be 1 to {self.n_batch}")
        if (rows := np.count_nonzero(self.outputs[:n_tokens])) > self._n_outputs:
            raise LlamaError(f"a batch with {rows} outputs; this context was made for {self._n_outputs}")
        self._batch.n_tokens = n_tokens
        status = C.llama_decode(self._handle, self._batch)
        if status == 1:
            raise NoMemorySlot(f"no room in the cache for a batch of {n_tokens} tokens")
        if status != 0:
            raise LlamaError(f"llama_decode returned {status} for a batch of {n_tokens} tokens")

    def logits(self, rows: int) -> npt.NDArray[np.float32]:
        """Logits of the last batch's outputs, in their order: shape [rows, n_vocab], valid until the next.

        Waits for the device. The view is writable; nothing reads it after the caller.
        """
        pointer = C.llama_get_logits(self._handle)
        address = ctypes.addressof(pointer.contents)
        if address != self._logits_address or rows > len(self._logits):
            memory = (ctypes.c_float * (rows * self._n_vocab)).from_address(address)
            self._logits = np.ctypeslib.as_array(memory).reshape(rows, self._n_vocab)
            self._logits_address = address
        return self._logits[:rows]

    def remove(self, sequence: int) -> None:
        """Forget a sequence: its cells are free again."""
        C.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Forget every sequence."""
        C.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._handle:
            C.llama_free(self._handle)
            self._handle = None


class SamplerChain:
    """llama.cpp's CPU samplers, in this order: top-k, temperature, top-p, min-p, a seeded draw.

    Temperature comes before top-p and min-p, as in transformers and vLLM, because that is what the sampling
    defaults of a checkpoint were chosen for.
    """

    def __init__(self, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int) -> None:
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        self._handle = C.llama_sampler_chain_init(params)
        add = partial(C.llama_sampler_chain_add, self._handle)
        if top_k > 0:
            add(C.llama_sampler_init_top_k(top_k))
        if temperature != 1.0:
            add(C.llama_sampler_init_temp(temperature))
        if top_p < 1.0:
            add(C.llama_sampler_init_top_p(top_p, 1))
        if min_p > 0.0:
            add(C.llama_sampler_init_min_p(min_p, 1))
        add(C.llama_sampler_init_dist(seed))

    def sample(self, context: Context, index: int) -> int:
        """Draw from the logits of the batch's token `index`, which must be one of its outputs."""
        return int(C.llama_sampler_sample(self._handle, context._handle, index))

    def close(self) -> None:
        """Free the chain. Idempotent."""
        if self._handle:
            C.llama_sampler_free(self._handle)
            self._handle = None
