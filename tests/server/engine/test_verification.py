"""From rows to tokens: whose row is whose, what is accepted of a draft, and whose sampler fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from server.engine.batch import Batch
from server.engine.runner import Runner
from server.engine.profile import StepProfile
from server.engine.sequence import Sequence
from server.engine.verification import sample
from tests.server.engine.fake_llama import FillingContext

if TYPE_CHECKING:
    from server.engine.llama import Context, Rows
    from server.engine.sampling import Sampler

ENDS = frozenset({99})


class FakeSampler:
    """Takes what the row says, like the greedy one, and may need more than that, or fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.asked = 0

    def sample(self, rows: FakeRows, row: int) -> int:
        self.asked += 1
        if self.fails:
            raise FloatingPointError("not a number")
        return rows.best[row]


class FakeRows:
    """The best token of each row, in the order in which llama.cpp computes them."""

    def __init__(self, best: list[int], *, together: bool = True) -> None:
        self.best, self._together = best, together

    def all_best(self) -> list[int] | None:
        return self.best if self._together else None


def batch_of(*parts: tuple[int, int, list[int]], **how: Any) -> Batch:
    """Chunks of so many pending tokens, of which so many are read, with drafts; filled by a real runner."""
    batch = Batch()
    for slot, (pending, count, draft) in enumerate(parts):
        one = Sequence(list(range(100 * slot, 100 * slot + pending)), 50, cast("Sampler", FakeSampler(**how)))
        one.slot = slot
        batch.add(one, count)
        if draft:
            batch.add_draft(batch.chunks[-1], draft, "me")
    Runner(cast("Context", FillingContext()), StepProfile())._fill(batch)
    return batch
