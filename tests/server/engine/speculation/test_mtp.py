"""What the head is fed: every token beside the hidden row of the one before it, without a gap, and once.

A pretend context checks that; its hidden rows hold a position, and its guesses count on from the token fed.
"""

import random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from qwen_serve.llamacpp.errors import LlamaError, NoMemorySlot
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.server.engine.request import Request
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.speculation.base import Drafter, DraftRequest
from qwen_serve.server.engine.speculation.mtp import KEPT, MtpDrafter, host_bytes
from tests.server.engine.inside import draft_states
from tests.server.engine.speculation.fake_head import GUESSED, WIDTH, Head, Recorded
from tests.server.engine.speculation.helpers import sequence

SLOTS = 3


@pytest.fixture(params=[False, True], ids=["in turn", "queued"])
def head(request: pytest.FixtureRequest) -> Head:
    return Head(queues=request.param)


def drafter(head: Head, window: int = 64, widest: int = 0, span: int = 10**6) -> MtpDrafter:
    return MtpDrafter(
        cast("MtpContext", head), window, depth=16, slots=SLOTS, most=SLOTS, span=span, widest=widest
    )


def draft(mtp: MtpDrafter, *wanted: tuple[Request, int]) -> list[list[int]]:
    """Drafts of at most so many tokens for each sequence."""
    requests = [DraftRequest(one, one.slot or 0, limit) for one, limit in wanted]
    return [answer.tokens for answer in mtp.propose(requests)]


def can_draft(mtp: MtpDrafter, one: Request) -> bool:
    return mtp.can_draft(DraftRequest(one, one.slot or 0, 1))


def rows(start: int, n: int) -> np.ndarray:
    return np.repeat(np.arange(start, start + n, dtype=np.float32)[:, None], WIDTH, axis=1)


def running(tokens: list[int], slot: int = 0) -> Request:
    one = sequence(list(tokens))
    one.slot = slot
    return one


def test_it_reads_the_prompt_when_it_first_drafts_and_guesses_on(head: Head) -> None:
    mtp, one = drafter(head), running(list(range(100, 111)))
    assert not can_draft(mtp, one)
    mtp.collect(0, 0, rows(0, 4))
    mtp.collect(0, 4, rows(4, 6))
    assert head.entries == {}, "nothing is read before it is needed"
    assert can_draft(mtp, one)
    assert draft(mtp, (one, 3)) == [[111, 112, 113]]
    head.check(0, one.tokens)
    assert max(head.entries[0]) == 10, "the entries of guesses are gone"
    assert not can_draft(mtp, one), "it has drafted from here"


def test_a_prompt_longer_than_a_batch_is_read_in_pieces(head: Head) -> None:
    mtp, one = drafter(head), running(list(range(50)))
    mtp.collect(0, 0, rows(0, 49))
    assert draft(mtp, (one, 2)) == [[50, 51]]
    assert head.widths == [16, 16, 16, 1, 1]
    head.check(0, one.tokens)


def test_only_the_window_is_read_of_a_long_text(head: Head) -> None:
    mtp, one = drafter(head, window=8), running(list(range(300)))
    for start in range(0, 299, 23):
        mtp.collect(0, start, rows(start, min(23, 299 - start)))
    assert draft(mtp, (one, 1)) == [[300]]
    head.check(0, one.tokens)
    assert 8 <= len(head.entries[0]) <= 16


@pytest.mark.parametrize("error", [NoMemorySlot("full"), LlamaError("no"), FloatingPointError("NaN")])
def test_a_failure_is_told_and_followed_by_a_new_beginning(head: Head, error: Exception) -> None:
    mtp, one = drafter(head), running([5, 6, 7])
    mtp.collect(0, 0, rows(0, 2))
    head.error = error
    with pytest.raises(type(error)):
        draft(mtp, (one, 2))
    assert not can_draft(mtp, one)
    head.error = None
    one.tokens += [8, 9]
    mtp.collect(0, 2, rows(2, 2))
    assert draft(mtp, (one, 2)) == [[10, 11]]
    head.check(0, one.tokens)


def test_a_full_cache_costs_those_who_do_not_draft_what_they_had(head: Head) -> None:
    mtp, one, two = drafter(head), running([5, 6, 7]), running([5, 6, 7], slot=1)
    for slot in (0, 1):
        mtp.collect(slot, 0, rows(0, 2))
    draft(mtp, (two, 2))
    mtp.copy(1, 5)
    assert head.entries[1]
    assert head.entries[5]
    head.error = NoMemorySlot("full")
    with pytest.raises(NoMemorySlot):
        draft(mtp, (one, 2))
    assert not any(head.entries.values()), "there is room again"
    head.error = None
    two.tokens.append(8)
    mtp.collect(1, 2, rows(2, 1))
    assert draft(mtp, (two, 2)) == [[9, 10]]
    head.check(1, two.tokens)


