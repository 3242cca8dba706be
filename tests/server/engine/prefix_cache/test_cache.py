"""The prefix cache without a model: kept states, and the requests that start from them."""

import random
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.engine.prefix_cache.shadow_index import BLOCK
from qwen_serve.server.engine.request import CacheMiss, Request
from tests.server.engine.inside import needed, nodes_of, salts
from tests.server.engine.prefix_cache.world import World

COMMON = list(range(1000, 1100))
A = [*COMMON, *range(2000, 2050)]
B = [*COMMON, *range(3000, 3050)]


def test_the_same_prompt_again_is_one_decode_step() -> None:
    world = World()
    first = world.serve(A)
    again = world.add(A)
    assert world.finish() == 1
    assert (first.reused, again.reused) == (0, len(A) - 1)


def test_off_means_off() -> None:
    world = World(ids=0)
    world.serve(A)
    assert world.serve(A).reused is None
    assert (world.cells.used, world.cache.stats().misses) == (0, 0)


def test_a_prompt_that_leaves_a_known_path_leaves_a_checkpoint_there() -> None:
    world = World()
    world.serve(A)
    assert world.serve(B).reused == 0  # nothing was kept in the middle of A
    assert world.serve([*COMMON, 5, 6]).reused == len(COMMON)


def test_a_prompt_that_is_the_beginning_of_a_known_one_leaves_one_too() -> None:
    world = World()
    world.serve(A)
    world.serve(A[:80])
    assert world.serve(A[:80]).reused == 79


def test_a_shared_prefix_is_computed_once_for_all_that_wait() -> None:
    world = World(slots=6, batch=64, budget=16)
    prompts = [[*COMMON, *range(n * 10, n * 10 + 20)] for n in range(6)]
    sequences = [world.add(prompt) for prompt in prompts]
    world.finish()
    assert world.computed == len(COMMON) + 6 * 20
    assert [sequence.reused for sequence in sequences] == [0, *[len(COMMON)] * 5]


def test_so_is_a_prompt_that_all_share() -> None:
    world = World(slots=4)
    sequences = [world.add(A, 3) for _ in range(4)]
    world.finish()
    assert [sequence.reused for sequence in sequences] == [0, 149, 149, 149]


def test_one_that_comes_while_the_prefix_is_computed_waits_for_it_too() -> None:
    world = World(batch=40, budget=40)
    world.add(A)
    world.step()
    late = world.add(B)
    world.finish()
    assert late.reused == len(COMMON)


def test_one_that_comes_too_late_computes_it_again() -> None:
    world = World(batch=120, budget=120)
    world.add(A, 30)
    world.step()
    late = world.add(B)
    world.finish()
    assert late.reused == 0  # A was beyond the place where they part


@pytest.mark.parametrize("when", ["at once", "half way"])
def test_when_the_one_that_computes_goes_away_the_next_goes_on(when: str) -> None:
    world = World(batch=40, budget=40)
    leader = world.add(A)
    followers = [world.add([*COMMON, n]) for n in range(3)]
    world.step()
    if when == "half way":
        world.step()
    done = leader.computed
    world.scheduler.remove(leader)
    world.finish()
    assert [follower.reused for follower in followers] == [done, 100, 100]


def test_waiting_holds_nobody_else_up() -> None:
    world = World(batch=40, budget=40)
    world.add(A)
    follower, stranger = world.add(B), world.add(list(range(30)))
    world.step()
    assert (follower.begun, stranger.begun) == (False, True)
    while stranger.generated == 0:
        world.step()
    assert not follower.begun


def test_the_next_turn_goes_on_from_the_end_of_the_answer() -> None:
    world = World()
    first = world.serve(A, 40)
    turn = [*first.tokens, *range(500, 540)]
    assert world.serve(turn).reused == len(first.tokens) - 1  # the last token was never decoded


