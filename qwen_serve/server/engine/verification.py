"""Samples tokens from rows with each request's own sampler, and decides which draft tokens are accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .choices import choose

if TYPE_CHECKING:
    from collections.abc import Sequence as ListLike

    from qwen_serve.llamacpp import Rows
    from qwen_serve.server.engine.batch import Batch, Chunk, Placement

    from .choices import Choice


@dataclass(slots=True)
class SampleResult:
    """A step's result for one chunk; empty if more of its prompt follows."""

    tokens: list[int] = field(default_factory=list)
    """The accepted draft tokens, and one more."""
    forced: ListLike[int] = ()
    """Tokens that follow these regardless of the model."""
    error: Exception | None = None
    """The exception that its sampler raised."""
    astray: bool = False
    """The step that was launched ahead reads another token than this one."""
    recompute: bool = False
    """Pending tokens must be computed again: the row of the next token has too little or, with an `error`, is
    unusable, perhaps because of another sequence."""

    @property
    def accepted(self) -> int:
        """Number of draft tokens known to be right."""
        return max(0, len(self.tokens) - 1)


def sample(batch: Batch, rows: Rows | None, ends: frozenset[int]) -> list[SampleResult]:
    """For each chunk, the accepted tokens of its draft and the token after them.

    A draft token is accepted if the request's own sampler chooses it from the row before it. A draft is a
    proposal with all probability on one token, so this is speculative sampling (Leviathan et al. 2023,
    section 2.3) and changes no sampler's output distribution. Nothing is accepted after one of `ends`, the
    tokens that end a generation. Sequences that the batch dropped get nothing, and nothing is drawn for them.
    """
    if rows is None:
        return [SampleResult() for _ in batch.chunks]
    best = rows.all_best() if batch.greedy and not batch.dropped else None
    if best is None or not ends.isdisjoint(best):  # a request may ignore ends
        return choose(
            [
                _sample(chunk, placement, rows, ends, dropped=chunk.sequence in batch.dropped)
                for chunk, placement in zip(batch.chunks, batch.placements, strict=True)
            ]
        )
    if batch.n_tokens == batch.n_rows == len(batch.chunks):  # otherwise the shortest come first
        return [
            _result(chunk, [token]) if chunk.sequence.sampler.forces else SampleResult([token])
            for chunk, token in zip(batch.chunks, best, strict=True)
        ]
    return [
        _result(chunk, _accepted(chunk.draft, [best[row] for row in placement.rows]))
        for chunk, placement in zip(batch.chunks, batch.placements, strict=True)
    ]


def _accepted(draft: ListLike[int], best: list[int]) -> list[int]:
    for n, (token, proposed) in enumerate(zip(best, draft, strict=False)):
        if token != proposed:
            return best[: n + 1]
    return best


def _result(chunk: Chunk, tokens: list[int], *, recompute: bool = False) -> SampleResult:
    sampler = chunk.sequence.sampler
    if not tokens or not sampler.forces:
        return SampleResult(tokens, recompute=recompute)
    try:
        return SampleResult(tokens, sampler.forced(tokens), recompute=recompute)
    except Exception as error:  # an error of one sequence must not affect the others
        return SampleResult(error=error)


def _sample(
    chunk: Chunk, placement: Placement, rows: Rows, ends: frozenset[int], *, dropped: bool
) -> Choice[SampleResult]:
    new: list[int] = []
    sequence, draft = chunk.sequence, chunk.draft
    sampler, logprobs = sequence.sampler, sequence.logprobs
    if dropped:
        return SampleResult()
    try:
        if logprobs is not None:
            for position, row in zip(chunk.scored, placement.scored_rows, strict=True):
                yield from sampler.score(rows, row, sequence.tokens[position + 1], logprobs)
        of_answer = logprobs if logprobs is not None and logprobs.of_answer else None
        for n, row in enumerate(placement.rows):
            if (token := (yield from sampler.choose(rows, row, of_answer))) is None:
                return _result(chunk, new, recompute=True)
            new.append(token)
            if n == len(draft) or token != draft[n] or token in ends or token in sequence.stops:
                break
    except FloatingPointError as error:
        result = _result(chunk, new, recompute=True)
        result.error = result.error or error
        return result
    except Exception as error:
        return SampleResult(error=error)
    return _result(chunk, new)