def test_it_looks_back_on_a_span(head: Head) -> None:
    mtp, one = drafter(head, window=8, span=40), running(list(range(30)))
    mtp.collect(0, 0, rows(0, 29))
    for n in range(30, 300):
        assert draft(mtp, (one, 2)) == [[n, n + 1]]
        head.check(0, one.tokens)
        held = sorted(head.entries[0])
        assert held == list(range(held[0], n)), "without a gap"
        assert len(held) <= 41
        assert len(held) >= 20 or n < 60
        if n == 150:  # to another id, and to the host and back
            mtp.copy(0, 3)
            saved = mtp.save(3)
            assert saved is not None
            mtp.free(0)
            mtp.restore(0, saved)
        mtp.collect(0, n - 1, rows(n - 1, 1))
        one.tokens.append(n)


def test_what_was_saved_comes_back_under_another_id(head: Head) -> None:
    mtp, one = drafter(head), running(list(range(100, 111)))
    mtp.collect(0, 0, rows(0, 10))
    draft(mtp, (one, 3))
    one.tokens += [111, 112]
    mtp.collect(0, 10, rows(10, 2))
    saved = mtp.save(0)
    assert saved is not None
    assert saved.nbytes > 0
    mtp.free(0)
    assert not head.entries[0]
    mtp.restore(3, saved)
    one.slot = 3
    assert can_draft(mtp, one)
    assert draft(mtp, (one, 2)) == [[113, 114]]
    head.check(3, one.tokens)
    assert sorted(head.entries[3]) == list(range(1, 13)), "what it had read before it left, too"


def test_without_room_for_what_was_saved_it_begins_anew(head: Head) -> None:
    mtp, one = drafter(head), running(list(range(100, 111)))
    mtp.collect(0, 0, rows(0, 10))
    draft(mtp, (one, 3))
    saved = mtp.save(0)
    assert saved is not None
    assert mtp.save(7) is None
    mtp.free(0)
    head.error = LlamaError("full")
    mtp.restore(3, saved)
    one.slot, head.error = 3, None
    assert not can_draft(mtp, one)
    mtp.collect(3, 10, rows(10, 1))
    one.tokens.append(111)
    assert draft(mtp, (one, 1)) == [[112]]
    assert sorted(head.entries[3]) == [11]


def test_host_memory_is_what_was_planned(head: Head) -> None:
    """Whoever runs for however long, and however many checkpoints are taken."""
    window, checkpoints, rng = 200, 12, random.Random(0)
    mtp = drafter(head, window=window)
    for _ in range(40):
        slot = rng.randrange(SLOTS)
        one = running([1] * 700, slot)
        for start in range(0, 600, 60):
            mtp.collect(slot, start, rows(start, 60))
        if rng.random() < 0.5:
            mtp.collect(slot, 600, rows(600, 99))
            draft(mtp, (one, 2))
        mtp.copy(slot, SLOTS + rng.randrange(checkpoints))
        if rng.random() < 0.5:
            mtp.copy(SLOTS + rng.randrange(checkpoints), (slot + 1) % SLOTS)
            mtp.free((slot + 1) % SLOTS)
        mtp.free(slot)
        kept = [piece for state in draft_states(mtp).values() for piece in state.rows]
        assert all(piece.base is None for piece in kept), "a view keeps the whole alive"
        assert max(len(piece) for piece in kept) <= KEPT
        assert sum(piece.nbytes for piece in kept) <= host_bytes(SLOTS, checkpoints, window, WIDTH)


def test_in_a_pause_slots_keep_nothing_and_checkpoints_do(head: Head) -> None:
    mtp = drafter(head)
    mtp.collect(0, 0, rows(0, 40))
    mtp.copy(0, SLOTS)
    mtp.pause()
    assert set(draft_states(mtp)) == {SLOTS}
    one = running(list(range(61)))
    mtp.collect(0, 50, rows(50, 10))
    assert draft(mtp, (one, 1)) == [[61]]
    head.check(0, one.tokens)


def test_a_copy_grows_when_it_is_read_on(head: Head) -> None:
    mtp, one = drafter(head, window=100), running(list(range(400)), 1)
    mtp.collect(0, 0, rows(0, 150))
    mtp.copy(0, SLOTS)
    mtp.copy(SLOTS, 1)
    for start in range(150, 399, 7):
        mtp.collect(1, start, rows(start, min(7, 399 - start)))
    assert draft(mtp, (one, 2)) == [[400, 401]]
    head.check(1, one.tokens)


def test_it_is_what_the_speculator_expects(head: Head) -> None:
    mtp = drafter(head)
    as_drafter: Drafter = mtp  # checked by mypy
    assert mtp.save(0) is None
    assert as_drafter.most == SLOTS
    assert mtp.cost(1, 4) == 0
    mtp.measure()
    assert mtp.cost(1, 4) > mtp.cost(1, 2) > 0


