"""A scheduler over a pretend model: what the tests of its policies share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from server.engine.errors import LlamaError
from server.engine.prefix_cache import PrefixCache
from server.engine.sampling import Sampler
from server.engine.scheduler import Scheduler
from server.engine.sequence import Sequence
from server.engine.states import StateStore

if TYPE_CHECKING:
    from server.engine.batch import Batch
    from server.engine.llama import Context

NO_SAMPLER = cast("Sampler", None)


def sequence(prompt: int, max_tokens: int = 10) -> Sequence:
    return Sequence(list(range(prompt)), max_tokens, NO_SAMPLER)


@dataclass(frozen=True)
class Copy:
    """A sequence on the host; a token takes a byte."""

    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


class FakeContext:
    """What llama.cpp would hold: the tokens of each sequence id. Fails where one would be written over."""

    def __init__(self, n_ctx: int = 1000) -> None:
        self.n_ctx = self.n_batch = self.n_ubatch = n_ctx
        self.n_snapshots = 0
        self.held: dict[int, tuple[int, ...]] = {}
        self.removed: list[int] = []
        """Sequence ids that were emptied."""
        self.fails_to_save = self.fails_to_restore = False

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        if start == end == -1:  # else a rollback copy takes the state alone
            assert target not in self.held
            self.held[target] = self.held.get(source, ())

    def remove(self, sequence: int, start: int = -1, end: int = -1) -> bool:
        if start > 0:
            self.held[sequence] = self.held.get(sequence, ())[:start]
        else:
            self.held.pop(sequence, None)
            self.removed.append(sequence)
        return True

    def save(self, sequence: int) -> Copy:
        if self.fails_to_save:
            raise LlamaError("no host memory")
        return Copy(self.held[sequence])

    def restore(self, sequence: int, saved: Copy) -> None:
        assert sequence not in self.held
        self.held[sequence] = saved.tokens[: len(saved.tokens) // 2]  # what a failure leaves behind
        if self.fails_to_restore:
            raise LlamaError("no cells")
        self.held[sequence] = saved.tokens


def store(context: FakeContext, slots: int, n_rollback: int = 0) -> StateStore:
    """A real one."""
    return StateStore(cast("Context", context), slots, range(slots, slots + n_rollback))


def scheduler(
    slots: int = 4,
    cells: int = 1000,
    batch: int = 64,
    budget: int = 16,
    ubatch: int | None = None,
    states: StateStore | None = None,
    **options: Any,
) -> Scheduler:
    """A scheduler without a prefix cache; a batch is one ubatch if nothing else is said."""
    states = states or store(FakeContext(cells), slots)
    return Scheduler(
        slots=slots,
        batch_size=batch,
        prefill_budget=budget,
        ubatch_size=ubatch or batch,
        states=states,
        cache=PrefixCache(states, ids=(), max_cells=0),
        **options,
    )


def used(s: Scheduler) -> int:
    """KV cells in use."""
    return s._states.cells.used


def commit(s: Scheduler, batch: Batch) -> None:
    """A model computed the batch: token 7 for every sequence that samples; drafts were all right."""
    s.reserve(batch)
    s.commit(
        batch,
        [[*chunk.draft, 7] if chunk.samples else None for chunk in batch.chunks],
        [chunk.start + chunk.n_tokens for chunk in batch.chunks],
    )


def advance(s: Scheduler) -> Batch:
    """One step of that model, without drafts."""
    batch = s.schedule()
    commit(s, batch)
    return batch


def counts(batch: Batch) -> list[int]:
    return [chunk.count for chunk in batch.chunks]
