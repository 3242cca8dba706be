"""What the policy chooses for many requests at once, beside the best fixed depths, found by trying all.

Steps take what they take on an H200 (synthetic 4B in Q4_K_M), by a clock that does not run by itself.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from qwen_serve.server.engine.speculation.policy import Option, Plan, Policy, Step
from tests.marks import slow_but
from tests.server.engine.speculation.card import World

NEAR, LOSS, FIRST = 0.94, 0.98, 0.96
"""Of the tokens a second of the best fixed depths; of those without drafts, at least; and in the first
steps, in which drafts are tried."""

PASS = 0.3e-3
"""Seconds that a pass of the head takes."""

DEPTHS = (0, 1, 2, 3, 4, 6, 8)
"""Tried as fixed depths. The best of them is a little better than it is, since luck differs."""

SETTLED, MEASURED = 300, 300
"""Steps until the load is known, and those that are measured, of 16 sequences; fewer have more."""


def h200(n: int, length: float) -> float:
    """By rows alone."""
    rows = n * length
    known = np.interp(rows, (1, 8, 16, 32, 64, 128), (2.2, 3.6, 5.0, 7.0, 11.0, 15.0))
    return 1e-3 * (float(known) + max(0.0, rows - 128) / 16)


class Fixed(Policy):
    """Always drafts as many tokens for a sequence as `depth` says, by its slot."""

    depth: Callable[[int], int]

    def cooldown(self, _drafter: object, _n: int) -> int:
        return 0

    def choose(self, options: Sequence[Option], step: Step) -> Plan | None:
        [option] = options
        lengths = [self.depth(slot) for slot in range(len(step.pending))]
        return Plan(option.drafter, lengths) if any(lengths) else None


def world(n: int, rights: Sequence[float], build: float) -> World:
    """`rights` are the chances of the sequences in turn."""
    made = World(n, table=h200, ragged=True, slots=64, draft=PASS, build=build, snapshots=8)
    made.head.most = 64
    made.rights = {slot: rights[slot % len(rights)] for slot in range(n)}
    return made


def best_fixed(n: int, rights: Sequence[float], build: float) -> float:
    """The gain of the best of all depths, each kind of sequence with its own."""
    gains = []
    for depths in itertools.product(DEPTHS, repeat=len(rights)):
        one = world(n, rights, build)
        policy = Fixed(one.policy.times)
        policy.depth = lambda slot, depths=depths: depths[slot % len(depths)]  # type: ignore[misc]
        one.speculator._policy = policy  # noqa: SLF001 - no setting drafts a fixed number of tokens
        gains.append(one.gain(MEASURED * 16 // min(n, 16) // 2))
    return max(gains)


LOADS: list[tuple[int, tuple[float, ...]]] = [
    *itertools.product((1, 8, 16, 32, 64), ((0.92,), (0.7,), (0.4,), (0.05,))),
    (8, (0.92, 0.05)),
    (16, (0.92, 0.05)),
    (32, (0.9, 0.3)),
]


@pytest.mark.parametrize(("n", "rights"), slow_but([(8, (0.92,)), (8, (0.05,)), (16, (0.92, 0.05))], LOADS))
@pytest.mark.parametrize("build", [0.0, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_it_comes_near_the_best_depths(n: int, rights: tuple[float, ...], build: float) -> None:
    one = world(n, rights, build)
    turns = 16 // min(n, 16)
    begin = one.gain(SETTLED * turns)
    gain, best = one.gain(MEASURED * turns), best_fixed(n, rights, build)
    print(f"{n} {rights} {build}: {gain:.3f} of {best:.3f}, {begin:.3f} at first")
    assert gain > NEAR * best
    assert gain > LOSS
    assert begin > FIRST


def test_those_whose_drafts_are_wrong_do_not_draft_beside_those_whose_are_right() -> None:
    one = world(16, (0.92, 0.05), 0.0)
    one.gain(SETTLED)
    drafted = [0, 0]
    for _ in range(100):
        batch = one.propose()
        for chunk in batch.chunks:
            drafted[(chunk.sequence.slot or 0) % 2] += len(chunk.draft)
        one.speculator.abandon()
        batch.drop_drafts()
        one.step()
    assert drafted[0] > 20 * drafted[1]
