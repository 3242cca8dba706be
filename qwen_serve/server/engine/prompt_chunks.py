"""Chooses the chunks of prompts that a step reads."""

from collections.abc import Sequence

from .batch import Batch
from .prefill_budget import PrefillBudget
from .prefix_cache import PrefixCache
from .reproducible import Reproducible
from .request import PREFILL, Adapters, Request
from .scheduling_policy import Policy
from .states.cells import CellAllocator
from .ubatches import usual_pass


class PromptChunks:
    """Divides a step's tokens among prompts: half for the prompt that arrived first, half for those closest
    to their first output token. The scheduler's docstring says why."""

    def __init__(
        self,
        running: Sequence[Request],
        policy: Policy,
        cache: PrefixCache,
        cells: CellAllocator,
        *,
        batch_size: int,
        ubatch_size: int,
        scored_rows: int,
    ) -> None:
        """`running` is in order of admission. A step has at most `scored_rows` prompt tokens whose rows of
        logits are kept."""
        self._running, self._policy, self._cache = running, policy, cache
        self._cells = cells
        self._batch_size, self._ubatch_size, self._scored_rows = batch_size, ubatch_size, scored_rows
        self._usual = usual_pass(ubatch_size)
        self._oldest_is_due = False

    def add(
        self,
        batch: Batch,
        adapters: Adapters,
        prefill_budget: PrefillBudget,
        reproducible: Reproducible | None,
    ) -> None:
        """Add chunks of prompts: at most a ubatch, as many tokens as there are free cells and, while answers
        are running, the budget.

        A chunk ends where a checkpoint is wanted.
        """
        prompts = [one for one in self._running if one.status is PREFILL and one.adapters == adapters]
        prompts = [one for one in prompts if not one.ready]
        if not prompts:
            return
        prompts = [one for one in prompts if one.reads_picture is prompts[0].reads_picture]
        decoding = any(one.ready for one in self._running)
        budget = min(self._ubatch_size, prefill_budget.tokens) if decoding else self._ubatch_size
        if reproducible is not None and reproducible.chunk > 1:
            self._add_pieces(batch, prompts, reproducible, budget)
            return
        most = self._batch_size if reproducible is None else reproducible.together - 1
        rows = self._scored_rows
        for sequence, count in self._divide(min(most, budget), prompts).items():
            fitting = min(count, self._cells.available - batch.n_tokens, sequence.pending_with(rows))
            if fitting > 0:
                self._cache.make_room(batch.n_tokens + fitting)
                batch.add(sequence, fitting)
                rows -= len(batch.chunks[-1].scored)

    def _add_pieces(self, batch: Batch, prompts: list[Request], how: Reproducible, budget: int) -> None:
        """Add the next piece of the oldest prompt or, alternately, of the shortest one, and the pieces that
        may share its pass. A prompt that wants log-probabilities is also cut where their rows end, and shares
        no pass."""
        self._oldest_is_due = not self._oldest_is_due
        first = prompts[0] if self._oldest_is_due else min(prompts, key=lambda one: one.pending)
        if first.reads_all:
            piece = min(first.pending_alike, how.chunk - first.computed % how.chunk)
            batch.add(first, min(piece, first.pending_with(self._scored_rows)))
            return
        plain = [one for one in prompts if not one.reads_all]
        pieces = {one: min(one.pending_alike, how.chunk - one.computed % how.chunk) for one in plain}
        for one in sorted(how.group(first, pieces, budget), key=lambda one: one.slot or 0):
            batch.add(one, pieces[one])

    def _divide(self, budget: int, prompts: list[Request]) -> dict[Request, int]:
        """How many tokens of each prompt to read: half for the oldest, half for those with fewer pending.

        If not all fit into one pass, it has the usual number of tokens.
        Without the patch ragged-passes each distinct length costs a pass. So besides the oldest prompt at
        most one is read in part, and none gets only a few tokens.
        """
        wanted = {sequence: self._until_cut(sequence) for sequence in prompts}
        if sum(wanted.values()) > self._ubatch_size:
            budget = min(budget, self._usual)
        oldest, least = prompts[0], budget // 8
        counts = dict.fromkeys(prompts, 0)
        counts[oldest] = min(wanted[oldest], -(-budget // 2))
        budget -= counts[oldest]
        nearest = self._policy.nearest(prompts[1:])
        shorter = [sequence for sequence in nearest if sequence.pending < oldest.pending]
        for i, sequence in enumerate(shorter):
            if budget < wanted[sequence] and (i or budget < least):
                break
            counts[sequence] = min(wanted[sequence], budget)
            budget -= counts[sequence]
        more = min(wanted[oldest] - counts[oldest], budget)
        counts[oldest] += more
        budget -= more
        for sequence in nearest:
            if not counts[sequence] and (budget >= wanted[sequence] or budget > least):
                counts[sequence] = min(wanted[sequence], budget)
                budget -= counts[sequence]
        return counts

    def _until_cut(self, sequence: Request) -> int:
        cut = self._cache.next_checkpoint(sequence)
        until = sequence.pending_alike
        until = until if cut is None else min(until, cut - sequence.computed)
        return min(until, sequence.pending_with(self._scored_rows))
