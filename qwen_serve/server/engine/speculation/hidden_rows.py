"""Keeps hidden rows of the trunk's batches, and passes them to the drafters that read them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .hidden import HiddenDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.batch import Batch
    from qwen_serve.server.engine.request import Request
    from qwen_serve.server.engine.states import StateStore
    from qwen_serve.server.engine.verification import SampleResult

    from .health import DrafterHealth
    from .policy import Policy

    Rows = npt.NDArray[Any]

COLLECT = 16
"""Hidden rows are collected from this many steps before a drafter's next draft, since its drafts are better
after some text. Collecting stops only in cooldowns at least twice as long, because each change builds a
graph."""


class HiddenRows:
    """Collects hidden rows of the trunk's batches for drafters, for slots below `slots`."""

    def __init__(
        self,
        context: Context,
        states: StateStore,
        drafters: Sequence[DrafterHealth],
        policy: Policy,
        slots: int,
    ) -> None:
        self._context, self._states, self._policy, self._slots = context, states, policy, slots
        self._readers = [(one, one.drafter) for one in drafters if isinstance(one.drafter, HiddenDrafter)]
        self.drafters = [reader for _, reader in self._readers]
        self.collects = bool(self._readers)
        """Whether batches keep hidden rows, which needs another graph."""
        if self.collects:
            self._keep(True)

    def choose(self, n: int, cooldown: Callable[[DrafterHealth, int], int]) -> None:
        """Keep hidden rows if a drafter that reads them drafts soon for `n` sequences; else stop. `cooldown`:
        steps until a drafter may draft again."""
        soon = 2 * COLLECT if self.collects else COLLECT
        collects = any(n <= reader.most and cooldown(health, n) <= soon for health, reader in self._readers)
        if collects is not self.collects:
            self._states.deferred.clear_up()  # the next batch may overwrite the present rows
            self.collects = collects
            self._keep(collects)
            if not collects:
                for health, reader in self._readers:
                    health.call(None, reader.pause)

    def kinds(self, n: int) -> list[str]:
        """The kinds of drafts for which rows are kept now, with `n` sequences in the batch."""
        return [kind for one in self.drafters if self.collects and n <= one.most for kind in one.kinds]

    def _keep(self, keep: bool) -> None:
        if any(not reader.layers for reader in self.drafters):
            self._context.keep_hidden(keep)
        for reader in self.drafters:
            if reader.layers:
                self._context.keep_layers(reader.layers, keep)

    def rolled_back(self, slot: int, held: int) -> None:
        """Tell the drafters that a slot was rolled back to its first `held` tokens."""
        for health, reader in self._readers:
            self._states.deferred.in_turn(partial(health.call, None, reader.rolled_back, slot, held))

    def collect(self, batch: Batch, sampled: Sequence[SampleResult], n_alive: int) -> None:
        """Pass the hidden rows of a batch's accepted tokens to the drafters, while `n_alive` sequences
        run."""
        for health, reader in self._readers:
            if n_alive <= reader.most:  # a drafter for fewer sequences is idle
                self._collect(health, reader, batch, sampled)

    def _collect(
        self, health: DrafterHealth, reader: HiddenDrafter, batch: Batch, sampled: Sequence[SampleResult]
    ) -> None:
        """Pass hidden rows of accepted tokens to one drafter. Rows of prompts are read later, so that they
        delay neither the rest of the prompt nor its first token. Other rows are read now, because the host
        waits for the device anyway."""
        wanted: list[tuple[int, int, Rows | Callable[[], Rows]]] = []
        on_host: list[int] = []
        try:
            reach = self._reach(health, reader, len(batch.chunks))
            for chunk, placement, new in zip(batch.chunks, batch.placements, sampled, strict=True):
                slot, right = chunk.sequence.slot, chunk.count + new.accepted
                if slot is None or slot >= self._slots:
                    continue
                if not (reader.layers or _may_draft(chunk.sequence)):
                    continue  # copying to the host would make the next prompt wait for the device
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

    def _reach(self, health: DrafterHealth, reader: HiddenDrafter, n: int) -> int:
        """Number of each sequence's newest tokens that a drafter reads, with `n` sequences in the batch. It
        is small after drafting did not pay, since most retries fail."""
        return min(COLLECT, reader.window) if self._policy.cooldown(health.drafter, n) else reader.window

    def _rows(
        self, reader: HiddenDrafter, n_tokens: int, batch_indices: list[int]
    ) -> Rows | Callable[[], Rows]:
        """The rows at `batch_indices` of the last batch, which has `n_tokens` tokens: their places on the
        device, or a function that returns them when they are computed."""
        context = self._context
        if not reader.layers:
            return lambda: context.hidden(n_tokens)[batch_indices]  # a copy: llama.cpp owns these rows
        if context.ring is None:
            return partial(context.layer_inputs, reader.layers, batch_indices)
        return context.layer_inputs(reader.layers, batch_indices)  # places of this batch's rows


def _may_draft(sequence: Request) -> bool:
    """Whether the token limit leaves room for a draft, besides one token of the step before it and one after
    it."""
    return sequence.limit - len(sequence.tokens) > 2


def _read(
    health: DrafterHealth,
    reader: HiddenDrafter,
    wanted: list[tuple[int, int, Rows | Callable[[], Rows]]],
    most: int,
) -> None:
    """Pass rows to a drafter. `wanted`: (slot, first position, rows). After an error the drafter is reset."""
    try:
        for slot, start, rows in wanted:
            reader.collect(slot, start, rows() if callable(rows) else rows, most)
    except Exception as error:
        health.begin_anew(error)
