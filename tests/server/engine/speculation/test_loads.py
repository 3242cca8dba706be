"""What the policy chooses for many requests at once, beside the best fixed depth and beside no drafts.

A simulated card takes what an H200 takes (synthetic 4B in Q4_K_M) for plain steps behind each other, for the
head, and for verifications. Every time has noise, some steps are late, and results of plain steps are
collected in pairs. The real speculator and policy decide.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from qwen_serve.server.engine.batch import Batch, Placement
from qwen_serve.server.engine.verification import SampleResult
from tests.marks import slow_but
from tests.server.engine.speculation.card import World

LOADS = (1, 8, 16, 32, 64)
PLAIN, VERIFICATION = (1.91, 2.65, 3.47, 4.58, 7.2), (2.82, 4.66, 6.57, 11.55, 22.5)
"""Milliseconds by LOADS of a plain step, and of one that verifies 5 tokens of each."""

FIRST, FURTHER = (0.48, 0.95, 1.45, 2.5, 4.6), (0.21, 0.33, 0.45, 0.65, 1.1)
"""Milliseconds of the head for the first token of drafts, and for each further one."""

HOST, WAITS = 0.7e-3, 0.3e-3
"""Seconds of the host in each round while the device waits, and in a plain step that is not behind another.
The warm-up does not measure the first."""

LATE, MANY_TIMES = 0.01, 3.0
"""How often a step is late, and how many times as long it takes then."""

GOOD, BAD = 0.915, 0.52
"""Chances of a token for which 3.3 and 1 of 4 are right."""

LEAST = 0.98
"""Of the tokens a second of the better of no drafts and the best depth."""

SETTLED, MEASURED = 100, 2000
"""Steps until a load is known, and steps that are measured."""

CHANGED = 1800
"""Steps after which the policy has noticed that drafts are right again."""


def by_load(values: Sequence[float], n: float) -> float:
    return 1e-3 * float(np.interp(n, LOADS, values))


def table(n: int, length: float) -> float:
    plain = by_load(PLAIN, n)
    return plain + (by_load(VERIFICATION, n) - plain) * (length - 1) / 4


def head(n: int, depth: int) -> float:
    return by_load(FIRST, n) + (depth - 1) * by_load(FURTHER, n)


class Server(World):
    """Launches plain steps behind each other, as the engine does while nobody drafts."""

    def __init__(self, n: int, right: float, seed: int = 0) -> None:
        super().__init__(
            n, table=table, draft=head, deepest=8, build=1e-3, snapshots=8, ragged=True, slots=64, seed=seed
        )
        self.head.most, self.head.right, self.states.operands = 64, right, True
        self._ahead: Batch | None = None
        """The next step, which was launched behind the last one."""
        self._uncollected = 0.0
        """Seconds of a step whose result came with that of the next one."""

    def pace(self, n: int) -> float:
        return table(n, 1)

    def step(self) -> int:
        behind, batch = self._ahead is not None, self._ahead or self.propose()
        started, held_up = self.card.now, 1.0
        sampled = []
        for chunk in batch.chunks:
            right = 0
            chance = self.rights.get(chunk.slot, self.head.right)
            while right < len(chunk.draft) and self.rng.random() < chance:
                right += 1
            sampled.append([*chunk.draft[:right], 10**6])
        drafted = sum(len(chunk.draft) for chunk in batch.chunks)
        self.card.decode(batch)
        self.card.now += HOST if drafted else 0.0 if behind else WAITS
        held_up = self.rng.gauss(1, 0.03) * (MANY_TIMES if self.rng.random() < LATE else 1)
        self.card.now += (held_up - 1) * (self.card.now - started)
        self._ahead = None
        if self.speculator.can_be_overtaken and self.speculator.is_quiet(len(batch.chunks)):
            self._ahead = self._following(batch)
            self.speculator.propose_early(self._ahead)
        since, self.done = self.card.now - self.done, self.card.now
        if behind and self._ahead is not None:  # results come in pairs
            since, self._uncollected = (since + self._uncollected, 0.0) if self._uncollected else (0.0, since)
        held = self.speculator.verify(batch, [*map(SampleResult, sampled)], since)
        for chunk, new, length in zip(batch.chunks, sampled, held, strict=True):
            chunk.sequence.tokens += new
            chunk.sequence.computed = length
        self.tokens += sum(map(len, sampled))
        self.lengths.append(drafted)
        return drafted

    def _following(self, batch: Batch) -> Batch:
        following = Batch(draft_room=2000)
        for chunk in batch.chunks:
            following.add(chunk.sequence, 1)
        following.placements = [Placement([]) for _ in following.chunks]
        return following

    def rate(self, steps: int) -> float:
        started, tokens = self.card.now, self.tokens
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.card.now - started)


def best(n: int, right: float) -> float:
    """Tokens a second of the better of no drafts and the best depth, without a policy."""
    rates = [n / table(n, 1)]
    for depth in range(1, 9):
        tokens = n * sum(right**i for i in range(depth + 1))
        rates.append(tokens / (head(n, depth) + table(n, 1 + depth) + HOST))
    return max(rates) / (1 + LATE * (MANY_TIMES - 1))


CASES = [(n, right) for n in LOADS for right in (GOOD, BAD, 0.0)]


@pytest.mark.parametrize(("n", "right"), slow_but([(1, GOOD), (1, BAD), (8, GOOD), (32, 0.0)], CASES))
def test_it_comes_near_the_better_of_no_drafts_and_the_best_depth(n: int, right: float) -> None:
    one = Server(n, right)
    first, rate = one.rate(SETTLED), one.rate(MEASURED)
    print(f"{n}, {right}: {rate / best(n, right):.3f} of the best, {first / best(n, right):.3f} at first")
    assert rate > LEAST * best(n, right)
    assert one.tokens / one.card.now > LEAST * n / table(n, 1) / (1 + LATE * (MANY_TIMES - 1))


def test_a_few_requests_draft_from_the_first_round_on() -> None:
    for n in (1, 8):
        one = Server(n, GOOD)
        one.rate(50)
        assert all(one.lengths)


def test_a_load_at_which_drafts_lose_is_soon_left_alone() -> None:
    one = Server(32, BAD)
    one.rate(600)
    assert 0 < sum(map(bool, one.lengths)) < 10
    assert not any(one.lengths[10:300])


def test_a_load_at_which_no_draft_can_pay_is_not_even_tried() -> None:
    one = Server(64, GOOD)
    one.rate(200)
    assert not any(one.lengths)
    assert not one.card.keeps_hidden


def test_a_warm_up_that_was_wrong_is_corrected() -> None:
    """Verifications take twice as long as they did then, so that no draft of 32 pays."""
    one = Server(32, GOOD)
    one.card.table = lambda n, length: table(n, length) * (2 if length > 1 else 1)
    one.rate(2000)
    assert one.tokens / one.card.now > LEAST * 32 / table(32, 1) / (1 + LATE * (MANY_TIMES - 1))


@pytest.mark.parametrize("n", slow_but([8], LOADS[:4]))
def test_it_follows_acceptance_that_changes(n: int) -> None:
    one = Server(n, GOOD)
    one.rate(SETTLED)
    for right in (BAD, GOOD):
        one.head.right = right
        one.rate(CHANGED)
        assert one.rate(400) > 0.97 * best(n, right)


def test_those_whose_drafts_are_wrong_do_not_draft_beside_those_whose_are_right() -> None:
    one = Server(16, GOOD)
    one.rights = {slot: GOOD if slot % 2 else 0.0 for slot in range(16)}
    one.rate(300)
    drafted = [0, 0]
    for _ in range(100):
        batch = one.propose()
        for chunk in batch.chunks:
            drafted[chunk.slot % 2] += len(chunk.draft)
        one.speculator.abandon()
        batch.drop_drafts()
        one.step()
    assert drafted[1] > 20 * drafted[0]
