"""Weights and vocabulary of a GGUF file."""

import ctypes
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from . import ggml
from .devices import buffer_type
from .errors import LlamaError, ModelLoadError
from .log import reason, set_up, tapped_log
from .patches import REPACKED_WEIGHTS, ROW_SAMPLER, amx_is_right, brings

EMBEDDING = rb"^token_embd\.weight$"
"""Pattern for the name of the token embedding, for llama.cpp."""

_ATTR_UNUSED, _ATTR_CONTROL, _ATTR_USER_DEFINED = 1 << 1, 1 << 3, 1 << 4

EOS_KEY, DEFAULT_EOS = "tokenizer.ggml.eos_token_id", 11
"""The key of the token that ends an answer, and what llama.cpp takes without it (llama-vocab.cpp, gpt2)."""
CHECK_TENSORS = True
"""Whether a weight or scale that is not finite is an error when a model is loaded, not answers of NaN."""

HAS_PIECES = brings(ROW_SAMPLER, "llama_vocab_pieces")
"""Whether this build tells the texts of all tokens in one call, for log-probabilities."""

if HAS_PIECES:
    _P, _I32 = ctypes.c_void_p, ctypes.c_int32
    _pieces = ggml.declare("llama_vocab_pieces", ctypes.c_bool, _P, _I32, ctypes.c_char_p, _I32, _P)


