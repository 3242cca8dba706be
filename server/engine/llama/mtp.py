"""The checkpoint's multi-token-prediction head: a context of its own that reads the trunk's hidden rows."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
from llama_cpp import llama_cpp_ext

from server.engine.errors import LlamaError, NoMemorySlot

from .context import FLASH_ATTENTION
from .devices import CACHE_TYPES
from .log import reason, tapped_log

if TYPE_CHECKING:
    import numpy.typing as npt

    from .context import ContextOptions
    from .model import Model

BEST = 4
"""Candidates that the device hands out for a row: enough to tell a sure draft from a doubtful one."""


class MtpContext:
    """Decodes drafts: a token beside the hidden row of the token before it gives the token after it.

    The head's input at position p is token p and the trunk's hidden row of token p - 1 (after the output
    norm); its logits are for token p + 1. Its own hidden row stands in for the trunk's to draft one token
    further (DeepSeek-V3 report, section 2.2; `graph_mtp` in llama.cpp's qwen35.cpp). Its layer is full
    attention with a KV cache of its own, so a tail can be removed. The model must be loaded with `load_mtp`.

    Fill `tokens`, `positions`, `sequences`, `hidden` and `outputs` from the start, call `decode(n)`, then
    `best(rows)`. `best` reads what the device sampled if `on_device`, else it searches the logits.
    """

    def __init__(self, model: Model, options: ContextOptions, *, on_device: bool) -> None:
        params = C.llama_context_default_params()
        params.ctx_type = C.LLAMA_CONTEXT_TYPE_MTP
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
            raise LlamaError(reason(lines))
        llama_cpp_ext.llama_set_embeddings_nextn(self._handle, True, True)
        self._memory = C.llama_get_memory(self._handle)
        self._n_vocab, self._n_embd = model.n_vocab, model.n_embd
        self.n_batch = int(C.llama_n_batch(self._handle))
        self._chains = [self._attach(seq) for seq in range(options.n_outputs)] if on_device else []
        self.on_device = bool(self._chains) and all(self._chains)

        n = self.n_batch
        self.tokens: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.positions: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.sequences: npt.NDArray[np.int32] = np.zeros(n, np.int32)
        self.outputs: npt.NDArray[np.int8] = np.zeros(n, np.int8)
        self.hidden: npt.NDArray[np.float32] = np.zeros((n, model.n_embd), np.float32)
        self._counts = np.ones(n, np.int32)
        self._pointers = self.sequences.ctypes.data + 4 * np.arange(n, dtype=np.uintp)
        self._batch = C.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(ctypes.POINTER(C.llama_token)),
            embd=self.hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=self.positions.ctypes.data_as(ctypes.POINTER(C.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(C.llama_seq_id))),
            logits=self.outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def decode(self, n_tokens: int) -> None:
        """Run the first `n_tokens` of the batch. Raises NoMemorySlot if the cache is full, and LlamaError."""
        self._batch.n_tokens = n_tokens
        status = C.llama_decode(self._handle, self._batch)
        if status == 1:
            raise NoMemorySlot(f"no room in the draft head's cache for a batch of {n_tokens} tokens")
        if status != 0:
            raise LlamaError(f"llama_decode of the draft head returned {status} for {n_tokens} tokens")

    def best(self, rows: list[int]) -> tuple[list[int], list[float]]:
        """The best token after each batch index in `rows`, which are all outputs in order, and its chance.

        The chance is that among the few best, which is a little above the true one.
        """
        if self.on_device:
            return self._best_on_device(rows)
        pointer = C.llama_get_logits(self._handle)
        logits = np.ctypeslib.as_array(pointer, (len(rows), self._n_vocab))
        tokens = logits.argmax(axis=1)
        top = np.partition(logits, -BEST, axis=1)[:, -BEST:]
        sure = 1 / np.exp(top - top.max(axis=1, keepdims=True)).sum(axis=1)
        return tokens.tolist(), sure.tolist()

    def drafted(self, n_rows: int) -> npt.NDArray[np.float32]:
        """The head's own hidden rows of the outputs: [n_rows, n_embd], a view until the next decode."""
        pointer = llama_cpp_ext.llama_get_embeddings_nextn(self._handle)
        return np.ctypeslib.as_array(pointer, (n_rows, self._n_embd))

    def copy(self, source: int, target: int, start: int = -1) -> None:
        """Share the cells of `source` from position `start` on with `target`."""
        C.llama_memory_seq_cp(self._memory, source, target, start, -1)

    def remove(self, sequence: int, start: int = -1) -> None:
        """Forget a sequence from position `start` on."""
        C.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def clear(self) -> None:
        """Forget every sequence."""
        C.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._handle:
            C.llama_free(self._handle)
            self._handle = None
            for chain in self._chains:
                if chain:
                    C.llama_sampler_free(chain)

    def _attach(self, sequence: int) -> int | None:
        """Put a choice of the best into the graph for a sequence id; None where the backend can not."""
        chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        C.llama_sampler_chain_add(chain, C.llama_sampler_init_top_k(BEST))
        if not C.llama_set_sampler(self._handle, sequence, chain):
            C.llama_sampler_free(chain)
            return None
        return chain  # type: ignore[no-any-return]

    def _best_on_device(self, rows: list[int]) -> tuple[list[int], list[float]]:
        tokens, sure = [], []
        for row in rows:
            n = C.llama_get_sampled_candidates_count_ith(self._handle, row)
            ids = C.llama_get_sampled_candidates_ith(self._handle, row)[:n]
            logits = np.array(C.llama_get_sampled_logits_ith(self._handle, row)[:n])
            best = int(logits.argmax())
            tokens.append(int(ids[best]))
            sure.append(float(1 / np.exp(logits - logits[best]).sum()))
        return tokens, sure
