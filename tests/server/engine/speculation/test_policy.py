"""The policy's choices, and the measurements that it learns from."""

import random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.engine.batch import Batch, Placement
from qwen_serve.server.engine.request import RequestStatus
from qwen_serve.server.engine.speculation.acceptance import DEPTHS, Acceptance
from qwen_serve.server.engine.speculation.always import Always
from qwen_serve.server.engine.speculation.cooldown import Cooldown
from qwen_serve.server.engine.speculation.hidden_rows import COLLECT
from qwen_serve.server.engine.speculation.policy import COOLDOWN_FIRST, Option, Policy, Step
from qwen_serve.server.engine.speculation.speculator import SPARSE
from qwen_serve.server.engine.speculation.times import StepTimes
from qwen_serve.server.engine.verification import SampleResult
from tests.server.engine.speculation.card import World, on_h200


def stand_in(chance: float = 0.999, *, seconds: float = 0.0, depth: int = 127, instant: bool = True) -> Any:
    """A drafter without behaviour."""
    drafter = Mock(instant=instant, most=16, depth=depth, kinds={"sure": chance})
    drafter.cost = lambda n, length: length * seconds
    return drafter


def card_times(weights: float = 4.0, row: float = 0.1) -> StepTimes:
    """Step times from milliseconds for the weights and for each row."""
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 64, 256):
        times.add(1, rows, 1e-3 * (weights + row * rows))
    return times


@pytest.mark.parametrize(
    ("chance", "least", "most"), [(0.01, 0, 0), (0.5, 1, 8), (0.9, 8, 40), (1.0, 127, 127)]
)
def test_doubtful_drafts_are_short_and_hopeless_ones_are_none(chance: float, least: int, most: int) -> None:
    plan = Policy(card_times()).choose([Option(stand_in(chance), ["sure"], [127])], Step([1], 512, 512))
    assert least <= (plan.lengths[0] if plan else 0) <= most


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted() -> None:
    times = card_times(weights=0.1, row=4)
    assert Policy(times).choose([Option(stand_in(0.9), ["sure"], [64])], Step([1], 512, 512)) is None


def test_the_instant_drafter_is_preferred_where_it_is_as_good() -> None:
    options = [
        Option(stand_in(0.9, seconds=0.5e-3, instant=False), ["sure"], [8]),
        Option(text := stand_in(0.9), ["sure"], [64]),
    ]
    plan = Policy(card_times()).choose(options, Step([1], 512, 512))
    assert plan is not None
    assert plan.drafter is text


def test_redoing_what_was_right_is_part_of_the_price() -> None:
    lengths = []
    for rewinds in (0, 64):
        step = Step([1], 512, 512, rewinds=rewinds)
        plan = Policy(card_times(row=0.4)).choose([Option(stand_in(0.8), ["sure"], [64])], step)
        lengths.append(plan.lengths[0] if plan else 0)
    assert lengths[0] < lengths[1]


@settings(max_examples=60)
@given(
    mix=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 255)), min_size=1, max_size=10),
    chance=st.floats(0.01, 1),
    room=st.integers(0, 400),
    most=st.integers(1, 400),
)
def test_plans_keep_to_what_there_is(mix: list[tuple[int, int]], chance: float, room: int, most: int) -> None:
    pending, limits = [own for own, _ in mix], [limit for _, limit in mix]
    option = Option(stand_in(chance), ["sure" if limit else "" for limit in limits], limits)
    for policy in (Policy(card_times()), Always(card_times())):
        plan = policy.choose([option], Step(pending, room, most))
        if plan is not None:
            assert 0 < sum(plan.lengths) <= min(room, most - sum(pending))
            assert all(length <= limit for length, limit in zip(plan.lengths, limits, strict=True))


def test_always_drafts_as_far_as_it_can() -> None:
    text, head = stand_in(0.01), stand_in(0.01, seconds=9.0, instant=False)
    options = [Option(text, ["", "sure"], [0, 60]), Option(head, ["sure"] * 2, [8, 8])]
    plan = Always(StepTimes()).choose(options, Step([1, 3], 100, 100))
    assert plan is not None
    assert (plan.drafter, plan.lengths) == (text, [0, 48])
    plan = Always(StepTimes()).choose(options[1:], Step([1, 3], 100, 100))
    assert plan is not None
    assert (plan.drafter, plan.lengths) == (head, [8, 8])


@pytest.mark.parametrize("truth", [[0.9] * 4, [0.95, 0.6, 0.2, 0.2]])
def test_hit_rates_are_learnt_by_depth(truth: list[float]) -> None:
    rates, rng = Acceptance(0.7), random.Random(3)
    for _ in range(600):
        accepted = 0
        while accepted < 4 and rng.random() < truth[accepted]:
            accepted += 1
        rates.add(4, accepted)
    expected = np.cumsum(np.cumprod(truth))
    assert [rates.expected(n) for n in (1, 2, 3, 4)] == pytest.approx(expected, abs=0.3)
    assert rates.expected(0) == 0
    assert rates.all_right(4) == pytest.approx(np.prod(truth), abs=0.2)