class _BufferTypeOverride(ctypes.Structure):
    """`struct llama_model_tensor_buft_override` of llama.h: the buffer type of tensors with matching
    names."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


class Model:
    """Weights and vocabulary of one GGUF file; a context manager, to be closed after its contexts.

    With `no_alloc`, neither the weights nor the KV caches of contexts are allocated; such a model only
    reports what llama.cpp would allocate. `shares` splits the layers among all GPUs in these proportions
    (None: by free memory); without it, `main_gpu` holds all GPU layers. The token embedding is on the device
    `embedding_on`, by ggml's name, or else on the host. If it is also the output head, and the head is on the
    same device, they are one tensor there. With `f16_copies`, quantized matrices also have FP16 copies on
    devices that are faster with them (`keeps_f16_copies`) and have room for all. With `repack`, quantized
    matrices are reordered in place for tensor cores on devices that have kernels for it, and cannot be
    written to; a llama.cpp without the patch `repacked-weights` leaves them as they are. `load_mtp` also
    loads the multi-token-prediction block, if the file has one. `writable` weights are in memory of their
    own, as in the file, for `weights.Weights`. `check`: refuse weights that are not finite, which reads the
    whole file. Raises ModelLoadError.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_gpu_layers: int = -1,
        main_gpu: int = 0,
        shares: Sequence[float] | None = (),
        embedding_on: str | None = None,
        use_mmap: bool = True,
        mlock: bool = False,
        no_alloc: bool = False,
        f16_copies: bool = False,
        repack: bool = False,
        load_mtp: bool = False,
        writable: bool = False,
        check: bool = True,
    ) -> None:
        self.path = path
        self._handle: Any = None
        set_up()
        params = C.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.split_mode = C.LLAMA_SPLIT_MODE_NONE if shares == () else C.LLAMA_SPLIT_MODE_LAYER
        split = (ctypes.c_float * C.llama_max_devices())(*shares or ())  # llama.cpp copies it during loading
        params.tensor_split = split if shares else None
        params.main_gpu = main_gpu if n_gpu_layers else -1  # -1: no device but the CPU, not even for buffers
        overrides = (_BufferTypeOverride * 2)()  # the second, all zeros, ends the list
        if embedding_on is not None:
            overrides[0] = _BufferTypeOverride(EMBEDDING, buffer_type(embedding_on))
            params.tensor_buft_overrides = ctypes.addressof(overrides)
        mode = use_mmap * C.LLAMA_LOAD_MODE_MMAP | mlock * C.LLAMA_LOAD_MODE_MLOCK
        params.load_mode = C.LLAMA_LOAD_MODE_NONE if no_alloc or writable else mode
        params.no_alloc = no_alloc
        self.checked = CHECK_TENSORS and check and not no_alloc
        """Whether all weights were read and found finite."""
        params.check_tensors = self.checked
        params.load_mtp = load_mtp
        params.use_extra_bufts = amx_is_right() and not writable
        with tapped_log() as lines:
            self._handle = C.llama_model_load_from_file(os.fsencode(path), params)
        self.log = lines
        if not self._handle:
            raise ModelLoadError(f"llama.cpp could not load {path}: {reason(lines)}")
        self.f16_copies = self._changed("llama_model_keep_f16_copies") if f16_copies else 0
        """Bytes of the FP16 copies."""
        repack = repack and brings(REPACKED_WEIGHTS, "llama_model_repack_weights")
        self.repacked = self._changed("llama_model_repack_weights") if repack else 0
        """Bytes of the weights that were repacked."""
        self._vocab = C.llama_model_get_vocab(self._handle)
        self.n_vocab = int(C.llama_vocab_n_tokens(self._vocab))
        self.n_embd = int(C.llama_model_n_embd(self._handle))
        self.n_layer = int(C.llama_model_n_layer(self._handle))
        """Layers of the trunk; the MTP block, if there is one, is block number `n_layer`."""
        self.n_nextn = int(C.llama_model_n_layer_nextn(self._handle))
        self.n_ctx_train = int(C.llama_model_n_ctx_train(self._handle))
        self.n_params = int(C.llama_model_n_params(self._handle))
        self.size_bytes = int(C.llama_model_size(self._handle))
        self._names_eos = EOS_KEY in self.metadata()
        self.eos = int(C.llama_vocab_eos(self._vocab))
        if not self._names_eos:
            self.eos = min(self.eog_ids, default=self.eos)
        adds_bos = C.llama_vocab_get_add_bos(self._vocab)
        self.bos = int(C.llama_vocab_bos(self._vocab)) if adds_bos else None

    def _changed(self, function: str) -> int:
        return int(ggml.declare(function, ctypes.c_size_t, ctypes.c_void_p)(self._handle))

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: str | bytes, *, special: bool = True, ends: bool = False) -> list[int]:
        """Ids of `text`; bytes must be valid UTF-8. With `special`, the texts of control tokens become those
        tokens; with `ends`, BOS and EOS are added if the vocabulary says so."""
        text = text.encode() if isinstance(text, str) else text
        buffer = (C.llama_token * (len(text) + 2))()  # a token has at least one byte
        count = C.llama_tokenize(self._vocab, text, len(text), buffer, len(buffer), ends, special)
        if count < 0:
            raise LlamaError(f"llama_tokenize returned {count} for {len(text)} bytes")
        return buffer[:count]  # type: ignore[no-any-return]

    def piece(self, token: int, *, special: bool) -> bytes:
        """A token's bytes: none for a control token, or with `special` its text."""
        if special and self._spelled is not None:
            text, ends = self._spelled
            return text[ends[token - 1] if token else 0 : ends[token]]
        buffer = ctypes.create_string_buffer(64)
        count = C.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = C.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return bytes(buffer.raw[:count])

    @cached_property
    def _spelled(self) -> tuple[bytes, list[int]] | None:
        """All tokens' texts, and where each ends; None if this build cannot tell them together."""
        if not HAS_PIECES:
            return None
        ends, size = np.zeros(self.n_vocab, np.int32), 16 * self.n_vocab
        while True:
            buffer = ctypes.create_string_buffer(size)
            if _pieces(self._vocab, self.n_vocab, buffer, size, ends.ctypes.data):
                return buffer.raw[: ends[-1]], ends.tolist()
            size *= 2

    def detokenize(self, tokens: Iterable[int]) -> bytes:
        """The bytes of `tokens`, control tokens spelled out; may end inside a UTF-8 character."""
        return b"".join(self.piece(token, special=True) for token in tokens)

    def token_texts(self) -> list[bytes]:
        """Every token's text in the vocabulary (byte-level for regular tokens), by id."""
        return [C.llama_vocab_get_text(self._vocab, token) for token in range(self.n_vocab)]

    def unused_tokens(self) -> list[int]:
        """Ids that only pad the vocabulary; a model may still score them."""
        attributes = (C.llama_vocab_get_attr(self._vocab, token) for token in range(self.n_vocab))
        return [token for token, attribute in enumerate(attributes) if attribute & _ATTR_UNUSED]

    def is_added(self, token: int) -> bool:
        """Whether llama.cpp matches the token's text before it splits text (CONTROL, USER_DEFINED)."""
        return bool(C.llama_vocab_get_attr(self._vocab, token) & (_ATTR_CONTROL | _ATTR_USER_DEFINED))

    def is_control(self, token: int) -> bool:
        """Whether `tokenize` turns the token's text into the token only with `special`."""
        return bool(C.llama_vocab_get_attr(self._vocab, token) & _ATTR_CONTROL)

    @cached_property
    def eog_ids(self) -> frozenset[int]:
        """Tokens that end an answer: by keys of the file, or by their texts. llama.cpp adds token 11, a
        comma, if the file does not name one."""
        ends = frozenset(token for token in range(self.n_vocab) if C.llama_vocab_is_eog(self._vocab, token))
        return ends if self._names_eos else ends - {DEFAULT_EOS}

    @cached_property
    def n_real(self) -> int:
        """Ids from here on pad the vocabulary to a round size (type UNUSED); none may be emitted."""
        n = self.n_vocab
        while n > 0 and C.llama_vocab_get_attr(self._vocab, n - 1) & _ATTR_UNUSED:
            n -= 1
        return n

    def close(self) -> None:
        """Free the weights. All contexts of this model must be closed before. Idempotent."""
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
