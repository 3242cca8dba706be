"""The scheduler with a simulated model: contents of steps, admission, preemption."""

import pytest

from qwen_serve.server.engine.prefill_budget import PrefillBudget
from qwen_serve.server.engine.reproducible import Reproducible
from qwen_serve.server.engine.verification import SampleResult
from tests.server.engine.fake_context import FakeContext
from tests.server.engine.scheduling import (
    advance,
    commit,
    counts,
    scheduler,
    sequence,
    store,
    used,
)


def test_a_prompt_longer_than_a_batch_is_cut_into_chunks() -> None:
    s = scheduler(batch=64)
    s.add(one := sequence(150))
    assert [counts(advance(s)) for _ in range(4)] == [[64], [64], [22], [1]]
    assert one.generated == 2


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    s = scheduler(batch=64)
    s.add(sequence(100))
    chunks = [chunk for _ in range(3) for chunk in advance(s).chunks]
    assert [chunk.samples for chunk in chunks] == [False, True, True]
    assert [chunk.is_prompt for chunk in chunks] == [True, True, False]


def test_decodes_and_prompts_take_turns_and_prompts_get_the_budget() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(first := sequence(5))
    advance(s)
    s.add(second := sequence(40))
    found = []
    for _ in range(4):
        batch = s.schedule()
        found.append([(c.sequence, c.start, c.count, c.samples) for c in batch.chunks])
        commit(s, batch)
    assert found == [
        [(second, 0, 16, False)],
        [(first, 5, 1, True)],
        [(second, 16, 16, False)],
        [(first, 6, 1, True)],
    ]


def test_the_budget_is_a_ubatch_when_nobody_decodes() -> None:
    s = scheduler(batch=64, budget=16, ubatch=32)
    s.add(sequence(100))
    s.add(sequence(100))
    assert [sum(counts(advance(s))) for _ in range(3)] == [32, 32, 32]
    whole = scheduler(batch=64, budget=16)
    whole.add(sequence(40))
    whole.add(sequence(40))
    assert counts(advance(whole)) == [40, 24]


@pytest.mark.parametrize(
    ("budget", "steps"),
    [(7, [7, 1, 7, 1]), (32, [32, 1, 32, 1]), (64, [32, 32, 1, 32]), (96, [32, 32, 32, 1])],
)
def test_steps_of_a_ubatch_follow_each_other_up_to_the_budget(budget: int, steps: list[int]) -> None:
    s = scheduler(slots=2, batch=64, budget=budget, ubatch=32)
    s.add(sequence(1, max_tokens=100))
    advance(s)
    s.add(sequence(200))
    assert [sum(counts(advance(s))) for _ in steps] == steps


def test_prompts_of_one_length_are_read_whole_as_many_as_fit_into_a_ubatch() -> None:
    s = scheduler(slots=6, batch=64, budget=64, ubatch=32)
    for _ in range(6):
        s.add(sequence(10))
    assert [counts(advance(s)) for _ in range(3)] == [[10] * 3, [10] * 3, [1] * 6]


def test_a_small_rest_is_read_with_the_last_pass() -> None:
    s = scheduler(cells=100_000, batch=4096, ubatch=1280)
    for tokens, passes in {
        1024: [1024],
        1026: [1026],
        1280: [1280],
        1281: [1024, 257],
        2050: [1024, 1026],
        2400: [1024, 1024, 352],
    }.items():
        s.add(one := sequence(tokens, max_tokens=1))
        assert [advance(s).n_tokens for _ in passes] == passes
        assert one.slot is None, "nothing is left"


def test_a_small_rest_of_many_prompts_is_read_with_the_last_pass() -> None:
    s = scheduler(slots=64, cells=100_000, batch=4096, ubatch=2304)
    for _ in range(64):
        s.add(sequence(514, max_tokens=1))
    passes = [advance(s).n_tokens for _ in range(16)]
    assert passes == [2048] * 15 + [64 * 514 - 15 * 2048]


def test_a_pass_of_a_long_prompt_beside_answers_has_the_usual_length() -> None:
    s = scheduler(cells=100_000, batch=9216, budget=4096, ubatch=2304)
    s.add(sequence(1, max_tokens=100))
    advance(s)
    s.add(sequence(8194))
    assert [advance(s).n_tokens for _ in range(7)] == [2048, 2048, 1, 2048, 2050, 2, 2]