def test_depths_never_tried_are_taken_for_the_one_before() -> None:
    rates = Acceptance(0.5)
    for _ in range(60):
        rates.add(1, 1)
    assert rates.expected(3) == pytest.approx(3, abs=0.3)
    assert DEPTHS < rates.expected(4 * DEPTHS) < 4 * DEPTHS


def test_a_step_behind_a_prompt_that_nobody_waited_for_teaches_nothing() -> None:
    """The time to a first token includes the prompt's, so it says nothing about a token's time."""
    world = on_h200()
    known = world.speculator.step_times()
    one = world.newcomer(0)
    one.prompt_length, one.computed, one.status = len(one.tokens), 0, RequestStatus.PREFILL
    for count, sampled, seconds in ((one.pending - 1, [], 0.001), (1, [1], 0.08)):
        batch = Batch(draft_room=2000)
        batch.add(one, count)
        batch.placements = [Placement(list(range(count)))]
        world.speculator.propose(batch)
        [one.computed] = world.speculator.verify(batch, [SampleResult(sampled)], seconds)
    assert world.speculator.step_times() == known
    one.tokens.append(1)
    one.status, world.sequences = RequestStatus.DECODE, [one]
    world.gain(20)
    assert world.speculator.step_times() != known


def test_each_loss_lengthens_the_cooldown_and_a_gain_ends_it() -> None:
    cooldown, lengths = Cooldown(2, 50), list[int]()
    assert cooldown.left(0) == 0
    for now in range(0, 400, 100):
        cooldown.begin(now)
        assert cooldown.lost
        lengths.append(cooldown.left(now))
        assert cooldown.left(now + 60) == 0
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (2, 50)
    cooldown.end()
    assert not cooldown.lost
    cooldown.begin(7)
    assert cooldown.left(7) == 2


def test_a_request_that_begins_ends_a_cooldown_of_which_a_part_is_over() -> None:
    cooldown = Cooldown(40, 100)
    cooldown.begin(100)
    cooldown.retry_early(100)
    assert cooldown.left(110) == 30
    cooldown.retry_early(130)
    assert cooldown.left(130) == 0
    cooldown.begin(200, most=60)
    assert cooldown.left(200) == 60, "that is enough"
    cooldown.begin(300, least=100)
    assert cooldown.left(300) == 100


def test_no_hidden_rows_are_collected_during_a_long_cooldown() -> None:
    world = on_h200()
    world.head.right = 0.0
    world.gain(1000)
    kept, drafted = [], []
    for _ in range(4000):
        kept.append(world.card.keeps_hidden)
        drafted.append(bool(world.step()))
    assert sum(kept) < 0.25 * len(kept)
    first = drafted.index(True)
    assert all(kept[first - COLLECT + 1 : first + 1]), "it has read some text when it is tried again"
    world.head.right = 1.0
    world.gain(4000)
    assert world.gain(100) > 3
    assert world.card.keeps_hidden


def test_acceptance_follows_a_text_that_changes_and_early_errors_far_down_fade() -> None:
    rates = Acceptance(0.97)
    rates.add(2, 1)
    early = rates.expected(2) - rates.expected(1)
    for _ in range(1000):
        rates.add(1, 1)
    assert rates.expected(2) - rates.expected(1) > early + 0.1
    for _ in range(60):
        rates.add(1, 0)
    assert rates.expected(1) < 0.5
    rates.retry()
    for _ in range(4):
        rates.add(1, 1)
    assert rates.expected(1) > 0.6


def test_a_retry_goes_on_as_long_as_nothing_was_wrong() -> None:
    """Earlier results outweigh one right draft."""
    policy, head = Policy(card_times(row=1.5)), stand_in(0.3, depth=8)
    for _ in range(100):
        policy.verified(head, "sure", 1, 1, 0)
    option, step = Option(head, ["sure"], [8]), Step([1], 512, 512)
    assert policy.choose([option], step) is None
    policy.now += COOLDOWN_FIRST
    for _ in range(3):
        plan = policy.choose([option], step)
        assert plan is not None
        policy.verified(head, "sure", 1, plan.lengths[0], plan.lengths[0])
    policy.verified(head, "sure", 1, 2, 0)
    assert policy.choose([option], step) is None


def test_a_head_that_cools_down_is_not_planned_for() -> None:
    world = on_h200()
    world.head.right = 0.0
    choose = Mock(wraps=world.policy.choose)
    world.policy.choose = choose  # type: ignore[method-assign]
    world.gain(2000)
    assert choose.call_count < 60


