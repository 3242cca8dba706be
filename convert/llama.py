"""llama.cpp as the converter needs it: the only module of `convert` that touches ctypes.

A typed, narrow face on llama-cpp-python's bindings of `llama.h` and `llama-ext.h`. Failures are `LlamaError`s
that carry what llama.cpp itself last complained about.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

# Before numpy: where libggml-cuda exports C++ runtime symbols, the other order crashes at model load.
import llama_cpp as _package
from llama_cpp import llama_cpp as _api
from llama_cpp import llama_cpp_ext as _ext

import numpy as np  # isort: skip
from numpy.typing import NDArray

from convert.errors import ConvertError

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_VERSION: Final[str] = _package.__version__

_FLOATS = ctypes.POINTER(ctypes.c_float)

Floats = NDArray[np.float32]
Observer = Callable[[str, Floats], None]
ContextKind = Literal["trunk", "mtp"]


class LlamaError(ConvertError):
    """llama.cpp refused or failed; the message says at what, and its own last words."""


@dataclass(frozen=True)
class Runtime:
    """Where llama.cpp runs: CPU threads (None: one for each usable CPU), layers on the GPU (-1: all)."""

    threads: int | None = None
    n_gpu_layers: int = -1

    @property
    def n_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


class _Tensor(ctypes.Structure):
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


class _GgufParams(ctypes.Structure):
    """`struct gguf_init_params` of `gguf.h`."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