def test_the_least_recently_used_goes_when_ids_run_short() -> None:
    world = World(ids=3)
    prompts = [[n, *range(50)] for n in range(4)]
    for prompt in prompts[:3]:
        world.serve(prompt)
    world.serve(prompts[0])
    world.serve(prompts[3])
    assert [world.serve(prompts[n]).reused for n in (3, 0)] == [50, 50]
    assert world.serve(prompts[1]).reused == 0
    assert world.cache.stats().evictions >= 2


def test_what_is_held_stays_within_its_budget_of_cells() -> None:
    world = World(max_cells=120, shrinks=False)
    for n in range(4):
        world.serve([n, *range(50)])
        assert world.cells.idle <= 120
    assert [world.serve([n, *range(50)]).reused for n in (3, 2)] == [50, 50]


def test_what_a_request_in_flight_wants_is_not_given_up_for_another() -> None:
    world = World(slots=12, ids=6, total_cells=4000)
    long = [world.add([n, *range(50)], 60) for n in range(6)]
    while not all(sequence.generated for sequence in long):
        world.step()
    short = [world.add([100 + n, *range(50)], 2) for n in range(3)]
    while not all(sequence.generated == 2 for sequence in short):
        world.step()
    assert (world.cache.stats().resident, world.cache.stats().evictions) == (6, 0)
    again = [world.add([*sequence.tokens[:51], 7], 1) for sequence in long]
    world.finish()
    assert [sequence.reused for sequence in again] == [50] * 6


def test_what_a_running_request_started_from_stays() -> None:
    world = World(slots=12, ids=4, total_cells=4000)
    for n in range(3):
        world.serve([*COMMON, n])
    runs = [world.add([*COMMON, 70 + n, *range(30)], 60) for n in range(2)]
    world.step()
    for n in range(8):
        world.add([200 + n, *range(50)], 20)
    while world.scheduler.waiting or len(world.scheduler.running) > len(runs):
        world.step()
    assert [run.reused for run in runs] == [len(COMMON)] * 2
    late = world.add([*COMMON, 90])
    world.finish()
    assert late.reused == len(COMMON)


def test_what_two_in_flight_want_is_kept_whatever_else_is() -> None:
    world = World(slots=12, ids=4, total_cells=4000)
    for n in range(8):
        world.add([n, *range(50)], 60)
    for _ in range(12):
        world.step()
    twins = [world.add([500, *range(50)], 14) for _ in range(2)]
    world.finish()
    assert [twin.reused for twin in twins] == [0, 50]


def test_a_crowd_of_conversations_finds_what_it_left() -> None:
    world = World(slots=32, ids=96, max_cells=8000, total_cells=16_384)
    turns = [world.add([n, *range(50)], 20 + n % 8) for n in range(32)]
    world.finish()
    for _ in range(3):
        turns = [world.add([*turn.tokens, *range(20)], 20) for turn in turns]
        lengths = [turn.prompt_length for turn in turns]
        world.finish()
        assert [turn.reused for turn in turns] == [length - 21 for length in lengths]


def test_the_last_stays_though_nothing_comes_again() -> None:
    world = World(slots=32, max_cells=700, total_cells=8192)
    for n in range(40):
        world.serve([n, *range(50)])
    for n in range(32):
        world.add([100 + n, *range(300, 320)], 5 + n)
    world.finish()
    assert 40 < world.cells.idle <= 60


def test_a_budget_that_does_not_shrink_is_used_whole() -> None:
    world = World(max_cells=400, shrinks=False)
    for n in range(40):
        world.serve([n, *range(50)])
    assert world.cells.idle >= 350


def test_prompts_that_never_come_again_are_held_less() -> None:
    world = World(max_cells=400)
    for n in range(40):
        world.serve([n, *range(50)])
        assert world.cells.idle >= 300 or not 5 < n < 7, "a few prove nothing"
    assert 50 <= world.cells.idle <= 60, "the last one stays"
    conversation = world.serve(list(range(300)))
    assert world.cells.idle >= 299, "though it is more than the budget is now"
    for _ in range(8):
        conversation = world.serve([*conversation.tokens, 7])
        assert conversation.reused is not None and conversation.reused > 0.9 * len(conversation.tokens)
    world.serve([1000, *range(50)])
    assert world.cells.idle > 350, "what is made use of may be held"


