"""From a batch to tokens: the rows of each sequence, accepted drafts, and failing samplers."""

from collections.abc import Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.row_sampler import Bits, RowRequest
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.profile import StepProfile
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.runner import Runner
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.sampling.rows import Rows
from qwen_serve.server.engine.verification import SampleResult, sample
from tests.server.engine.fake_context import FakeContext

END = 9_999
ENDS = frozenset({END})


class FakeSampler:
    """A greedy sampler, which may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def constrained(self, draft: Sequence[int]) -> None:
        return None

    def requests(self, draft: Sequence[int], n_top: int, masks: Sequence[Bits]) -> list[RowRequest]:
        assert not masks
        assert n_top == -1
        return [RowRequest(None)] * (len(draft) + 1)

    def choose(self, rows: Rows, row: int, _logprobs: None) -> int:
        if self._fails:
            raise FloatingPointError("not a number")
        return rows.result(row).token

    def forced(self, new: Sequence[int], *, one_by_one: bool) -> list[int]:
        assert new
        assert not one_by_one
        return []


def add(
    batch: Batch,
    slot: int,
    pending: int,
    count: int,
    draft: list[int],
    *,
    first: int = -1,
    fails: bool = False,
) -> None:
    """Add a chunk with the first `count` of the pending tokens, which count up from `first`."""
    first = 1000 * slot if first < 0 else first
    sampler = cast("Sampler", FakeSampler(fails=fails))
    one = Request(list(range(first, first + pending)), 500, sampler)
    one.slot = slot
    batch.add(one, count)
    if draft:
        batch.add_draft(batch.chunks[-1], draft)


def carry_out(batch: Batch, context: FakeContext | None = None) -> list[SampleResult]:
    """Compute and sample the batch. The model's best token is always the last number plus one."""
    runner = Runner(cast("Context", context or FakeContext()), StepProfile())
    step = runner.launch(batch)
    runner.sample(step)
    return sample(batch, runner.collect(step), ENDS)


def tokens(batch: Batch) -> list[list[int]]:
    return [result.tokens for result in carry_out(batch)]


def test_prompts_that_end_in_one_batch_get_their_own_tokens() -> None:
    """The shorter prompt's row comes first, in any order of the prompts."""
    batch = Batch()
    for slot, length in enumerate((50, 13, 20)):
        add(batch, slot, length, length, [])
    assert tokens(batch) == [[50], [1013], [2020]]


def test_a_prompt_that_goes_on_gets_none() -> None:
    batch = Batch()
    add(batch, 0, 50, 20, [])
    add(batch, 1, 13, 13, [])
    assert tokens(batch) == [[], [1013]]
    unfinished = Batch()
    add(unfinished, 0, 50, 20, [])
    assert tokens(unfinished) == [[]]


def test_of_a_draft_what_is_right_is_accepted_and_one_more_comes() -> None:
    batch = Batch()
    add(batch, 0, 1, 1, [1, 2, 3])
    add(batch, 1, 3, 3, [])
    add(batch, 2, 2, 2, [2002, 7, 2004])
    add(batch, 3, 1, 1, [7])
    assert tokens(batch) == [[1, 2, 3, 4], [1003], [2002, 2003], [3001]]


def test_as_many_rows_as_chunks_are_not_one_row_each() -> None:
    batch = Batch()
    add(batch, 0, 9, 2, [])
    add(batch, 1, 1, 1, [1001])
    assert tokens(batch) == [[], [1001, 1002]]


def test_nothing_is_accepted_behind_an_end() -> None:
    batch = Batch()
    add(batch, 0, 1, 1, [END - 1, END, END + 1, END + 2], first=END - 2)
    add(batch, 1, 1, 1, [1001])
    assert tokens(batch) == [[END - 1, END], [1001, 1002]]


def test_a_sampler_that_fails_fails_alone() -> None:
    batch = Batch()
    add(batch, 0, 5, 5, [])
    add(batch, 1, 3, 3, [1003], fails=True)
    add(batch, 2, 4, 4, [2004])
    first, failed, last = carry_out(batch)
    assert (first.tokens, last.tokens) == ([5], [2004, 2005])
    assert isinstance(failed.error, FloatingPointError)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([40, 40, 40, 5]), st.sampled_from([0, 0, 0, 1, 5])),
        min_size=1,
        max_size=8,
    ),
    n_ubatch=st.integers(8, 64),
    snapshots=st.sampled_from([0, 4]),
)
def test_every_row_is_found(parts: list[tuple[int, int, int]], n_ubatch: int, snapshots: int) -> None:
    """For any split of a batch into ubatches. The fake context checks order and positions."""
    context = FakeContext(n_ubatch=n_ubatch)
    context.n_snapshots = snapshots
    batch = Batch()
    expected: list[list[int]] = []
    for slot, (pending, most, drafted) in enumerate(parts):
        count = min(pending, most)
        start = 1000 * slot + pending
        draft = list(range(start, start + drafted)) if count == pending else []
        add(batch, slot, pending, count, draft)
        expected.append([*draft, start + len(draft)] if count == pending else [])
    sampled = carry_out(batch, context)
    assert [result.tokens for result in sampled] == expected
    for chunk, placement in zip(batch.chunks, batch.placements, strict=True):
        read = [*chunk.sequence.tokens[: chunk.count], *chunk.draft]
        assert context.tokens[placement.batch_indices].tolist() == read
        assert context.held[chunk.slot] == tuple(read)
