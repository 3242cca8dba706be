"""Samples tokens from rows with each request's own sampler, and decides which draft tokens are accepted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from qwen_serve.llamacpp.row_sampler import RowRequest

from .batch import Batch, Chunk, Placement
from .sampling.grammar import MaskWriter
from .sampling.rows import Rows


@dataclass(slots=True)
class SampleResult:
    """A step's result for one chunk; empty if more of its prompt follows."""

    tokens: list[int] = field(default_factory=list)
    """The accepted draft tokens, and one more."""
    forced: Sequence[int] = ()
    """Tokens that follow these regardless of the model."""
    error: Exception | None = None
    """The exception that its sampler raised."""
    recompute: bool = False
    """Pending tokens must be computed again: the row of the next token was not kept or, with an `error`, is
    unusable, perhaps because of another sequence."""

    @property
    def accepted(self) -> int:
        """Number of draft tokens known to be right."""
        return max(0, len(self.tokens) - 1)


def requests_of(
    batch: Batch, errors: dict[int, Exception], writer: MaskWriter
) -> Iterator[tuple[int, RowRequest]]:
    """Each row of the batch whose result counts, with its request. What a request could not be made for is
    added to `errors`, by row."""
    counted = [
        (chunk, placement)
        for chunk, placement in zip(batch.chunks, batch.placements, strict=True)
        if chunk.sequence not in batch.dropped
    ]
    asked = {
        placement.rows[0]: wanted
        for chunk, placement in counted
        if placement.rows and (wanted := chunk.sequence.sampler.constrained(chunk.draft)) is not None
    }
    written = dict(zip(asked, writer.write([*asked.values()]), strict=True)) if asked else {}
    for chunk, placement in counted:
        sequence = chunk.sequence
        sampler, logprobs = sequence.sampler, sequence.logprobs
        for position, row in zip(chunk.scored, placement.scored_rows, strict=True):
            n_top = -1 if logprobs is None else logprobs.n_prompt_top
            yield row, sampler.request_score(sequence.tokens[position + 1], n_top)
        if not placement.rows:
            continue
        masks = written.get(placement.rows[0], ())
        if isinstance(masks, Exception):
            errors.update(dict.fromkeys(placement.rows, masks))
            continue
        try:
            requests = sampler.requests(chunk.draft, -1 if logprobs is None else logprobs.n_top, masks)
        except Exception as error:  # an error of one sequence must not affect the others
            errors.update(dict.fromkeys(placement.rows, error))
            continue
        yield from zip(placement.rows, requests, strict=True)


def sample(
    batch: Batch,
    rows: Rows | None,
    ends: frozenset[int],
    *,
    one_by_one: bool = False,
) -> list[SampleResult]:
    """For each chunk, the accepted tokens of its draft and the token after them.

    A draft token is accepted if the request's own sampler chooses it from the row before it. A draft is a
    proposal with all probability on one token, so this is speculative sampling (Leviathan et al. 2023,
    section 2.3) and changes no sampler's output distribution. Nothing is accepted after one of `ends`, the
    tokens that end a generation. Sequences that the batch dropped get nothing, and nothing is drawn for them.
    `one_by_one`: forced tokens come from the next rows.
    """
    if rows is None:
        return [SampleResult() for _ in batch.chunks]
    found = []
    for chunk, placement in zip(batch.chunks, batch.placements, strict=True):
        if chunk.sequence in batch.dropped:
            found.append(SampleResult())
        else:
            found.append(_sample(chunk, placement, rows, ends, one_by_one=one_by_one))
    return found


def _sample(
    chunk: Chunk, placement: Placement, rows: Rows, ends: frozenset[int], *, one_by_one: bool
) -> SampleResult:
    found = SampleResult()
    sequence, draft = chunk.sequence, chunk.draft
    sampler, logprobs = sequence.sampler, sequence.logprobs
    try:
        try:
            if logprobs is not None:
                for row in placement.scored_rows:
                    sampler.score(rows, row, logprobs)
            of_answer = logprobs if logprobs is not None and logprobs.of_answer else None
            for n, row in enumerate(placement.rows):
                if (token := sampler.choose(rows, row, of_answer)) is None:
                    found.recompute = not n
                    break
                found.tokens.append(token)
                if n == len(draft) or token != draft[n] or token in ends or token in sequence.stops:
                    break
        except FloatingPointError as error:
            found.recompute, found.error = True, error
        if found.tokens:
            found.forced = sampler.forced(found.tokens, one_by_one=one_by_one)
    except Exception as error:  # an error of one sequence must not affect the others
        return SampleResult(error=error)
    return found
