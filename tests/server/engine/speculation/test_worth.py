"""Drafters are judged by what they gave: rests after bad results, longer each time, and new chances."""

from __future__ import annotations

import pytest

from server.engine.speculation.times import StepTimes
from server.engine.speculation.worth import REST_FIRST, TRIALS, Worth

PLAIN = 4e-3


@pytest.fixture
def worth() -> Worth:
    times = StepTimes()
    for n in (1, 2, 4, 8):
        times.add(n, 1, PLAIN)
    worth = Worth(times)
    for drafter in ("mtp", "ngram"):
        for n in (1, 8):
            worth.add(drafter, n, 0, 1.0)  # the first, which does not count
    return worth


def rest(worth: Worth, n: int = 1, drafter: str = "mtp") -> int:
    """Questions until it may draft again."""
    steps = 0
    while not worth.allows(drafter, n):
        steps += 1
    return steps


def test_what_pays_goes_on(worth: Worth) -> None:
    for _ in range(1000):
        worth.add("mtp", 1, 2, 1.5 * PLAIN)
        assert worth.allows("mtp", 1)


def test_what_loses_a_little_is_looked_at_for_a_while(worth: Worth) -> None:
    for _ in range(TRIALS - 1):
        worth.add("mtp", 1, 1, 1.05 * PLAIN)
        assert worth.allows("mtp", 1)
    worth.add("mtp", 1, 1, 1.05 * PLAIN)
    assert rest(worth) == REST_FIRST


def test_what_loses_much_rests_at_once_and_longer_each_time(worth: Worth) -> None:
    for n, drafter, patience in ((1, "mtp", 4), (8, "mtp", 4), (1, "ngram", 6)):
        rests = []
        for seconds, steps in ((1.6 * PLAIN, 6), (3 * PLAIN, patience), (9 * PLAIN, patience)):
            for _ in range(steps):
                assert worth.allows(drafter, n)
                worth.add(drafter, n, n, seconds)
            rests.append(rest(worth, n, drafter))
        assert rests == [REST_FIRST, 4 * REST_FIRST, 16 * REST_FIRST]


def test_drafters_and_crowds_are_judged_apart(worth: Worth) -> None:
    for _ in range(TRIALS):
        worth.add("mtp", 8, 8, 3 * PLAIN)
    assert not worth.allows("mtp", 8)
    assert not worth.allows("mtp", 5)
    assert worth.allows("mtp", 4)
    assert worth.allows("ngram", 8)


def test_plain_steps_are_what_it_is_measured_by(worth: Worth) -> None:
    for _ in range(10):
        worth.add_plain(1, 10 * PLAIN)
    for _ in range(100):
        worth.add("mtp", 1, 1, 5 * PLAIN)
    assert worth.allows("mtp", 1)
