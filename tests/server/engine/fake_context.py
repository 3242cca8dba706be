"""A context without llama.cpp, which simulates its contents and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qwen_serve.llamacpp import DeviceSampler
from qwen_serve.llamacpp.errors import LlamaError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Copy:
    """A copy of a sequence on the host, with one byte for each token."""

    tokens: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return len(self.tokens)


@dataclass
class FakeRows:
    """Rows whose best token is the one that was read plus one."""

    best_tokens: list[int]
    kinds: list[DeviceSampler]
    together: bool = True
    """Whether the best of all rows can be told at once."""

    def __len__(self) -> int:
        return len(self.best_tokens)

    def all_best(self) -> list[int] | None:
        return self.best_tokens if self.together else None

    def best(self, row: int) -> int:
        return self.best_tokens[row]


class FakeDeviceSamplers:
    """Records the device sampler of each slot."""

    def __init__(self, n: int) -> None:
        self.active = n > 0
        self.kinds = [DeviceSampler.BEST] * n


class FakeContext:
    """The tokens of each sequence id, as llama.cpp would hold them. Fails if a token would be overwritten."""

    def __init__(self, n_ctx: int = 1000, *, n_ubatch: int | None = None, n_samplers: int = 0) -> None:
        self.n_ctx = self.n_batch = self.n_ctx_seq = n_ctx
        self.unified = True
        self.n_ubatch = n_ubatch or n_ctx
        self.n_snapshots, self.ragged_passes = 0, False
        self.held: dict[int, tuple[int, ...]] = {}
        self.removed: list[int] = []
        """Sequence ids that were emptied."""
        self.fails_to_save = self.fails_to_restore = False

        self.tokens, self.positions, self.sequences = np.zeros((3, n_ctx), np.int32)
        self.outputs = np.zeros(n_ctx, np.int8)
        self.samplers = FakeDeviceSamplers(n_samplers)
        self.decodes: list[int] = []
        """Tokens of each batch."""
        self.rows_come_together = True
        self.runs_ahead, self.most_ahead = False, 0

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

    # --- decoding ------------------------------------------------------------------------------------------

    def set_sampler(self, sequence: int, kind: DeviceSampler) -> None:
        self.samplers.kinds[sequence] = kind

    def decode(
        self, n_tokens: int, *, of_pictures: bool = False, next_rows: None = None, keep: bool = False
    ) -> None:
        assert not of_pictures
        assert next_rows is None
        for slot, position, token in zip(
            self.sequences, self.positions, self.tokens[:n_tokens], strict=False
        ):
            held = self.held.get(int(slot), ())
            assert len(held) == position, "a gap"
            self.held[int(slot)] = (*held, int(token))
        self.decodes.append(n_tokens)

    def in_one_pass(self, sequences: Sequence[int]) -> bool:
        return True

    def outputs_ahead(self) -> None:
        """None, since rows are read before the next batch."""

    def rows(
        self, sequences: Sequence[int], indices: Sequence[int], ahead: None = None, *, chosen: bool = False
    ) -> FakeRows:
        n = self.decodes[-1]
        assert list(indices) == np.flatnonzero(self.outputs[:n]).tolist(), "llama.cpp's order is another"
        assert list(sequences) == self.sequences[list(indices)].tolist()
        kinds = [self.samplers.kinds[slot] for slot in sequences] if self.samplers.active else []
        best = [int(self.tokens[index]) + 1 for index in indices]
        return FakeRows(best, kinds or [DeviceSampler.ROW] * len(best), self.rows_come_together)
