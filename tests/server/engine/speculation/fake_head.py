"""A head's context, pretended: entries by position, and guesses that count on from the token fed."""

from collections.abc import Sequence

import numpy as np

from qwen_serve.llamacpp.errors import LlamaError

WIDTH, GUESSED = 3, 1e6
"""Of hidden rows; what is added to a position in a row of the head's own."""


class Recorded:
    """Records what a request's sampler takes and gives back."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.seen: list[list[int]] = []
        """What it had accepted before each choice."""

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def take_back(self, token: int) -> None:
        assert self.accepted.pop() == token


class Head:
    """Keeps each id's entries, position by position, as llama.cpp's cache does."""

    n_batch = n_ubatch = 16

    def __init__(self, *, queues: bool = False) -> None:
        self.queues = queues
        """Whether tokens are read where they were chosen, and hidden rows where they were computed."""
        self.tokens, self.positions = np.zeros(self.n_batch, int), np.zeros(self.n_batch, int)
        self.sequences, self.outputs = np.zeros(self.n_batch, int), np.zeros(self.n_batch, int)
        self.input_hidden = np.zeros((self.n_batch, WIDTH), np.float32)
        self.entries: dict[int, dict[int, tuple[int, float]]] = {}
        self.error: Exception | None = None
        self.error_at = 0
        """Number of a further call that fails; 0: none."""
        self.widths: list[int] = []
        """Of the calls."""
        self._out: dict[int, tuple[int, int]] = {}
        """Token and position of outputs, by index in the batch."""
        self._positions: list[int] = []
        """Of the last batch."""
        self._wanted: list[tuple[int, Recorded | None]] = []
        self._chosen: list[int] = []
        """By request."""
        self._by_pass: list[int] = []
        self._passes = 0
        """Of the last requests."""

    def decode(self, n: int) -> None:
        if self.error is not None:
            raise self.error
        if self.error_at:
            self.error_at -= 1
            if not self.error_at:
                raise LlamaError("failed")
        self._out = {}
        self.widths.append(n)
        for i in range(n):
            mine, position = self.entries.setdefault(int(self.sequences[i]), {}), int(self.positions[i])
            assert not mine or position == max(mine) + 1, "a gap, or an entry twice"
            mine[position] = int(self.tokens[i]), float(self.input_hidden[i, 0])
            if self.outputs[i]:
                self._out[i] = int(self.tokens[i]), position
        self._positions = [int(position) for position in self.positions[:n]]
        self._by_pass += [token + 1 for token, _ in self._out.values()]
        for place, (index, sampler) in enumerate(self._wanted):
            if index // self.n_batch == self._passes:
                self._chosen[place] = self._out[index % self.n_batch][0] + 1
                if sampler is not None:
                    sampler.seen.append([*sampler.accepted])
        self._passes += 1

    def choose(
        self, indices: list[int], samplers: Sequence[Recorded | None] = (), *, now: bool = True
    ) -> None:
        assert not now
        self._wanted = list(zip(indices, samplers, strict=True))
        self._chosen, self._by_pass, self._passes = [-1] * len(indices), [], 0

    def chosen(self) -> list[int]:
        return self._chosen

    def decode_next(self, rows: np.ndarray, hidden: np.ndarray) -> None:
        n, before = len(rows), self._positions
        self.tokens[:n] = [self._by_pass[row] for row in rows]
        self.input_hidden[:n] = [[before[index] + GUESSED] * WIDTH for index in hidden]
        self.decode(n)

    def best(self, rows: list[int], samplers: Sequence[Recorded | None] = ()) -> list[int]:
        assert set(rows) == set(self._out), "outputs of one pass"
        for sampler in samplers:
            if sampler is not None:
                sampler.seen.append([*sampler.accepted])
        return [self._out[i][0] + 1 for i in rows]

    def hidden(self, n: int) -> np.ndarray:
        assert not self.queues
        return np.array([[position + GUESSED] * WIDTH for position in self._positions[:n]], np.float32)

    def copy(self, source: int, target: int, start: int = -1) -> None:
        self.entries[target] = dict(self.entries[source])

    def remove(self, sequence_id: int, start: int = 0, end: int = 2**31) -> None:
        mine = self.entries.get(sequence_id, {})
        self.entries[sequence_id] = {p: entry for p, entry in mine.items() if not start <= p < end}

    def clear(self) -> None:
        self.entries.clear()

    def save(self, sequence_id: int) -> np.ndarray:
        entries = self.entries[sequence_id]
        return np.array([(p, token, row) for p, (token, row) in entries.items()], np.float64)

    def restore(self, sequence_id: int, saved: np.ndarray) -> None:
        if self.error is not None:
            raise self.error
        self.entries[sequence_id] = {int(p): (int(token), float(row)) for p, token, row in saved}

    def check(self, slot: int, text: list[int]) -> None:
        """Every entry is of the text, beside the trunk's row of the token before."""
        for position, entry in self.entries.get(slot, {}).items():
            assert entry == (text[position], position - 1)
