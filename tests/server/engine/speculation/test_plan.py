"""Plans on a made-up card: drafting where it pays, as far as it pays, and not where it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.speculation.eager import Eager
from server.engine.speculation.plan import Candidate, Planner
from server.engine.speculation.times import DraftTimes, StepTimes

NOTHING = np.zeros(0)


def candidate(pending: int = 1, ngram: float = 0, n: int = 0, mtp: float = 0, depth: int = 0) -> Candidate:
    return Candidate(pending, np.full(n, ngram), (mtp,) * depth)


def planner(weights: float = 4.0, row: float = 0.1, draft: float = 0.5) -> Planner:
    """Milliseconds for the weights, for a row, for a draft."""
    times, drafts = StepTimes(), DraftTimes()
    for rows in (1, 2, 4, 8, 16, 64, 256):
        times.add(1, rows, 1e-3 * (weights + row * rows))
    drafts.add(1, 1e-3 * draft)
    return Planner(times, drafts)


def test_nothing_to_draft_from() -> None:
    plan = planner().choose([candidate(), candidate()], 512)
    assert not plan.drafts
    assert plan.tokens == 2


def test_sure_drafts_are_as_long_as_they_can_be() -> None:
    assert planner().choose([candidate(ngram=0.999, n=127)], 512).lengths == [127]


def test_doubtful_drafts_are_short_and_hopeless_ones_are_none() -> None:
    p = planner()
    lengths = [
        p.choose([candidate(ngram=chance, n=127)], 512).lengths[0] for chance in (0.01, 0.5, 0.9, 0.99)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert 0 < lengths[1] < 8 < lengths[3]


def test_where_a_row_costs_as_much_as_a_step_nothing_is_drafted() -> None:
    assert not planner(weights=0.1, row=4).choose([candidate(ngram=0.9, n=64, mtp=0.9, depth=8)], 512).drafts


def test_the_head_drafts_where_the_text_repeats_nothing() -> None:
    plan = planner().choose([candidate(mtp=0.9, depth=8)], 512)
    assert plan.sources == ["mtp"]
    assert 2 <= plan.lengths[0] <= 8


def test_a_head_that_costs_as_much_as_a_step_does_not_draft() -> None:
    assert not planner(draft=4).choose([candidate(mtp=0.8, depth=8)], 512).drafts


def test_the_free_drafter_is_preferred_where_it_is_as_good() -> None:
    plan = planner().choose([candidate(ngram=0.9, n=64, mtp=0.9, depth=8)], 512)
    assert plan.sources == ["ngram"]


def test_together_they_bring_the_same_number_of_tokens() -> None:
    mixed = [candidate(1, mtp=0.9, depth=8), candidate(3, mtp=0.9, depth=8), candidate(1, ngram=0.95, n=100)]
    plan = planner().choose(mixed, 512)
    assert plan.drafts
    assert len({c.pending + n for c, n in zip(mixed, plan.lengths, strict=True)}) == 1


def test_who_has_no_draft_costs_the_others_a_pass() -> None:
    p = planner(weights=4, row=0.1)
    alone = p.choose([candidate(ngram=0.98, n=3)], 512)
    assert alone.lengths == [3]
    assert not p.choose([candidate(ngram=0.98, n=3), *[candidate() for _ in range(7)]], 512).drafts
    two_passes = p.choose([candidate(ngram=0.999, n=63), candidate()], 512)
    assert two_passes.lengths == [63, 0]
    assert two_passes.seconds == pytest.approx(1e-3 * (4 + 0.2) + 1e-3 * (4 + 6.3))


def test_a_crowd_is_not_slowed_down() -> None:
    crowd = [candidate(mtp=0.6, depth=8) for _ in range(64)]
    assert not planner(weights=4, row=1).choose(crowd, 512).drafts


@pytest.mark.parametrize("others", [0, 2])
def test_redoing_what_was_right_is_part_of_the_price(others: int) -> None:
    times, drafts = StepTimes(), DraftTimes()
    for rows in (1, 8, 64):
        times.add(1, rows, 1e-3 * (4 + 0.4 * rows))
    mix = [candidate(8, ngram=0.8, n=64), *[candidate(8, ngram=0.8, n=64) for _ in range(others)]]
    asked = Planner(times, drafts).choose(mix, 512).lengths[0]

    class Free(Planner):
        def _redo(self, survive: Any, pending: int, n: int) -> Any:
            return np.zeros(len(survive))

    assert asked < Free(times, drafts).choose(mix, 512).lengths[0]


@settings(max_examples=60, deadline=None)
@given(
    mix=st.lists(
        st.builds(
            candidate,
            pending=st.integers(1, 20),
            ngram=st.floats(0.01, 1),
            n=st.integers(0, 255),
            mtp=st.floats(0.01, 1),
            depth=st.integers(0, 8),
        ),
        min_size=1,
        max_size=10,
    ),
    room=st.integers(0, 400),
)
def test_plans_keep_to_what_there_is(mix: list[Candidate], room: int) -> None:
    rows = sum(c.pending for c in mix) + room
    for chooser in (planner(), Eager()):
        plan = chooser.choose(mix, rows)
        assert sum(c.pending for c in mix) + sum(plan.lengths) <= max(rows, sum(c.pending for c in mix))
        for c, source, length in zip(mix, plan.sources, plan.lengths, strict=True):
            assert length <= {"": 0, "ngram": len(c.ngram), "mtp": len(c.mtp)}[source]
        if plan.drafts:
            floors = chooser.floors(plan, [c.pending for c in mix])
            assert len(floors.keep) == len(floors.go_on) >= max(plan.lengths)
            assert all(go >= keep >= 0 for go, keep in zip(floors.go_on, floors.keep, strict=True))


def test_planning_follows_corrected_times() -> None:
    times, drafts = StepTimes(), DraftTimes()
    for rows in (1, 8, 64):
        times.add(1, rows, 1e-3 * (4 + 0.1 * rows))
    p, one = Planner(times, drafts), [candidate(ngram=0.9, n=63)]
    assert p.choose(one, 512).drafts
    for _ in range(200):
        for rows in (2, 4, 8, 16, 64):
            times.add(1, rows, 4e-3 * rows)
        times.add(1, 1, 4e-3)
    for _ in range(40):
        plan = p.choose(one, 512)
    assert not plan.drafts
    assert plan.seconds == pytest.approx(4e-3, rel=0.05)