def test_prompts_that_come_again_are_noticed_though_nothing_of_them_is_left() -> None:
    world = World(max_cells=700)
    for n in range(60):
        world.serve([n, *range(50)])
    prompts = [[1000 + n, *range(300)] for n in range(2)]
    for prompt in prompts:
        world.serve(prompt)
    assert world.serve(prompts[0]).reused == 0, "it went for the other one"
    for prompt in [prompts[1], *prompts] * 2:
        world.serve(prompt)
    assert [world.serve(prompt).reused for prompt in prompts] == [300, 300]


def test_a_prompt_larger_than_the_budget_does_not_drive_out_the_others() -> None:
    world = World(max_cells=120)
    world.serve(list(range(100)))
    world.serve(list(range(500, 700)))
    assert world.serve(list(range(100))).reused == 99


def test_running_sequences_take_cells_from_the_cache_before_anybody_is_preempted() -> None:
    world = World(slots=2, total_cells=256)
    for n in range(5):
        world.serve([n, *range(40)])
    assert world.cells.idle > 150
    long = world.serve(list(range(600, 700)), 100)
    assert long.generated == 100
    assert world.scheduler.preemptions == 0
    assert world.cache.stats().evictions > 0


def test_a_checkpoint_in_use_keeps_its_cells_for_those_who_use_it() -> None:
    world = World(slots=2, total_cells=256)
    world.serve(A)
    two = [world.add([*A, n], 60) for n in range(2)]
    world.finish()
    assert all(sequence.reused in (149, 150) for sequence in two)
    assert world.scheduler.preemptions == 0


def test_checkpoints_make_room_for_drafts_where_that_is_enough() -> None:
    world = World(slots=1, total_cells=256, draft_rows=60)
    for n in range(4):
        world.serve([n, *range(50)])
    world.add([100, *range(20)], 60)
    while world.scheduler.running or world.scheduler.waiting:
        batch = world.step()
        if not batch.chunks[0].is_prompt:
            assert batch.draft_room >= 60
    tight = World(slots=1, total_cells=70, draft_rows=60)
    tight.serve(list(range(30)))
    assert tight.add([100, *range(20)], 40)
    tight.finish()
    assert tight.scheduler.preemptions == 0


def test_counters() -> None:
    world = World(cell_bytes=10, state_bytes=1000)
    for _ in range(3):
        world.serve(A)
    stats = world.cache.stats()
    assert (stats.hits, stats.misses, stats.tokens_saved) == (2, 1, 2 * 149)
    assert (stats.resident, stats.resident_cells) == (1, 149)
    assert stats.resident_bytes == 149 * 10 + 1000


# --- any mix of requests -----------------------------------------------------------------------------------


@dataclass
class Plan:
    pieces: list[int]
    cut: int
    answer: int
    arrives: int
    cancelled: int | None


plans = st.builds(
    Plan,
    pieces=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    cut=st.integers(0, 20),
    answer=st.integers(1, 30),
    arrives=st.integers(0, 40),
    cancelled=st.none() | st.integers(0, 60),
)


def prompt(plan: Plan) -> list[int]:
    """A prompt of pieces that many prompts share, in any order; the last piece is cut at a random place."""
    tokens = [token for piece in plan.pieces for token in range(piece * 100, piece * 100 + 21)]
    return tokens[: len(tokens) - plan.cut]


