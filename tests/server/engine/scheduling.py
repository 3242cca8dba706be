"""A scheduler with a simulated model, for the tests of its policies."""

from typing import Any, cast

from qwen_serve.llamacpp import Context
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.prefill_budget import PrefillBudget
from qwen_serve.server.engine.prefix_cache import PrefixCache
from qwen_serve.server.engine.request import Request, SchedulingParams
from qwen_serve.server.engine.sampling import Sampler
from qwen_serve.server.engine.scheduler import Scheduler
from qwen_serve.server.engine.states import StateStore
from qwen_serve.server.engine.verification import SampleResult
from tests.server.engine.fake_context import FakeContext


class NoSampler:
    """A sampler that does nothing."""

    horizon = None
    noise = None
    may_force = False

    def validate(self, draft: list[int]) -> list[int]:
        return draft


NO_SAMPLER = cast("Sampler", NoSampler())


def sequence(prompt: int, max_tokens: int = 10, **scheduling: Any) -> Request:
    return Request(list(range(prompt)), max_tokens, NO_SAMPLER, scheduling=SchedulingParams(**scheduling))


def fixed(tokens: int) -> PrefillBudget:
    """A fixed budget of prompt tokens for each step."""
    return PrefillBudget(0.15, tokens, tokens, fixed=tokens)


def store(context: FakeContext, slots: int, n_rollback: int = 0) -> StateStore:
    """A real state store."""
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
    """A scheduler without a prefix cache. By default a batch is one ubatch."""
    states = states or store(FakeContext(cells), slots)
    return Scheduler(
        slots=slots,
        batch_size=batch,
        prefill_budget=fixed(budget),
        ubatch_size=ubatch or batch,
        states=states,
        cache=PrefixCache(states, ids=(), max_cells=0),
        **options,
    )


def used(s: Scheduler) -> int:
    """Number of KV cells in use."""
    return s._states.cells.used  # noqa: SLF001 - the scheduler keeps its store to itself


def commit(s: Scheduler, batch: Batch) -> None:
    """Commit a batch of a model that gives token 7 to every sequence that samples, and accepts all drafts."""
    s.launched(batch)
    s.commit(
        batch,
        [SampleResult([*chunk.draft, 7] if chunk.samples else []) for chunk in batch.chunks],
        [chunk.start + chunk.n_tokens for chunk in batch.chunks],
    )


def advance(s: Scheduler) -> Batch:
    """One step of that model, without drafts."""
    batch = s.schedule()
    commit(s, batch)
    return batch


def counts(batch: Batch) -> list[int]:
    return [chunk.count for chunk in batch.chunks]