def test_the_budget_is_what_steps_have_shown() -> None:
    s = scheduler(batch=64)
    s.prefill_budget = PrefillBudget(1.0, 16, 64)
    s.prefill_budget.start(1 / 16)
    s.add(sequence(2, max_tokens=100))
    advance(s)
    s.add(sequence(100))
    assert [counts(advance(s)) for _ in range(2)] == [[16], [1]]
    s.prefill_budget.add(16, 7.0, 7.5)
    assert [counts(advance(s)) for _ in range(3)] == [[32], [1], [32]]


def test_prompts_share_the_budget_in_order_of_arrival() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(sequence(2))
    advance(s)
    for length in (10, 10, 10):
        s.add(sequence(length))
    assert [counts(advance(s)) for _ in range(3)] == [[10, 6], [1, 1], [4, 10]]


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
    context = FakeContext(160)
    s = scheduler(slots=2, batch=64, budget=64, states=store(context, 2))
    s.add(old := sequence(10, max_tokens=140))
    s.add(young := sequence(10, max_tokens=140))
    while not s.preemptions:
        advance(s)
    assert context.removed == [1]
    assert list(s.waiting) == [young]
    assert (young.computed, young.slot) == (0, None)
    assert used(s) == old.computed
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
    assert (s.running, list(s.waiting), used(s)) == ([], [], 0)
    s.add(two := sequence(5))
    advance(s)
    assert two.slot == 0


def test_a_sampler_that_failed_ends_its_sequence_alone() -> None:
    s = scheduler(slots=2)
    s.add(one := sequence(4))
    s.add(two := sequence(4))
    batch = s.schedule()
    s.launched(batch)
    error = FloatingPointError("not a number")
    news = s.commit(batch, [SampleResult(error=error), SampleResult([7])], [4, 4])
    assert {sequence: (sequence.take_unsent(), sequence.done) for sequence in news} == {
        one: ([], error),
        two: ([7], None),
    }
    assert (s.running, used(s)) == ([two], 4)


# --- drafts ------------------------------------------------------------------------------------------------


def test_a_batch_with_drafts_is_followed_by_prompts_as_any_other() -> None:
    s = scheduler(batch=64, budget=16)
    s.add(stream := sequence(4, max_tokens=100))
    advance(s)
    s.add(sequence(40))
    kinds = []
    for _ in range(4):
        batch = s.schedule()
        if batch.chunks[0].sequence is stream:
            assert len(batch.chunks) == 1
            batch.add_draft(batch.chunks[0], [8, 9])
            assert not batch.is_decode
        kinds.append((batch.n_tokens, batch.n_rows))
        commit(s, batch)
    assert kinds == [(16, 0), (3, 3), (16, 0), (3, 3)]
    assert stream.tokens[4:] == [7, 8, 9, 7, 8, 9, 7]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_what_was_right_stays_or_is_pending_again(accepted: int) -> None:
    states = store(FakeContext(), 4, n_rollback=4)
    s = scheduler(states=states)
    s.add(stream := sequence(4, max_tokens=100))
    advance(s)
    batch = s.schedule()
    [chunk] = batch.chunks
    batch.add_draft(chunk, [8, 9])
    states.checkpoint(batch)
    s.launched(batch)
    assert used(s) == 7
    held = 7 if accepted == 2 else states.rollback(chunk, accepted)
    news = s.commit(batch, [SampleResult([8, 9, 10][: accepted + 1])], [held])
    assert (news, stream.tokens[5:]) == ([stream], [8, 9, 10][: accepted + 1])
    if accepted == 2:
        assert (stream.computed, stream.pending, used(s)) == (7, 1, 7)
    else:
        assert (stream.computed, stream.pending, used(s)) == (4, 1 + accepted + 1, 4)
        assert stream.ready, "it catches up, which is no prefill"
        chunk = s.schedule().chunks[0]
        assert (chunk.start, chunk.count, chunk.is_prompt) == (4, accepted + 2, False)


def test_those_that_catch_up_share_a_batch() -> None:
    s = scheduler(slots=3, batch=8)
    for _ in range(3):
        s.add(sequence(1, max_tokens=50))
    advance(s)
    for one in s.running:  # each has 6 pending, as after drafts that were right and then taken back
        one.tokens += [7] * 5
    s._last = None  # noqa: SLF001 - the step before is not to be taken over
    assert [counts(advance(s)) for _ in range(2)] == [[6, 1, 1], [1, 5, 2]]