def test_first_passes_of_drafts_are_of_one_width(head: Head) -> None:
    """The rows that make it up come after those that count, and leave nothing behind."""
    mtp, one = drafter(head, widest=5), running(list(range(100, 111)))
    mtp.collect(0, 0, rows(0, 10))
    [guesses] = draft(mtp, (one, 3))
    assert guesses == [111, 112, 113]
    assert head.widths == [9, 4, 1, 1], "the first call reads the prompt"
    head.check(0, one.tokens)
    for accepted in (0, 3, 1):
        head.widths.clear()
        mtp.collect(0, start := len(one.tokens) - 1, rows(start, 1 + accepted))
        one.tokens += [*guesses[:accepted], 200 + accepted]
        [guesses] = draft(mtp, (one, 3))
        assert guesses == [one.tokens[-1] + n for n in (1, 2, 3)]
        assert head.widths == [4, 1, 1]
        assert sorted(head.entries[0]) == list(range(1, len(one.tokens)))
        head.check(0, one.tokens)
    head.widths.clear()
    mtp.collect(0, len(one.tokens) - 1, rows(len(one.tokens) - 1, 1))
    one.tokens.append(300)
    draft(mtp, (one, 5))
    assert head.widths == [1] * 5, "so many more rows would cost more than a graph"


@pytest.mark.parametrize("widest", [0, 5])
def test_a_guess_is_fed_beside_the_heads_own_row(
    head: Head, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mtp, one = drafter(head, widest=widest), running([7, 8, 9])
    fed: list[tuple[int, int, float]] = []
    decode = head.decode

    def spy(n: int) -> None:
        first = 1 if not fed else 0  # two tokens are caught up on, then one guess at a time
        fed.append((int(head.positions[first]), int(head.tokens[first]), float(head.input_hidden[first, 0])))
        decode(n)

    monkeypatch.setattr(head, "decode", spy)
    mtp.collect(0, 0, rows(0, 2))
    draft(mtp, (one, 3))
    assert fed == [(2, 9, 1.0), (3, 10, 2 + GUESSED), (4, 11, 3 + GUESSED)]


@pytest.mark.parametrize("widest", [0, 5])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_entries_are_of_the_text(head: Head, seed: int, widest: int) -> None:
    """Drafts right and wrong, rows read again, pauses, copies to other ids and back, restarts."""
    rng = random.Random(seed)
    mtp = drafter(head, rng.choice([4, 12, 100, 2 * KEPT]), widest, span=rng.choice([30, 10**6]))
    texts: dict[int, Request] = {}
    cached: dict[int, int] = {}
    drafts = 0
    for _ in range(120):
        slot = rng.randrange(3)
        if slot not in texts or rng.random() < 0.03:
            mtp.free(slot)
            texts[slot] = running([rng.randrange(1000) for _ in range(rng.randint(1, 40))], slot)
            cached[slot] = 0
        one = texts[slot]
        guesses: list[int] = []
        if can_draft(mtp, one) and rng.random() < 0.6:
            [guesses] = draft(mtp, (one, rng.randint(1, 5)))
            drafts += bool(guesses)
            head.check(slot, one.tokens)
        accepted = rng.randint(0, len(guesses))
        start = cached[slot]
        end = len(one.tokens) + accepted
        mtp.collect(slot, start, rows(start, end - start))
        one.tokens += [*guesses[:accepted], rng.randrange(1000)]
        if accepted < len(guesses):
            mtp.rolled_back(slot, start)  # went back: the same tokens come again
        else:
            cached[slot] = end
        if rng.random() < 0.15:
            spare, other = 3 + rng.randrange(2), rng.randrange(3)
            mtp.copy(slot, spare)
            if rng.random() < 0.5 and (saved := mtp.save(spare)) is not None:  # to the host and back
                mtp.free(spare)
                mtp.restore(spare, saved)
            head.check(spare, one.tokens)
            mtp.copy(spare, other)  # as a request that goes on from there, with other tokens
            texts[other] = running([*one.tokens[: cached[slot]], rng.randrange(1000)], other)
            cached[other] = cached[slot]
    assert drafts > 10


def test_each_token_is_drawn_as_the_request_would_after_those_before_it(head: Head) -> None:
    """The sampler has the draft's tokens before, and is as it was in the end, also after an error."""
    mtp, one, two = drafter(head), running([4, 5]), running([7, 8, 9], slot=1)
    sampler, other = Recorded(), Recorded()
    one.sampler, two.sampler = (cast("Sampler", SimpleNamespace(noise=noise)) for noise in (sampler, other))
    for text in (one, two):
        mtp.collect(text.slot or 0, 0, rows(0, len(text.tokens) - 1))
    assert draft(mtp, (one, 3), (two, 1)) == [[6, 7, 8], [10]]
    assert sampler.seen == [[], [], []] if head.queues else [[], [6], [6, 7]]
    assert other.seen[0] == []
    assert sampler.accepted == other.accepted == []
    for text in (one, two):
        mtp.collect(text.slot or 0, len(text.tokens) - 1, rows(len(text.tokens) - 1, 1))
        text.tokens.append(50)
    head.error_at = 2
    with pytest.raises(LlamaError):
        draft(mtp, (one, 3), (two, 3))
    assert sampler.accepted == other.accepted == []
