"""Compares a model's next-token distributions with its reference's, token by token over a text.

A candidate may have fewer tokens than its reference (`--keep-vocab`). Then both models read the text in the
candidate's tokens, and the distributions are compared over the shared tokens. The reference's is normalized
over these. Its probability of all other tokens is reported, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from qwen_serve.common.interrupts import held
from qwen_serve.convert.chunks import decode_chunks, read_chunks
from qwen_serve.convert.errors import ConvertError
from qwen_serve.convert.progress import Progress
from qwen_serve.llamacpp.evaluation import EvalContext, Runtime
from qwen_serve.llamacpp.model import Model
from qwen_serve.llamacpp.probe import Floats

OWN: Final = "evaluation"
"""Name of the model's own text, which is of the kind of the calibration text."""

MIN_TOKENS = 32_768
UNLIKE_CHUNKS = 8
MAX_BATCH = 2048
LOGIT_BYTES = 256 * 2**20  # bytes of one model's logits at a time, which bounds memory for any vocabulary
ROWS_AT_ONCE = 32  # rows of a thread: a block of both models' logits that fits the cache


@dataclass(frozen=True)
class Divergence:
    """KL(reference || quantized) in nats over `tokens` next-token distributions."""

    tokens: int
    mean: float
    median: float
    p99: float
    maximum: float
    same_top: float
    """Share of tokens for which both models rank the same token first."""
    dropped: float = 0.0
    """Mean probability that the reference gives to tokens that the quantized model lacks."""

    @classmethod
    def of(cls, scores: Scores) -> Divergence:
        """Over every scored position."""
        divergence = scores.divergence
        return cls(
            tokens=divergence.size,
            mean=float(divergence.mean()),
            median=float(np.median(divergence)),
            p99=float(np.quantile(divergence, 0.99)),
            maximum=float(divergence.max()),
            same_top=float(scores.same_top.mean()),
            dropped=float(scores.dropped.mean()),
        )


@dataclass(frozen=True)
class Scores:
    """Two models' results on a text; every array is [chunks, scored positions].

    `divergence`: KL(reference || candidate) in nats over the shared tokens. `same_top`: whether both rank the
    same token first. `dropped`: the reference's probability of tokens that the candidate does not have.
    `reference_loss` and `loss`: -log p in nats of the next token, NaN at a chunk's end.
    """

    divergence: NDArray[np.float64]
    same_top: NDArray[np.bool_]
    dropped: NDArray[np.float64]
    reference_loss: NDArray[np.float64]
    loss: NDArray[np.float64]


def measure_divergence(
    reference: Path, quantized: Path, *, texts: Mapping[str, Path], runtime: Runtime
) -> dict[str, Divergence]:
    """Runs texts through both models in chunks of 512 tokens, scoring every position.

    Both models are loaded at once; logits are compared immediately and never stored.

    Args:
        texts: by name. `OWN`, the model's own text, is read whole; of texts of other kinds, `UNLIKE_CHUNKS`
            chunks, evenly spaced.

    Raises:
        ConvertError: the model's own text has fewer than `MIN_TOKENS` tokens, or the vocabularies do not fit.
        LlamaError: a model cannot be loaded or run.
    """
    with runtime.load(reference) as whole, runtime.load(quantized) as model:
        columns, found = shared_tokens(whole, model), {}
        for name, text in texts.items():
            chunks = read_chunks(model, text)
            if name != OWN:
                chunks = spaced(chunks, UNLIKE_CHUNKS)
            elif chunks.size < MIN_TOKENS:
                raise ConvertError(f"{text}: {chunks.size} tokens in whole chunks; {MIN_TOKENS} are needed")
            scores = compare(whole, model, chunks, columns=columns, threads=runtime.n_threads)
            found[name] = Divergence.of(scores)
    return found


