"""From rows to tokens: each request's own sampler, and which draft tokens it accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .draw import RowNotKept, UnusableLogits

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Rows
    from qwen_serve.server.engine.batch import Batch, Chunk, Sampled


def sample(batch: Batch, rows: Rows | None, ends: frozenset[int]) -> list[Sampled]:
    """For each chunk what is accepted of its draft and the token after that; None where a prompt goes on.

    A token of the draft is accepted if the request's own sampler chooses it from the row that it stands for:
    for a proposal that is certain of its token that is speculative sampling (Leviathan et al. 2023, section
    2.3), so the distribution of the output does not change, whatever the sampler. Nothing is accepted behind
    one of `ends`, the tokens that end a generation. What a sampler raises is given in place of its tokens.
    """
    if rows is None:
        return [None] * len(batch.chunks)
    best = rows.all_best() if batch.greedy else None
    if best is not None and ends.isdisjoint(best):  # an end may have to be ignored
        if batch.n_tokens == batch.n_rows == len(batch.chunks):  # else the shortest come first
            return [[token] for token in best]
        return [
            _accepted(chunk.draft, [best[row] for row in chunk.rows]) if chunk.rows else None
            for chunk in batch.chunks
        ]
    return [_sample(chunk, rows, ends) if chunk.rows or chunk.scored_rows else None for chunk in batch.chunks]


def _accepted(draft: list[int], best: list[int]) -> list[int]:
    for n, (token, proposed) in enumerate(zip(best, draft, strict=False)):
        if token != proposed:
            return best[: n + 1]
    return best


def _sample(chunk: Chunk, rows: Rows, ends: frozenset[int]) -> Sampled:
    new: list[int] = []
    sequence, draft = chunk.sequence, chunk.draft
    sampler, logprobs = sequence.sampler, sequence.logprobs
    try:
        if logprobs is not None:
            for position, row in zip(chunk.scored, chunk.scored_rows, strict=True):
                logprobs.add_prompt(rows.logits(row), sequence.tokens[position + 1])
            if not chunk.samples:
                return None
        for n, row in enumerate(chunk.rows):
            if logprobs is not None and logprobs.of_answer:
                told = logprobs.scores(rows, row)  # first: the sampler changes the row
                token = sampler.sample(rows, row)
                logprobs.add(told, token)
            else:
                token = sampler.sample(rows, row)
            new.append(token)
            if n == len(draft) or token != draft[n] or token in ends or token in sequence.stops:
                break
    except RowNotKept as error:
        error.chosen = new
        return error
    except FloatingPointError as error:
        return UnusableLogits(str(error), new)
    except Exception as error:  # one sequence's trouble is not its batch mates'
        return error
    return new
