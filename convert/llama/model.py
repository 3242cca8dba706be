"""Models and their vocabularies."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from llama_cpp import llama_cpp as api

from qwen_serve.convert.interrupts import held

from .bindings import GgufParams, Handle, failure, gguf_close, gguf_find, gguf_open

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Runtime:
    """Where llama.cpp runs: CPU threads (None: one for each usable CPU), layers on the GPU (-1: all)."""

    threads: int | None = None
    n_gpu_layers: int = -1

    @property
    def n_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))


class Model(Handle):
    """A loaded GGUF, MTP block included. Raises `LlamaError` if it cannot be loaded.

    A context manager, to be closed after the contexts that were made from it. `writable`: its weights are in
    memory of its own, as they stand in the file, for `Weights`.
    """

    _free = staticmethod(api.llama_model_free)

    def __init__(self, path: Path, runtime: Runtime, *, writable: bool = False) -> None:
        self.path, self.runtime = path, runtime
        params = api.llama_model_default_params()
        if writable:
            params.load_mode, params.use_extra_bufts = api.LLAMA_LOAD_MODE_NONE, False
        params.n_gpu_layers = runtime.n_gpu_layers
        params.load_mtp = True
        with held():
            self._pointer = api.llama_model_load_from_file(os.fsencode(path), params)
        if not self._pointer:
            raise failure(f"{path}: llama.cpp cannot load this file")
        self._vocab = api.llama_model_get_vocab(self._pointer)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.n_embd: int = api.llama_model_n_embd(self._pointer)
        self.n_nextn: int = api.llama_model_n_layer_nextn(self._pointer)
        self.n_layer: int = api.llama_model_n_layer(self._pointer)
        """Trunk blocks; the MTP block, where there is one, is block number `n_layer`."""
        self.bos: int | None = (
            api.llama_vocab_bos(self._vocab) if api.llama_vocab_get_add_bos(self._vocab) else None
        )

    def head_name(self) -> str:
        """The weight of the output head: `output.weight`, or `token_embd.weight` where the two are tied."""
        gguf = gguf_open(os.fsencode(self.path), GgufParams(no_alloc=True, context=None))
        untied = gguf_find(gguf, b"output.weight") >= 0
        gguf_close(gguf)
        return "output.weight" if untied else "token_embd.weight"

    def metadata(self, key: str) -> str | None:
        """The GGUF's value for `key` as text, or None if it has none."""
        n = api.llama_model_meta_val_str(self._pointer, key.encode(), None, 0)
        if n < 0:
            return None
        buffer = ctypes.create_string_buffer(n + 1)
        api.llama_model_meta_val_str(self._pointer, key.encode(), buffer, n + 1)
        return buffer.value.decode("utf-8", "replace")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens parsed, BOS and EOS added where the vocabulary says so."""
        data = text.encode()
        capacity = len(data) + 2
        ids = (api.llama_token * capacity)()
        n = api.llama_tokenize(self._vocab, data, len(data), ids, capacity, True, True)
        if n < 0:
            raise failure(f"{self.path}: tokenizing {len(data)} bytes failed")
        return list(ids[:n])

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """The bytes of `tokens`, special tokens spelled out; may end inside a UTF-8 character."""
        ids = (api.llama_token * len(tokens))(*tokens)
        n = -api.llama_detokenize(self._vocab, ids, len(tokens), None, 0, False, True)
        buffer = ctypes.create_string_buffer(max(n, 0) + 1)
        n = api.llama_detokenize(self._vocab, ids, len(tokens), buffer, len(buffer), False, True)
        return buffer.raw[:n]

    def token_texts(self) -> list[bytes]:
        """Every token as the vocabulary spells it (byte-level for regular tokens), by id."""
        return [api.llama_vocab_get_text(self._vocab, token) for token in range(self.n_vocab)]

    def unused_tokens(self) -> NDArray[np.int64]:
        """Ids that pad the vocabulary and stand for nothing; a model may score them all the same."""
        attributes = [api.llama_vocab_get_attr(self._vocab, token) for token in range(self.n_vocab)]
        return np.flatnonzero(np.array(attributes) & api.LLAMA_TOKEN_ATTR_UNUSED)

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation."""
        return bool(api.llama_vocab_is_eog(self._vocab, token))
