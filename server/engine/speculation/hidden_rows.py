"""Decides which hidden rows are kept, and when drafters read them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .hidden import HiddenDrafter

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as ListLike

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.batch import Batch
    from qwen_serve.server.engine.sampling import SampleResult
    from qwen_serve.server.engine.sequence import Sequence
    from qwen_serve.server.engine.states import StateStore

    from .health import DrafterHealth
    from .policy import Policy

    Rows = npt.NDArray[Any]

COLLECT = 64
"""Hidden rows are collected for a drafter from this many steps before its next draft, since it guesses better
after some text. Collecting stops only in cooldowns twice as long, as each change builds a graph."""


class HiddenRows:
    """Gives hidden rows of the trunk's batches to the drafters that read them, for the first `slots`."""

    def __init__(
        self,
        context: Context,
        states: StateStore,
        drafters: ListLike[DrafterHealth],
        policy: Policy,
        slots: int,
    ) -> None:
        self._context, self._states, self._policy, self._slots = context, states, policy, slots
        self._readers = [(one, one.drafter) for one in drafters if isinstance(one.drafter, HiddenDrafter)]
        self.drafters = [reader for _, reader in self._readers]
        self.collects = bool(self._readers)
        """Whether rows are kept, which takes a graph of its own."""
        if self.collects:
            self._keep(True)

    def choose(self, n: int, cooldown: Callable[[DrafterHealth, int], int]) -> None:
        """Keep rows for `n` sequences, or stop if no drafter that reads them drafts soon."""
        soon = 2 * COLLECT if self.collects else COLLECT
        collects = any(n <= reader.most and cooldown(health, n) <= soon for health, reader in self._readers)
        if collects is not self.collects:
            self._states.deferred.clear_up()  # the next batch may drop the rows there are now
            self.collects = collects
            self._keep(collects)
            if not collects:
                for health, reader in self._readers:
                    health.call(None, reader.pause)

    def _keep(self, keep: bool) -> None:
        if any(not reader.layers for reader in self.drafters):
            self._context.keep_hidden(keep)
        for reader in self.drafters:
            if reader.layers:
                self._context.keep_layers(reader.layers, keep)

    def rolled_back(self, slot: int, held: int) -> None:
        """A slot was rolled back to its first `held` tokens."""
        for health, reader in self._readers:
            self._states.deferred.in_turn(partial(health.call, None, reader.rolled_back, slot, held))

    def collect(self, batch: Batch, sampled: ListLike[SampleResult], n_alive: int) -> None:
        """Give readers the rows of a batch's correct tokens, while `n_alive` sequences run."""
        for health, reader in self._readers:
            if n_alive <= reader.most:  # a drafter that drafts for fewer sequences is idle
                self._collect(health, reader, batch, sampled, n_alive)

    def _collect(
        self,
        health: DrafterHealth,
        reader: HiddenDrafter,
        batch: Batch,
        sampled: ListLike[SampleResult],
        n_alive: int,
    ) -> None:
        """Give a reader the hidden rows of correct tokens. Rows of prompts are read later, so that they delay
        neither the rest of the prompt nor its first token. Others are read now, because the host waits for
        the device anyway."""
        wanted: list[tuple[int, int, Rows | Callable[[], Rows]]] = []
        on_host: list[int] = []
        try:
            reach = self._reach(health, reader, len(batch.chunks), n_alive)
            for chunk, placement, new in zip(batch.chunks, batch.placements, sampled, strict=True):
                slot, right = chunk.sequence.slot, chunk.count + new.accepted
                if slot is None or slot >= self._slots:
                    continue
                if not (reader.layers or _may_draft(chunk.sequence)):
                    continue  # a copy to the host would make the next prompt wait for the device
                if not reader.reads_pictures and chunk.start < chunk.sequence.pictures.end:
                    continue
                left = len(chunk.sequence.tokens) - chunk.start - right
                if left >= reach:
                    continue
                skipped = max(0, right + left - reach)
                batch_indices = placement.batch_indices[skipped:right]
                rows = self._rows(reader, batch.n_tokens, batch_indices)
                wanted.append((slot, chunk.start + skipped, rows))
                if callable(rows):
                    on_host += batch_indices[:1]
        except Exception as error:
            health.begin_anew(error)
            return
        if wanted:
            read = partial(_read, health, reader, wanted, reach)
            if batch.prompt_tokens:
                self._states.deferred.put_off(read, min(on_host, default=None))
            else:
                self._states.deferred.in_turn(read)

    def _reach(self, health: DrafterHealth, reader: HiddenDrafter, n: int, n_alive: int) -> int:
        """How many of the newest tokens of each of `n` sequences a drafter reads: few after a loss, since
        most retries fail. What is copied to the host is shared by the sequences that run."""
        few = min(COLLECT, reader.window)
        if self._policy.lost(health.drafter, n):
            return few
        return reader.window if reader.layers else max(few, reader.window // n_alive)

    def _rows(
        self, reader: HiddenDrafter, n_tokens: int, batch_indices: list[int]
    ) -> Rows | Callable[[], Rows]:
        """The rows at `batch_indices` of the last batch, which has `n_tokens`, for a reader: their places on
        the device, or a call that gets them once they are computed."""
        context = self._context
        if not reader.layers:
            return lambda: context.hidden(n_tokens)[batch_indices]  # a copy: these rows are llama.cpp's
        if context.ring is None:
            return partial(context.layer_inputs, reader.layers, batch_indices)
        return context.layer_inputs(reader.layers, batch_indices)  # places; the next batch has others


def _may_draft(sequence: Sequence) -> bool:
    """Whether the answer has room for a draft: the step's own token comes before it, another behind it."""
    return sequence.limit - len(sequence.tokens) > 2


def _read(
    health: DrafterHealth,
    reader: HiddenDrafter,
    wanted: list[tuple[int, int, Rows | Callable[[], Rows]]],
    most: int,
) -> None:
    """Give a reader rows, each from a position of a slot on. After an error the reader starts again."""
    try:
        for slot, start, rows in wanted:
            reader.collect(slot, start, rows() if callable(rows) else rows, most)
    except Exception as error:
        health.begin_anew(error)
