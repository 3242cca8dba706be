"""The scheduler alone, against a pretend model: what goes into a step, who is admitted, who has to go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.engine.scheduler import Chunk
from tests.server.engine.scheduling import advance, counts, scheduler, sequence, slots_of

if TYPE_CHECKING:
    from server.engine.sequence import Sequence


def test_a_prompt_longer_than_a_batch_is_cut_into_chunks() -> None:
    s = scheduler(batch=64)
    s.add(one := sequence(150))
    assert [counts(advance(s)) for _ in range(4)] == [[64], [64], [22], [1]]
    assert one.generated == 2


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    s = scheduler(batch=64)
    s.add(sequence(100))
    assert [chunk.samples for _ in range(3) for chunk in advance(s).chunks] == [False, True, True]


def test_decodes_come_first_and_prompts_get_the_budget() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(first := sequence(5))
    advance(s)
    s.add(second := sequence(40))
    step = advance(s)
    assert step.chunks == [Chunk(first, 1, True), Chunk(second, 16, False)]


def test_the_budget_is_a_whole_batch_when_nobody_decodes() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(40))
    s.add(sequence(40))
    assert counts(advance(s)) == [40, 24]


def test_a_pace_bounds_every_step() -> None:
    s = scheduler(batch=64, budget=16)
    s.pace(32)
    s.add(sequence(40))
    assert [counts(advance(s)) for _ in range(2)] == [[32], [8]]
    s.add(sequence(40))
    assert [counts(advance(s)) for _ in range(2)] == [[1, 32], [1, 8]]


def test_decodes_and_prompts_at_pace_fit_into_a_batch() -> None:
    s = scheduler(batch=64, budget=16)
    s.pace(64)
    s.add(sequence(4))
    advance(s)
    s.add(sequence(100))
    assert counts(advance(s)) == [1, 63]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(2))
    advance(s)
    for length in (10, 10, 10):
        s.add(sequence(length))
    assert counts(advance(s)) == [1, 10, 6]
    assert counts(advance(s)) == [1, 1, 4, 10]


def test_no_more_run_than_there_are_slots() -> None:
    s = scheduler(slots=2)
    for _ in range(3):
        s.add(sequence(4, max_tokens=3))
    advance(s)
    assert (len(s.running), len(s.waiting)) == (2, 1)
    advance(s)
    advance(s)
    advance(s)
    assert (len(s.running), len(s.waiting)) == (1, 0)


def test_nobody_overtakes_a_request_that_waits_for_cells() -> None:
    s = scheduler(cells=200)
    s.add(sequence(100, max_tokens=50))
    advance(s)
    s.add(large := sequence(150, max_tokens=20))
    s.add(small := sequence(2, max_tokens=2))
    advance(s)
    assert list(s.waiting) == [large, small]


def test_the_youngest_is_preempted_when_cells_run_out_and_reads_everything_again() -> None:
    released: list[int] = []
    s = scheduler(slots=2, cells=160, batch=64, budget=64, release=released.append)
    s.add(old := sequence(10, max_tokens=140))
    s.add(young := sequence(10, max_tokens=140))
    while not s.preemptions:
        advance(s)
    assert released == [1]
    assert list(s.waiting) == [young]
    assert (young.cached, young.slot) == (0, None)
    tokens_before = list(young.tokens)
    while old.slot is not None:
        advance(s)
    assert young.tokens[: len(tokens_before)] == tokens_before
    while s.running or s.waiting:
        advance(s)
    assert (old.generated, young.generated) == (140, 140)


def test_prompts_that_fill_the_cache_together_do_not_lock_up() -> None:
    s = scheduler(slots=2, cells=128, batch=32)
    s.add(a := sequence(60, max_tokens=68))
    advance(s)
    s.add(b := sequence(60, max_tokens=68))
    while s.running or s.waiting:
        advance(s)
    assert (a.generated, b.generated) == (68, 68)


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_removing_frees_slot_and_cells(when: str) -> None:
    s = scheduler(slots=1, batch=16)
    s.add(one := sequence(30))
    steps = {"waiting": 0, "prefilling": 1, "decoding": 3}[when]
    for _ in range(steps):
        advance(s)
    s.remove(one)
    assert (s.running, list(s.waiting), s.cells_used) == ([], [], 0)
    s.add(two := sequence(5))
    advance(s)
    assert two.slot == 0


# --- drafts ------------------------------------------------------------------------------------------------


def test_drafts_are_verified_apart_from_prompts() -> None:
    s = scheduler(batch=64, budget=16, propose=lambda ready, rows: [[8, 9] for _ in ready])
    s.add(stream := sequence(4, max_tokens=100))
    advance(s)
    s.add(sequence(40))
    step = s.schedule()
    assert step.chunks == [Chunk(stream, 1, True, [8, 9])]
    s.postprocess(step, slots_of(step))
    s.settle(step.chunks[0], 0)
    step = s.schedule()
    assert counts(step) == [16]
    s.postprocess(step, slots_of(step))
    assert s.schedule().chunks[0].draft == [8, 9]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_draft_is_kept_as_a_whole_or_not_at_all(accepted: int) -> None:
    s = scheduler(propose=lambda ready, rows: [[8, 9] for _ in ready])
    s.add(stream := sequence(4, max_tokens=100))
    step = s.schedule()
    s.postprocess(step, slots_of(step))
    stream.tokens.append(7)
    step = s.schedule()
    s.postprocess(step, slots_of(step))
    stream.tokens += [8, 9, 10][: accepted + 1]
    s.settle(step.chunks[0], accepted)
    if accepted == 2:
        assert (stream.cached, stream.pending, s.cells_used) == (7, 1, 7)
    else:
        assert (stream.cached, stream.pending, s.cells_used) == (4, 1 + accepted + 1, 4)
        assert stream.ready, "it catches up, which is no prefill"
        assert s.schedule().chunks[0].count == accepted + 2


def test_drafts_give_way_when_a_step_or_the_cells_are_full() -> None:
    asked: list[int] = []

    def propose(ready: list[Sequence], rows: int) -> list[list[int]]:
        asked.append(rows)
        return [[8] * 20 for _ in ready]

    s = scheduler(slots=3, batch=32, cells=64, propose=propose)
    for _ in range(3):
        s.add(sequence(1, max_tokens=20))
    step = s.schedule()
    assert asked == [32 - 3]
    assert [len(chunk.draft) for chunk in step.chunks] == [20, 0, 0]
    crowded = scheduler(slots=1, batch=32, cells=18, propose=propose)
    crowded.add(sequence(1, max_tokens=10))
    assert [chunk.draft for chunk in crowded.schedule().chunks] == [[]]