def test_drafts_have_the_room_that_a_step_and_the_cells_leave() -> None:
    s = scheduler(slots=3, batch=32, cells=64)
    for _ in range(3):
        s.add(sequence(1, max_tokens=20))
    batch = s.schedule()
    assert batch.draft_room == 32 - 3
    batch.add_draft(batch.chunks[0], [8] * 20)
    assert (batch.draft_room, batch.n_tokens, batch.n_rows) == (9, 23, 23)
    batch.drop_drafts()
    assert (batch.draft_room, batch.n_tokens, batch.is_decode) == (29, 3, False), "a prompt's last token"
    crowded = scheduler(slots=1, batch=32, cells=18)
    crowded.add(sequence(1, max_tokens=10))
    assert crowded.schedule().draft_room == 17


def test_the_cells_of_drafts_are_counted() -> None:
    s = scheduler(slots=1, batch=32, cells=40)
    s.add(one := sequence(4, max_tokens=30))
    while s.running or s.waiting:
        batch = s.schedule()
        for chunk in batch.chunks:
            room = min(batch.draft_room, 5, one.limit - len(one.tokens) - 1)
            if room > 0 and not chunk.is_prompt:
                batch.add_draft(chunk, [8] * room)
        commit(s, batch)
        assert used(s) in (one.computed, 0)
    assert one.generated == 30


def test_reproducible_prompts_are_read_one_at_a_time_and_cut_at_fixed_places() -> None:
    s = scheduler(batch=64, budget=16, reproducible=Reproducible(chunk=20))
    for length in (50, 30, 1):
        s.add(sequence(length))
    seen: dict[int, list[int]] = {}
    while any(not running.decoding for running in s.running) or s.waiting:
        batch = advance(s)
        if any(chunk.count > 1 for chunk in batch.chunks):
            assert len(batch.chunks) == 1
        for chunk in batch.chunks:
            if chunk.is_prompt:
                seen.setdefault(chunk.sequence.prompt_length, []).append(chunk.count)
    assert seen == {50: [20, 20, 10], 30: [20, 10], 1: [1]}


@pytest.mark.parametrize(
    ("how", "together"),
    [
        (Reproducible(16, 8), {(2, 5)}),
        (Reproducible(16, 8, abreast=2), {(2, 5), (16, 16)}),
        (Reproducible(16, 8, abreast=3), {(2, 5), (16, 16)}),
        (Reproducible(16, 8, alone=True), set()),
    ],
)
def test_reproducible_pieces_of_prompts(how: Reproducible, together: set[tuple[int, ...]]) -> None:
    """Each is as long as it would be alone; together go whole chunks, or pieces that a small pass has room
    for."""
    s = scheduler(batch=64, ubatch=32, budget=16, reproducible=how)
    for length in (37, 40, 2, 5):
        s.add(sequence(length))
    steps, pieces = set(), {37: [16, 16, 5], 40: [16, 16, 8], 2: [2], 5: [5]}
    seen: dict[int, list[int]] = {}
    while any(not running.decoding for running in s.running) or s.waiting:
        chunks = [chunk for chunk in advance(s).chunks if chunk.is_prompt]
        for chunk in chunks:
            seen.setdefault(chunk.sequence.prompt_length, []).append(chunk.count)
        steps.add(tuple(chunk.count for chunk in chunks))
    assert seen == pieces
    assert {step for step in steps if len(step) > 1} == together


@pytest.mark.parametrize(("abreast", "steps"), [(1, [16, 16, 16, 16, 1]), (2, [32, 32, 1])])
def test_as_many_reproducible_chunks_follow_each_other_as_the_budget_has(
    abreast: int, steps: list[int]
) -> None:
    s = scheduler(slots=3, batch=64, budget=64, ubatch=32, reproducible=Reproducible(16, 8, abreast=abreast))
    s.add(sequence(1, max_tokens=100))
    advance(s)
    for _ in range(2):
        s.add(sequence(200))
    assert [sum(counts(advance(s))) for _ in steps] == steps


@pytest.mark.parametrize(("alone", "order"), [(False, [0, 1, 2]), (True, [2, 1, 0])])
def test_reproducible_rows_are_in_one_pass_or_each_in_its_own(alone: bool, order: list[int]) -> None:
    """llama.cpp computes ids that follow each other together: in descending order none does."""
    s = scheduler(
        reproducible=Reproducible(chunk=20, alone=alone),
        place=lambda sequence, free: free[-1 if sequence else 0],
    )
    for _ in range(3):
        s.add(sequence(1))
    batch = advance(s)
    slots = [chunk.slot for chunk in batch.chunks]
    assert [sorted(slots).index(slot) for slot in slots] == order