def _ggml(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_api._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


_ggml_op_name = _ggml("ggml_op_name", ctypes.c_char_p, ctypes.c_int)
_ggml_nbytes = _ggml("ggml_nbytes", ctypes.c_size_t, ctypes.POINTER(_Tensor))
_ggml_is_host = _ggml("ggml_backend_buffer_is_host", ctypes.c_bool, ctypes.c_void_p)
_ggml_read = _ggml(
    "ggml_backend_tensor_get",
    None,
    ctypes.POINTER(_Tensor),
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
)
_gguf_open = _ggml("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufParams)
_gguf_find = _ggml("gguf_find_tensor", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p)
_gguf_close = _ggml("gguf_free", None, ctypes.c_void_p)
_OBJECT_HEADER = 32  # sizeof(struct ggml_object)
if _ggml("ggml_tensor_overhead", ctypes.c_size_t)() != _OBJECT_HEADER + ctypes.sizeof(_Tensor):
    raise LlamaError(
        f"llama-cpp-python {LLAMA_VERSION}: struct ggml_tensor is not what convert.llama declares"
    )
_MUL_MAT = next(op for op in range(100) if _ggml_op_name(op) == b"MUL_MAT")

_LOG_LEVEL_ERROR = 4  # enum ggml_log_level
_complaints: deque[str] = deque(maxlen=3)
_on_log: Callable[[str], None] | None = None


@_api.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes | None, _: Any) -> None:
    line = (text or b"").decode("utf-8", "replace")
    if _on_log is not None:
        _on_log(line)
    if level == _LOG_LEVEL_ERROR:
        _complaints.append(line.strip())


_api.llama_log_set(_log, None)
_api.llama_backend_init()


def _failure(what: str) -> LlamaError:
    words = " / ".join(_complaints)
    _complaints.clear()
    return LlamaError(f"{what}: {words}" if words else what)


class Model:
    """A loaded GGUF, MTP block included; a context manager. Raises `LlamaError` if it cannot be loaded."""

    def __init__(self, path: Path, runtime: Runtime) -> None:
        self.path, self.runtime = path, runtime
        params = _api.llama_model_default_params()
        params.n_gpu_layers = runtime.n_gpu_layers
        params.load_mtp = True
        self._pointer = _api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._pointer:
            raise _failure(f"{path}: llama.cpp cannot load this file")
        self._vocab = _api.llama_model_get_vocab(self._pointer)
        self.n_vocab: int = _api.llama_vocab_n_tokens(self._vocab)
        self.n_embd: int = _api.llama_model_n_embd(self._pointer)
        self.n_nextn: int = _api.llama_model_n_layer_nextn(self._pointer)
        self.n_layer: int = _api.llama_model_n_layer(self._pointer)
        """Trunk blocks; the MTP block, where there is one, is block number `n_layer`."""
        self.bos: int | None = (
            _api.llama_vocab_bos(self._vocab) if _api.llama_vocab_get_add_bos(self._vocab) else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the weights; contexts made from this model must be closed before."""
        if self._pointer:
            _api.llama_model_free(self._pointer)
            self._pointer = None

    def head_name(self) -> str:
        """The weight of the output head: `output.weight`, or `token_embd.weight` where the two are tied."""
        gguf = _gguf_open(os.fsencode(self.path), _GgufParams(no_alloc=True, context=None))
        untied = _gguf_find(gguf, b"output.weight") >= 0
        _gguf_close(gguf)
        return "output.weight" if untied else "token_embd.weight"

    def metadata(self, key: str) -> str | None:
        """The GGUF's value for `key` as text, or None if it has none."""
        n = _api.llama_model_meta_val_str(self._pointer, key.encode(), None, 0)
        if n < 0:
            return None
        buffer = ctypes.create_string_buffer(n + 1)
        _api.llama_model_meta_val_str(self._pointer, key.encode(), buffer, n + 1)
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens parsed, BOS and EOS added where the vocabulary says so."""
        data = text.encode()
        capacity = len(data) + 2
        ids = (_api.llama_token * capacity)()
        n = _api.llama_tokenize(self._vocab, data, len(data), ids, capacity, True, True)
        if n < 0:
            raise _failure(f"{self.path}: tokenizing {len(data)} bytes failed")
        return list(ids[:n])

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of `tokens`, special tokens spelled out; may end inside a UTF-8 character."""
        ids = (_api.llama_token * len(tokens))(*tokens)
        n = -_api.llama_detokenize(self._vocab, ids, len(tokens), None, 0, False, True)
        buffer = ctypes.create_string_buffer(max(n, 0) + 1)
        n = _api.llama_detokenize(self._vocab, ids, len(tokens), buffer, len(buffer), False, True)
        return buffer.raw[:n]

    def token_texts(self) -> list[bytes]:
        """Every token as the vocabulary spells it (byte-level for regular tokens), by id."""
        return [_api.llama_vocab_get_text(self._vocab, token) for token in range(self.n_vocab)]

    def unused_tokens(self) -> NDArray[np.int64]:
        """Ids that pad the vocabulary and stand for nothing; a model may score them all the same."""
        attributes = [_api.llama_vocab_get_attr(self._vocab, token) for token in range(self.n_vocab)]
        return np.flatnonzero(np.array(attributes) & _api.LLAMA_TOKEN_ATTR_UNUSED)

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        return bool(_api.llama_vocab_is_eog(self._vocab, token))


class Batch:
    """Tokens for one `Context.decode`, at most the context's `n_batch`."""

    def __init__(self, context: Context) -> None:
        self._pointer = _api.llama_batch_ext_init(context.pointer)
        self._n_embd = context.model.n_embd
        self.n_tokens = self.n_outputs = 0

    def __del__(self) -> None:
        _api.llama_batch_ext_free(self._pointer)

    @property
    def pointer(self) -> Any:
        return self._pointer

    def add(
        self,
        token: int,
        position: int,
        sequence: int = 0,
        *,
        output: bool = False,
        hidden: Floats | None = None,
    ) -> None:
        """Appends a token; `output` asks for its logits; `hidden` [n_embd] is for the MTP block."""
        index = _api.llama_batch_ext_add_token(self._pointer, sequence, token)
        if index < 0:
            raise LlamaError(
                f"token {token} of sequence {sequence} does not fit the batch (llama.cpp says {index})"
            )
        _api.llama_batch_ext_set_pos(self._pointer, index, ctypes.byref(ctypes.c_int32(position)))
        _api.llama_batch_ext_set_output_logits(self._pointer, index, output)
        if hidden is not None:
            row = hidden.ctypes.data_as(_FLOATS)
            embd = _api.llama_embd(data=row, n_rows=1, n_embd=self._n_embd)
            if not _api.llama_batch_ext_set_embd_token(self._pointer, index, embd):
                raise _failure(f"a hidden row of {hidden.shape} values does not fit the batch")
        self.n_tokens += 1
        self.n_outputs += output


class Context:
    """A llama.cpp context over `model`: `trunk`, or `mtp` for the draft head; use as a context manager.

    Args:
        n_ctx: cells in total, shared evenly by `n_seq` sequences; n_batch, n_ubatch: tokens a call, a graph.
        observe: called with (weight name, rows [n, width]) for every matmul whose weight `observes` picks.
        precise: F32 KV cache and no flash attention, the configuration to compare with a reference in.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int = 512,
        n_seq: int = 1,
        kind: ContextKind = "trunk",
        precise: bool = False,
        observe: Observer | None = None,
        observes: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.model, self.n_batch, self.n_seq = model, n_batch, n_seq
        self._probe = _Probe(observe, observes) if observe is not None else None
        params = _api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_ubatch, n_seq
        params.n_threads = params.n_threads_batch = model.runtime.n_threads
        params.no_perf = True
        if kind == "mtp":
            params.ctx_type = _api.LLAMA_CONTEXT_TYPE_MTP
        if precise:
            params.type_k = params.type_v = _api.GGML_TYPE_F32
            params.flash_attn_type = _api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if self._probe is not None:
            params.cb_eval = self._probe.callback
        self._pointer = _api.llama_init_from_model(model._pointer, params)
        if not self._pointer:
            raise _failure(f"{model.path}: llama.cpp cannot make a context of {n_ctx} tokens")
        self._n_tokens = self._n_outputs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees caches and compute buffers."""
        if self._pointer:
            _api.llama_free(self._pointer)
            self._pointer = None

    @property
    def pointer(self) -> Any:
        return self._pointer

    def keep_hidden(self) -> None:
        """From now on every decoded token leaves its hidden row, read by `hidden`."""
        _ext.llama_set_embeddings_nextn(self._pointer, True, False)

    def decode(self, batch: Batch) -> None:
        """Runs the batch. Raises what an observer raised, or `LlamaError`."""
        code = _api.llama_process(self._pointer, _api.LLAMA_PROCESS_TYPE_DECODE, batch.pointer)
        if self._probe is not None:
            self._probe.reraise()
        if code == 1:
            raise LlamaError(f"{self.model.path}: the context is full ({batch.n_tokens} tokens did not fit)")
        if code != 0:
            raise _failure(f"{self.model.path}: llama_process returned {code}")
        self._n_tokens, self._n_outputs = batch.n_tokens, batch.n_outputs

    def logits(self) -> Floats:
        """[outputs of the last batch, n_vocab] in the batch's order; a view, gone with the next decode."""
        pointer = _api.llama_get_logits(self._pointer)
        return np.ctypeslib.as_array(pointer, (self._n_outputs, self.model.n_vocab))

    def hidden(self) -> Floats:
        """[tokens of the last batch, n_embd] after the output norm, what head and MTP block read; a view."""
        pointer = _ext.llama_get_embeddings_nextn(self._pointer)
        return np.ctypeslib.as_array(pointer, (self._n_tokens, self.model.n_embd))

    def clear(self, sequence: int | None = None) -> None:
        """Forgets one sequence, or all."""
        memory = _api.llama_get_memory(self._pointer)
        if sequence is None:
            _api.llama_memory_clear(memory, True)
        else:
            _api.llama_memory_seq_rm(memory, sequence, -1, -1)


class _Probe:
    """The eval callback: hands the F32 inputs of wanted matmuls to an observer (as `llama-imatrix` does).

    Matmuls in a row that read the same tensor (q, k and v, say) are handed the same array, read once.
    """

    def __init__(self, observe: Observer, observes: Callable[[str], bool]) -> None:
        self._observe, self._observes = observe, observes
        self._error: BaseException | None = None
        self._source, self._rows = 0, np.empty((0, 0), np.float32)
        self.callback = _api.ggml_backend_sched_eval_callback(self._on_eval)

    def reraise(self) -> None:
        error, self._error, self._source = self._error, None, 0
        if error is not None:
            raise error

    def _on_eval(self, pointer: int, ask: bool, _: Any) -> bool:
        # An exception must not cross into C: it is kept, the graph is stopped, and `reraise` brings it back.
        try:
            tensor = _Tensor.from_address(pointer)
            if tensor.op != _MUL_MAT:
                return not ask
            name = _weight_name(_Tensor.from_address(tensor.src[0]).name)
            rows = _Tensor.from_address(tensor.src[1])
            if rows.type != _api.GGML_TYPE_F32 or not self._observes(name):
                return not ask
            if not ask:
                if tensor.src[1] != self._source:
                    self._source, self._rows = tensor.src[1], _read_rows(rows)
                self._observe(name, self._rows)
        except BaseException as error:
            self._error = error
            return False
        return True


def _weight_name(name: bytes) -> str:
    """`CUDA0#blk.0.attn_k.weight#0` -> `blk.0.attn_k.weight`: the scheduler decorates copies of weights."""
    parts = name.decode().split("#")
    return parts[1] if len(parts) > 1 else parts[0]


def _read_rows(tensor: _Tensor) -> Floats:
    """An F32 tensor as [rows, ne0]: a view of host memory, or a copy of device memory."""
    n_bytes = _ggml_nbytes(tensor)
    if _ggml_is_host(tensor.buffer):
        raw = (ctypes.c_char * n_bytes).from_address(tensor.data)
    else:
        raw = (ctypes.c_char * n_bytes)()
        _ggml_read(tensor, raw, 0, n_bytes)
    shape, strides = tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
    return np.ndarray(shape, np.float32, raw, strides=strides).reshape(-1, tensor.ne[0])


def quantize_file(
    source: Path,
    target: Path,
    *,
    file_type: int,
    overrides: Sequence[tuple[str, int]] = (),
    imatrix: Mapping[str, Floats] | None = None,
    metadata: Mapping[str, str | int] | None = None,
    threads: int = 0,
    on_tensor: Callable[[int, str], None] = lambda total, name: None,
) -> None:
    """`llama_model_quantize`: writes `source` to `target` as `file_type` (enum llama_ftype).

    Args:
        overrides: (regular expression, enum ggml_type), the first that is found in a tensor's name decides.
        imatrix: mean squared input per column, by tensor name.
        metadata: keys to add to the output; strings are cut at llama.cpp's 127 bytes.
        on_tensor: called with (number of tensors, name) as each begins.

    Raises:
        LlamaError: llama.cpp gave up; `target` may be there, incomplete.
    """
    global _on_log

    def follow(line: str) -> None:
        # "[  12/ 340]  blk.0.attn_k.weight  - [...]": printed as each tensor's turn comes
        if line.startswith("[") and "]" in line:
            counts, _, rest = line[1:].partition("]")
            on_tensor(int(counts.partition("/")[2]), rest.split()[0])

    params = _api.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, file_type
    columns = {name: np.ascontiguousarray(values, np.float32) for name, values in (imatrix or {}).items()}
    if overrides:
        params.tt_overrides = (_api.llama_model_tensor_override * (len(overrides) + 1))(
            *((pattern.encode(), kind) for pattern, kind in overrides), (None, _api.GGML_TYPE_COUNT)
        )
    if columns:
        params.imatrix = (_api.llama_model_imatrix_data * (len(columns) + 1))(
            *(
                (name.encode(), values.ctypes.data_as(_FLOATS), values.size)
                for name, values in columns.items()
            )
        )
    if metadata:
        params.kv_overrides = (_api.llama_model_kv_override * (len(metadata) + 1))(
            *(_kv_override(key, value) for key, value in metadata.items())
        )
    _on_log = follow
    try:
        code = _api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    finally:
        _on_log = None
    if code != 0:
        raise _failure(f"{source}: llama.cpp cannot quantize this file")


def _kv_override(key: str, value: str | int) -> Any:
    entry = _api.llama_model_kv_override()
    entry.key = key.encode()
    if isinstance(value, int):
        entry.tag, entry.value.val_i64 = _api.LLAMA_KV_OVERRIDE_TYPE_INT, value
    else:
        entry.tag, entry.value.val_str = _api.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()[:127]
    return entry