def spaced(chunks: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """At most so many chunks, evenly spaced."""
    return chunks[:: max(1, len(chunks) // most)][:most]


def shared_tokens(reference: Model, candidate: Model) -> NDArray[np.int64] | None:
    """The reference's id of every token of the candidate; None if the vocabularies are equal.

    Raises:
        ConvertError: the candidate has a token that the reference lacks.
    """
    theirs, ours = reference.token_texts(), candidate.token_texts()
    if theirs == ours:
        return None
    id_of = {text: id_ for id_, text in enumerate(theirs)}
    if (foreign := next((id_ for id_, text in enumerate(ours) if text not in id_of), None)) is not None:
        raise ConvertError(
            f"{candidate.path}: not made from {reference.path}: the vocabularies differ ({len(ours)} and "
            f"{len(theirs)} tokens; token {foreign}, {ours[foreign].decode('utf-8', 'replace')!r}, is in the "
            "first alone)"
        )
    return np.array([id_of[text] for text in ours], np.int64)


def compare(
    reference: Model,
    candidate: Model,
    chunks: NDArray[np.int32],
    *,
    columns: NDArray[np.int64] | None = None,
    skip: int = 0,
    max_batch: int = MAX_BATCH,
    threads: int = 1,
) -> Scores:
    """`compare_all` of one candidate."""
    return compare_all(
        reference,
        [Candidate(candidate)],
        chunks,
        columns=columns,
        skip=skip,
        max_batch=max_batch,
        threads=threads,
    )[0]


@dataclass(frozen=True)
class Candidate:
    """A model, and the types of its keys and values and of its recurrent states; the reference has F16 and
    F32."""

    model: Model
    cache: str = "f16"
    state_type: str = "f32"


def compare_all(
    reference: Model,
    candidates: Sequence[Candidate],
    chunks: NDArray[np.int32],
    *,
    columns: NDArray[np.int64] | None = None,
    skip: int = 0,
    max_batch: int = MAX_BATCH,
    threads: int = 1,
) -> list[Scores]:
    """Runs chunks [chunks, size] of the candidates' token ids through all models; the reference runs once.

    Args:
        candidates: of one vocabulary.
        columns: from `shared_tokens`: the reference's ids of the candidate's tokens.
        skip: positions at the start of every chunk that are read but not scored.
        max_batch: most tokens in a call; `LOGIT_BYTES` also bounds the logits.
        threads: CPU threads.

    Raises:
        LlamaError: a model cannot be run.
    """
    n_chunks, size = chunks.shape
    theirs = chunks if columns is None else columns[chunks].astype(np.int32)
    n_batch = max(1, min(max_batch, LOGIT_BYTES // (4 * reference.n_vocab)))
    n_seq, n_step = max(1, n_batch // size), math.ceil(size / math.ceil(size / n_batch))
    shape = (n_chunks, size - skip)
    scores = [
        Scores(
            np.zeros(shape),
            np.zeros(shape, np.bool_),
            np.zeros(shape),
            np.full(shape, np.nan),
            np.full(shape, np.nan),
        )
        for _ in candidates
    ]
    total, count = 0.0, 0
    with ExitStack() as stack:
        contexts = [
            stack.enter_context(
                EvalContext(
                    one.model,
                    n_ctx=n_seq * size,
                    n_batch=n_seq * n_step,
                    n_seq=n_seq,
                    threads=threads,
                    cache=one.cache,
                    state_type=one.state_type,
                )
            )
            for one in (Candidate(reference), *candidates)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        progress = stack.enter_context(Progress("KL divergence", chunks.size, "tokens"))
        for rows, steps in parts(n_chunks, size, skip, n_seq, n_step):
            scored = steps.start >= skip
            for i, context in enumerate(contexts):
                if steps.start == 0:
                    context.clear()
                ids = chunks if i else theirs
                decode_chunks(context, ids[rows, steps], start=steps.start, output=scored)
            if scored:
                p, *others = (context.logits() for context in contexts)
                at = (rows, slice(steps.start - skip, steps.stop - skip))
                blocks = [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(p), ROWS_AT_ONCE)]
                after = next_ids(theirs, rows, steps), next_ids(chunks, rows, steps)
                for one, q in zip(scores, others, strict=True):
                    with held():
                        found = zip(*pool.map(Part(p, q, *after, columns).compare, blocks), strict=True)
                    for array, values in zip(vars(one).values(), found, strict=True):
                        array[at] = np.concatenate(values).reshape(array[at].shape)
                total, count = total + scores[0].divergence[at].sum(), count + scores[0].divergence[at].size
                progress.note(f"mean {total / count:.5f}")
            progress.advance(chunks[rows, steps].size)
    return scores


def parts(n_chunks: int, size: int, skip: int, n_seq: int, n_step: int) -> Iterator[tuple[slice, slice]]:
    """(chunks, positions): several chunks at a time, each from its beginning to its end. A part is scored
    entirely or not at all."""
    bounds = sorted({*range(0, skip, n_step), *range(skip, size, n_step), size})
    for first in range(0, n_chunks, n_seq):
        for start, stop in pairwise(bounds):
            yield slice(first, min(first + n_seq, n_chunks)), slice(start, stop)


def next_ids(chunks: NDArray[np.int32], rows: slice, steps: slice) -> NDArray[np.int32]:
    """[rows * steps] the id that follows each position, -1 after a chunk's last."""
    following = np.full((rows.stop - rows.start, steps.stop - steps.start), -1, np.int32)
    tail = chunks[rows, steps.start + 1 : steps.stop + 1]
    following[:, : tail.shape[1]] = tail
    return following.reshape(-1)


@dataclass(frozen=True)
class Part:
    """Both models' logits [rows, vocabulary] for one batch, and the next ids, -1 for none."""

    p: Floats
    q: Floats
    p_next: NDArray[np.int32]
    q_next: NDArray[np.int32]
    columns: NDArray[np.int64] | None

    def compare(self, block: slice) -> tuple[NDArray[np.generic], ...]:
        """The fields of `Scores`, in their order, for some rows."""
        p, q, columns = self.p[block], self.q[block], self.columns
        rows = np.arange(len(p))
        p_top, q_top = p.argmax(axis=1), q.argmax(axis=1)
        p, q = p - p[rows, p_top, None], q - q[rows, q_top, None]
        weights = np.exp(p)
        p_sum = weights.sum(axis=1, dtype=np.float64)
        q_sum = np.exp(q).sum(axis=1, dtype=np.float64)
        p_loss = np.where((ids := self.p_next[block]) < 0, np.nan, np.log(p_sum) - p[rows, ids])
        q_loss = np.where((ids := self.q_next[block]) < 0, np.nan, np.log(q_sum) - q[rows, ids])
        dropped = np.zeros(len(p))
        if columns is not None:
            p, q_top = p[:, columns], columns[q_top]
            dropped = np.maximum(1 - weights[:, columns].sum(axis=1, dtype=np.float64) / p_sum, 0.0)
            p -= p.max(axis=1, keepdims=True)  # the highest is 0 again, even if little is left
            weights = np.exp(p)
            p_sum = weights.sum(axis=1, dtype=np.float64)
        cross = np.einsum("ij,ij->i", weights, p - q, dtype=np.float64) / p_sum
        divergence = np.maximum(cross + np.log(q_sum) - np.log(p_sum), 0.0)
        return divergence, p_top == q_top, dropped, p_loss, q_loss
