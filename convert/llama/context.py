"""Batches of tokens, and the contexts that decode them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llama_cpp import llama_cpp as api
from llama_cpp import llama_cpp_ext as ext

from qwen_serve.convert.interrupts import held

from .bindings import FLOATS, Handle, LlamaError, failure
from .probe import Probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from .bindings import Floats
    from .model import Model
    from .probe import Observer
    from .weights import Finder

ContextKind = Literal["trunk", "mtp"]


class Batch:
    """Tokens for one `Context.decode`, at most the context's `n_batch`."""

    def __init__(self, context: Context) -> None:
        self._pointer = api.llama_batch_ext_init(context.pointer)
        self._n_embd = context.model.n_embd
        self.n_tokens = self.n_outputs = 0

    def __del__(self) -> None:
        api.llama_batch_ext_free(self._pointer)

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
        index = api.llama_batch_ext_add_token(self._pointer, sequence, token)
        if index < 0:
            raise LlamaError(
                f"token {token} of sequence {sequence} does not fit the batch (llama.cpp says {index})"
            )
        api.llama_batch_ext_set_pos(self._pointer, index, ctypes.byref(ctypes.c_int32(position)))
        api.llama_batch_ext_set_output_logits(self._pointer, index, output)
        if hidden is not None:
            row = hidden.ctypes.data_as(FLOATS)
            embd = api.llama_embd(data=row, n_rows=1, n_embd=self._n_embd)
            if not api.llama_batch_ext_set_embd_token(self._pointer, index, embd):
                raise failure(f"a hidden row of {hidden.shape} values does not fit the batch")
        self.n_tokens += 1
        self.n_outputs += output


class Context(Handle):
    """A llama.cpp context over `model`: `trunk`, or `mtp` for the draft head; use as a context manager.

    Args:
        n_ctx: cells in total, shared evenly by `n_seq` sequences; n_batch, n_ubatch: tokens a call, a graph.
        observe: called with (weight name, rows [n, width], experts of the rows or None) for every matmul
            whose weight `observes` picks.
        finder: notes where weights lie; instead of `observe`.
        precise: F32 KV cache and no flash attention, the configuration to compare with a reference in.
    """

    _free = staticmethod(api.llama_free)

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
        finder: Finder | None = None,
    ) -> None:
        self.model, self.n_batch, self.n_seq = model, n_batch, n_seq
        self._probe = Probe(observe, observes) if observe is not None else finder
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_ubatch, n_seq
        params.n_threads = params.n_threads_batch = model.runtime.n_threads
        params.no_perf = True
        if kind == "mtp":
            params.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
        if precise:
            params.type_k = params.type_v = api.GGML_TYPE_F32
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if self._probe is not None:
            params.cb_eval = self._probe.callback
        if finder is not None:
            params.op_offload = False  # or weights in the CPU's memory would be seen as copies
        with held():
            self._pointer = api.llama_init_from_model(model._pointer, params)
        if not self._pointer:
            raise failure(f"{model.path}: llama.cpp cannot make a context of {n_ctx} tokens")
        self._n_tokens = self._n_outputs = 0

    @property
    def pointer(self) -> Any:
        return self._pointer

    def keep_hidden(self) -> None:
        """From now on every decoded token leaves its hidden row, read by `hidden`."""
        ext.llama_set_embeddings_nextn(self._pointer, True, False)

    def decode(self, batch: Batch) -> None:
        """Runs the batch. Raises what an observer raised, or `LlamaError`."""
        with held() as interrupts:
            if self._probe is not None:
                self._probe.interrupts = interrupts
            code = api.llama_process(self._pointer, api.LLAMA_PROCESS_TYPE_DECODE, batch.pointer)
        if self._probe is not None:
            self._probe.reraise()
        if code == 1:
            raise LlamaError(f"{self.model.path}: the context is full ({batch.n_tokens} tokens did not fit)")
        if code != 0:
            raise failure(f"{self.model.path}: llama_process returned {code}")
        self._n_tokens, self._n_outputs = batch.n_tokens, batch.n_outputs

    def logits(self) -> Floats:
        """[outputs of the last batch, n_vocab] in the batch's order; a view, gone with the next decode.

        Raises:
            LlamaError: one is NaN or infinite, which finite weights lead to where activations overflow.
        """
        pointer = api.llama_get_logits(self._pointer)
        logits = np.ctypeslib.as_array(pointer, (self._n_outputs, self.model.n_vocab))
        if logits.size and not np.isfinite(logits.max()):  # a NaN anywhere is the maximum
            raise LlamaError(
                f"{self.model.path}: the model's logits are not finite; is the checkpoint intact?"
            )
        return logits

    def hidden(self) -> Floats:
        """[tokens of the last batch, n_embd] after the output norm, what head and MTP block read; a view."""
        pointer = ext.llama_get_embeddings_nextn(self._pointer)
        return np.ctypeslib.as_array(pointer, (self._n_tokens, self.model.n_embd))

    def clear(self, sequence: int | None = None) -> None:
        """Forgets one sequence, or all."""
        memory = api.llama_get_memory(self._pointer)
        if sequence is None:
            api.llama_memory_clear(memory, True)
        else:
            api.llama_memory_seq_rm(memory, sequence, -1, -1)