@settings(max_examples=150)
@given(
    mix=st.lists(plans, min_size=1, max_size=12),
    slots=st.integers(1, 4),
    ids=st.integers(1, 5),
    total_cells=st.integers(120, 300),
    max_cells=st.integers(0, 200),
    batch=st.integers(5, 64),
    budget=st.integers(1, 64),
    interval=st.sampled_from([0, 17]),
    host_bytes=st.sampled_from([0, 60, 300]),
    draft_rows=st.sampled_from([0, 20]),
    fails=st.sampled_from([0.0, 0.5]),
    on_gpu=st.booleans(),
)
@mock.patch("qwen_serve.server.engine.prefix_cache.cache.MIN_RESTORE", 20)
def test_every_request_computes_on_from_what_it_really_holds(
    mix: list[Plan],
    slots: int,
    ids: int,
    total_cells: int,
    max_cells: int,
    batch: int,
    budget: int,
    interval: int,
    host_bytes: int,
    draft_rows: int,
    fails: float,
    on_gpu: bool,
) -> None:
    world = World(
        slots=slots,
        ids=ids,
        total_cells=total_cells,
        max_cells=max_cells,
        batch=batch,
        budget=budget,
        interval=interval,
        host_bytes=host_bytes,
        draft_rows=draft_rows,
        turn_ids=[100],
        on_gpu=on_gpu,
    )
    started: dict[int, Request] = {}
    rng = random.Random(1)
    cancelled: set[int] = set()
    now = 0
    while len(started) < len(mix) or world.scheduler.running or world.scheduler.waiting:
        world.context.fails_to_save, world.context.fails_to_restore = (rng.random() < fails for _ in "12")
        for i, plan in enumerate(mix):
            if plan.arrives <= now and i not in started:
                started[i] = world.add(prompt(plan), plan.answer)
            live = i in started and (started[i].slot is not None or started[i] in world.scheduler.waiting)
            if live and plan.cancelled == now:
                world.scheduler.remove(started[i])
                world.check()
                cancelled.add(i)
        if world.scheduler.running or world.scheduler.waiting:
            assert world.step().chunks, "there is work, but nothing was scheduled"
        now += 1
        assert now < 20_000
    assert all(i in cancelled or one.generated == mix[i].answer for i, one in started.items())
    assert world.cells.used == world.cells.idle <= max_cells
    kept = world.cache.stats()
    nodes = nodes_of(world.cache)
    assert kept.resident == sum(node.seq_id is not None for node in nodes)
    assert kept.host_checkpoints == sum(node.saved is not None for node in nodes)
    assert all(needed(node) or len(node.children) > 1 for node in nodes), "something was left behind"


# --- who shares, and what is told --------------------------------------------------------------------------


def test_prefixes_are_shared_within_a_salt_only() -> None:
    world = World()
    for salt in ("", "one", "another"):
        assert world.serve(A, salt=salt).reused == 0
    for salt in ("", "one", "another"):
        assert world.serve(A, salt=salt).reused == len(A) - 1
        assert world.serve(B, salt=salt).missed == CacheMiss("diverged", len(COMMON))


def test_those_who_run_at_once_wait_for_their_own_salt_only() -> None:
    world = World(slots=4, batch=64, budget=16)
    sequences = [world.add(A, salt=salt) for salt in ("one", "one", "another", "another")]
    world.finish()
    assert [sequence.reused for sequence in sequences] == [0, len(A) - 1, 0, len(A) - 1]


def test_salts_leave_nothing_behind() -> None:
    world = World(ids=2)
    for n in range(50):
        world.serve(A, salt=str(n))
        world.serve([7], salt=f"short {n}")
    assert salts(world.cache) <= 2


def test_why_a_prompt_was_not_found_whole() -> None:
    world = World(ids=3)
    assert world.serve(A).missed == CacheMiss("new", 0)
    assert world.serve(A).missed is None
    assert world.serve([*A, *range(20)]).missed == CacheMiss("new", len(A) - 1)
    assert world.serve(B).missed == CacheMiss("diverged", len(COMMON))
    for n in range(5):
        world.serve([n, *range(500, 600)])
    assert world.serve(A).missed == CacheMiss("evicted", len(A) // BLOCK * BLOCK)
    world = World(ids=0)
    assert world.serve(A).missed == CacheMiss("off", 0)