def test_a_drafter_that_was_unlucky_at_first_drafts_again_while_another_drafts() -> None:
    world = on_h200(snapshots=15)
    block = Mock(instant=False, depth=15, kinds={"dflash": 0.85})
    block.name, block.cost.return_value = "dflash", 1.7e-3
    options = [Option(block, ["dflash"], [15]), Option(world.head, ["mtp"], [8])]
    step = Step([1], 200, 200, rewinds=15, keeps_graph=15)
    for _ in range(2):
        world.policy.verified(block, "dflash", 1, 15, 0)
        world.policy.verified(world.head, "mtp", 1, 4, 3)
    plans = [world.policy.choose(options, step) for _ in range(100)]
    drafters = [plan.drafter for plan in plans if plan is not None]
    assert drafters[0] is world.head
    assert block in drafters[10:]


def test_prompts_of_a_crowd_for_which_drafts_could_not_pay_are_not_read_along() -> None:
    world = on_h200(8, draft=4e-3)
    world.head.most, kept = 8, []
    for number in range(24):
        world.gain(40)
        world.admit(number % 8)
        kept.append(world.card.keeps_hidden)
    assert world.head.rounds == 0
    assert sum(kept) <= 1, "not after the first verdict"


def test_a_drafter_that_lost_reads_the_end_of_a_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world, read = on_h200(), list[int]()
    collect = world.head.collect

    def counted(slot: int, start: int, rows: Any, most: int) -> None:
        read.append(len(rows))
        collect(slot, start, rows, most)

    monkeypatch.setattr(world.head, "collect", counted)

    def rows_read() -> int:
        """Number of rows that are read of a prompt of 300 tokens."""
        read.clear()
        one = world.newcomer(0)
        one.tokens[:] = range(300)
        with monkeypatch.context() as patch:
            patch.setattr(world, "newcomer", lambda _: one)
            world.admit(0)
        world.speculator.catch_up()
        return sum(read)

    assert rows_read() == 300
    world.head.right = 0.0
    world.gain(1500)  # it lost
    assert rows_read() <= COLLECT
    world.head.right = 1.0
    world.gain(1500)
    assert rows_read() == 300


@pytest.mark.parametrize(("match", "drafts"), [(15, False), (17, True)])
def test_a_text_that_is_copied_does_not_wait_for_matches_by_chance(match: int, drafts: bool) -> None:
    world = World(ngram=True)
    world.head.right = 0.0
    world.gain(100)
    for kind in ("match-3", "match-6"):
        for _ in range(60):
            world.policy.add(world.ngram, kind, 1, 1, 1.0)  # far longer than a step
        assert world.policy.record(world.ngram, kind, 1).cooldown.left(world.policy.now) > 500
    [one] = world.sequences
    copied = [*range(10**6, 10**6 + match)]
    one.tokens += [*copied, *range(10**6 + 500, 10**6 + 600), *copied]
    one.computed = len(one.tokens) - 1
    draft = max((world.propose().chunks[0].draft for _ in range(SPARSE)), key=len)
    assert [*draft] == ([*range(10**6 + 500, 10**6 + 500 + len(draft))])
    assert bool(draft) is drafts


def test_what_loses_by_its_results_is_given_up_for_longer_each_time() -> None:
    policy, head = Policy(card_times()), stand_in()
    plain, cooldowns = policy.times.of(1, 1), list[int]()
    for _ in range(4):
        steps = 0
        while not policy.cooldown(head, 1):
            policy.add(head, "sure", 1, 1, 3 * plain)
            steps += 1
        assert steps < 20
        assert not policy.cooldown(head, 8), "crowds are judged apart"
        cooldowns.append(policy.cooldown(head, 1))
        policy.now += cooldowns[-1]
    assert cooldowns == sorted(cooldowns)
    assert cooldowns[-1] > 4 * cooldowns[0]


def test_what_pays_goes_on() -> None:
    policy, head = Policy(card_times()), stand_in()
    for _ in range(200):
        policy.add(head, "sure", 1, 2, 1.9 * policy.times.of(1, 1))
        assert not policy.cooldown(head, 1)


def test_who_has_no_draft_costs_the_others_a_pass() -> None:
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 64, 256):
        times.add(1, rows, 1e-3 * (4 + 0.1 * rows))
    assert times.passes([64, 1]) == pytest.approx(1e-3 * (4 + 0.2) + 1e-3 * (4 + 6.3))
    drafter = stand_in()
    option = Option(drafter, ["sure", *[""] * 7], [3] + [0] * 7)
    assert Policy(times).choose([option], Step([1] * 8, 999, 999)) is None
    alone = Policy(times).choose([Option(drafter, ["sure"], [3])], Step([1], 999, 999))
    assert alone is not None
    assert alone.lengths == [3]
