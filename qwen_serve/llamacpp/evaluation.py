"""Contexts for conversion and measurement: batches filled token by token, observed products, and interrupts
that wait for the end of a call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np

from qwen_serve.common.interrupts import held

from .context import Context
from .context_options import ContextOptions
from .errors import LlamaError
from .log import reason, tapped_log
from .model import Model
from .mtp import MtpContext
from .probe import EvalCallback, Floats

ContextKind = Literal["trunk", "mtp"]


@dataclass(frozen=True)
class Runtime:
    """Where llama.cpp runs: CPU threads (None: one for each usable CPU), layers on the GPU (-1: all)."""

    threads: int | None = None
    n_gpu_layers: int = -1

    @property
    def n_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    def load(self, path: Path, *, writable: bool = False) -> Model:
        """A GGUF, MTP block included, on all GPUs. `writable` as in `Model`. Raises ModelLoadError."""
        with held():
            return Model(path, n_gpu_layers=self.n_gpu_layers, shares=None, load_mtp=True, writable=writable)


class Batch:
    """Tokens for one `EvalContext.decode`, at most the context's `n_batch`."""

    def __init__(self, context: EvalContext) -> None:
        self._context = context.context
        self.n_tokens = self.n_outputs = 0

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
        context, n = self._context, self.n_tokens
        if n == context.n_batch:
            raise LlamaError(f"token {token} of sequence {sequence} does not fit a batch of {n} tokens")
        context.tokens[n], context.positions[n], context.sequences[n] = token, position, sequence
        context.outputs[n] = output
        if hidden is not None:
            assert isinstance(context, MtpContext)
            context.input_hidden[n] = hidden
        self.n_tokens, self.n_outputs = n + 1, self.n_outputs + output


class EvalContext:
    """A context of `model`: `trunk`, or `mtp` for the draft head; use as a context manager.

    Args:
        n_ctx: cells in total, shared evenly by `n_seq` sequences.
        n_batch, n_ubatch: most tokens of a call, and of a pass.
        precise: F32 KV cache and no flash attention, the configuration to compare with a reference in.
        cache: type of keys and values otherwise; a quantized one needs flash attention.
        state_type: in which the delta nets' states are kept, if the build can.
        callback: sees every graph as it is computed.
        op_offload: let the GPU compute with copies of weights that are in the CPU's memory.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int = 512,
        n_seq: int = 1,
        threads: int = 1,
        kind: ContextKind = "trunk",
        precise: bool = False,
        cache: str = "f16",
        state_type: str = "f32",
        callback: EvalCallback | None = None,
        op_offload: bool = True,
    ) -> None:
        self.model, self.n_batch, self.n_seq = model, n_batch, n_seq
        self._callback = callback
        options = ContextOptions(
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_outputs=max(n_batch, n_seq),
            threads=threads,
            threads_batch=threads,
            flash_attn="off" if precise else "auto" if cache == "f16" else "on",
            type_k="f32" if precise else cache,
            type_v="f32" if precise else cache,
            state_type=state_type,
            unified=False,
            eval_callback=callback and callback.function,
            op_offload=op_offload,
        )
        with held():
            try:
                self.context = (MtpContext if kind == "mtp" else Context)(model, options)
            except LlamaError as error:
                raise LlamaError(
                    f"{model.path}: llama.cpp cannot make a context of {n_ctx} tokens: {error}"
                ) from error
        self._n_tokens = self._n_outputs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees it. Idempotent."""
        self.context.close()

    def keep_hidden(self) -> None:
        """Keep every decoded token's hidden row, for `hidden`."""
        self.context.keep_hidden()

    def decode(self, batch: Batch) -> None:
        """Runs the batch. Raises what an observer raised, or LlamaError."""
        failed: LlamaError | None = None
        with held() as interrupts, tapped_log() as lines:
            if self._callback is not None:
                self._callback.interrupts = interrupts
            try:
                self.context.decode(batch.n_tokens)
            except LlamaError as error:
                failed = error
        if self._callback is not None:
            self._callback.reraise()
        if failed is not None:
            raise LlamaError(f"{self.model.path}: {failed}: {reason(lines)}") from failed
        self._n_tokens, self._n_outputs = batch.n_tokens, batch.n_outputs

    def logits(self) -> Floats:
        """[outputs of the last batch, n_vocab] in the batch's order: a view, valid until the next decode.

        Raises:
            LlamaError: a logit is NaN or infinite. Finite weights lead to that if activations overflow.
        """
        logits = self.context.logits(self._n_outputs)
        if logits.size and not np.isfinite(logits.max()):  # the maximum is NaN if any value is
            raise LlamaError(
                f"{self.model.path}: the model's logits are not finite; is the checkpoint intact?"
            )
        return logits

    def hidden(self) -> Floats:
        """[tokens of the last batch, n_embd] after the output norm, which the head and the MTP block read: a
        view."""
        return self.context.hidden(self._n_tokens)

    def clear(self, sequence: int | None = None) -> None:
        """Forgets one sequence, or all."""
        if sequence is None:
            self.context.clear()
        else:
            self.context.remove(sequence)
