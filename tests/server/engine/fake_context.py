"""A context without llama.cpp, which simulates its contents and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.row_results import NO_LOGPROBS, RowResult, Status
from qwen_serve.llamacpp.row_sampler import RowRequest


@dataclass(frozen=True)
class Copy:
    """A copy of a sequence on the host, with one byte for each token."""

    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


class FakeResults:
    """Results of requests for rows: each chooses the token that was read plus one."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.statuses = tokens, [Status.OK] * len(tokens)

    def __getitem__(self, i: int) -> RowResult:
        return RowResult(self.tokens[i], *NO_LOGPROBS, Status.OK, 0)


class FakeRowSteps:
    """Samples rows of a FakeContext, once for each batch."""

    def __init__(self, context: FakeContext) -> None:
        self._context = context
        self._indices: list[int] = []
        self.begun: list[tuple[int, bool]] = []
        """For each call the number of requests, and whether it came after the batch."""

    def begin(self, requests: Sequence[RowRequest], indices: Sequence[int], *, now: bool) -> None:
        assert len(requests) == len(indices)
        self._indices = list(indices)
        self.begun.append((len(requests), now))

    def results(self) -> FakeResults:
        context = self._context
        assert set(self._indices) <= set(np.flatnonzero(context.outputs[: context.decodes[-1]]).tolist())
        return FakeResults([int(context.tokens[index]) + 1 for index in self._indices])

    n_in_order = 0
    outlive_batches = True


class FakeContext:
    """The tokens of each sequence id, as llama.cpp would hold them. Fails if a token would be overwritten."""

    def __init__(self, n_ctx: int = 1000, *, n_ubatch: int | None = None) -> None:
        self.n_ctx = self.n_batch = self.n_ctx_seq = n_ctx
        self.unified = True
        self.n_ubatch = n_ubatch or n_ctx
        self.n_snapshots, self.n_operands, self.operand_sequences = 0, 0, 0
        self.ragged_passes = False
        self.held: dict[int, tuple[int, ...]] = {}
        self.removed: list[int] = []
        """Sequence ids that were emptied."""
        self.fails_to_save = self.fails_to_restore = False

        self.tokens, self.positions, self.sequences = np.zeros((3, n_ctx), np.int32)
        self.outputs = np.zeros(n_ctx, np.int8)
        self.row_steps = FakeRowSteps(self)
        self.decodes: list[int] = []
        """Tokens of each batch."""
        self.runs_ahead = False

    # --- states --------------------------------------------------------------------------------------------

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

    def wait(self) -> None: ...

    def clear(self, *, data: bool) -> None:
        """Cells are only cleared if no sequence has any."""
        assert data
        assert not self.held

    # --- decoding ------------------------------------------------------------------------------------------

    def decode(
        self, n_tokens: int, *, of_pictures: bool = False, next_rows: None = None, sampled_by: None = None
    ) -> None:
        assert not of_pictures
        assert next_rows is sampled_by is None
        for slot, position, token in zip(
            self.sequences, self.positions, self.tokens[:n_tokens], strict=False
        ):
            held = self.held.get(int(slot), ())
            assert len(held) == position, "a gap"
            self.held[int(slot)] = (*held, int(token))
        self.decodes.append(n_tokens)

    def in_one_pass(self, sequences: Sequence[int]) -> bool:
        return True
