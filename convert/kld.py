"""KL divergence of a quantized model from its reference, token by token over a text."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from convert.chunks import decode_chunks, read_chunks
from convert.errors import ConvertError
from convert.llama import Context, Model
from convert.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from convert.llama import Floats, Runtime

MIN_TOKENS = 32_768
MAX_BATCH = 2048
LOGIT_BYTES = 256 * 2**20  # of one model at a time: what bounds memory, whatever the vocabulary
ROWS_AT_ONCE = 32  # of a thread: a block of both models' logits that stays near the cache


@dataclass(frozen=True)
class Divergence:
    """KL(reference || quantized) in nats over `tokens` next-token distributions."""

    tokens: int
    mean: float
    median: float
    p99: float
    maximum: float
    same_top: float
    """Share of tokens for which both models rate the same token highest."""


def measure_divergence(reference: Path, quantized: Path, *, text: Path, runtime: Runtime) -> Divergence:
    """Runs `text` through both models in chunks of 512 tokens, scoring every position.

    Both models are loaded at once; logits are compared as they come and never kept.

    Raises:
        ConvertError: the text has fewer than `MIN_TOKENS` tokens, or the vocabularies differ.
        LlamaError: a model cannot be loaded or run.
    """
    with ExitStack() as stack:
        models = [stack.enter_context(Model(path, runtime)) for path in (reference, quantized)]
        if models[0].n_vocab != models[1].n_vocab:
            sizes = f"{models[0].n_vocab} and {models[1].n_vocab} tokens"
            raise ConvertError(f"{quantized}: not made from {reference}, their vocabularies have {sizes}")
        chunks = read_chunks(models[0], text)
        if chunks.size < MIN_TOKENS:
            raise ConvertError(f"{text}: {chunks.size} tokens in whole chunks; {MIN_TOKENS} are needed")
        size = chunks.shape[1]
        n_batch = min(MAX_BATCH, LOGIT_BYTES // (4 * models[0].n_vocab))
        n_seq, n_step = max(1, n_batch // size), size // math.ceil(size / n_batch)
        contexts = [
            stack.enter_context(Context(model, n_ctx=n_seq * size, n_batch=n_seq * n_step, n_seq=n_seq))
            for model in models
        ]
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        progress = stack.enter_context(Progress("KL divergence", chunks.size, "tokens"))
        losses, matches = [], 0
        for part, start in _parts(chunks, n_seq, n_step):
            for context in contexts:
                if start == 0:
                    context.clear()
                decode_chunks(context, part, start=start, output=True)
            p, q = (context.logits() for context in contexts)
            blocks = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(p), ROWS_AT_ONCE)]
            for loss, same in pool.map(lambda rows, p=p, q=q: _compare(p[rows], q[rows]), blocks):
                losses.append(loss)
                matches += same
            progress.advance(part.size)
            progress.note(f"mean {np.mean(np.concatenate(losses)):.5f}")
    divergence = np.concatenate(losses)
    return Divergence(
        tokens=divergence.size,
        mean=float(divergence.mean()),
        median=float(np.median(divergence)),
        p99=float(np.quantile(divergence, 0.99)),
        maximum=float(divergence.max()),
        same_top=matches / divergence.size,
    )


def _parts(chunks: NDArray[np.int32], n_seq: int, n_step: int) -> Iterator[tuple[NDArray[np.int32], int]]:
    """(tokens [sequences, step], position of the first): chunks side by side, each from left to right."""
    for first in range(0, len(chunks), n_seq):
        for start in range(0, chunks.shape[1], n_step):
            yield chunks[first : first + n_seq, start : start + n_step], start


def _compare(p: Floats, q: Floats) -> tuple[NDArray[np.float64], int]:
    """KL(p || q) of each row of logits [rows, vocabulary], and in how many the maximum is at one place."""
    p_top, q_top = p.argmax(axis=1), q.argmax(axis=1)
    rows = np.arange(len(p))
    p = p - p[rows, p_top, None]
    q = q - q[rows, q_top, None]
    weights = np.exp(p)
    p_sum = weights.sum(axis=1, dtype=np.float64)
    q_sum = np.exp(q).sum(axis=1, dtype=np.float64)
    cross = np.einsum("ij,ij->i", weights, p - q, dtype=np.float64) / p_sum
    return np.maximum(cross + np.log(q_sum) - np.log(p_sum), 0.0), int((p_top == q_top).sum())
