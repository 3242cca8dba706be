"""The rows of one decode, as far as they came back to the host.

What the device leaves open is done here for all rows at once: it finds the best token of each block of a row,
and adds up each block (device_sampler.py). `_Outputs` there says how the figures of a row are laid out.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ggml
from .device_sampler import N_CANDIDATES, DeviceSampler, n_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .device_sampler import DeviceSamplers

    Tokens = npt.NDArray[np.int32]
    Numbers = npt.NDArray[np.float32]


_ITH = {
    "candidates": ggml.sampled_candidates,
    "logits": ggml.sampled_logits,
    "probs": ggml.sampled_probs,
}
"""Where the results of a row's sampler begin."""


NO_LOGITS = (
    "the model computed no usable logits ({}): its weights are damaged, or hold values that are not finite"
)
"""llama.cpp makes zeros of NaN where it quantizes what goes into a product: then all logits are 0."""


def best_tokens(figures: Numbers, blocks: int) -> Tokens:
    """Of BEST's figures [rows, width]: the best token of each row, of several the lowest."""
    n = (figures.shape[1] - blocks) // 2
    tokens, logits = figures[:, :n], figures[:, n : 2 * n]
    best = logits.argmax(axis=1)
    if best.min() >= n - blocks:  # of blocks, which are in order
        found = tokens[np.arange(len(best)), best]
    else:  # an end, which may have no more than the best of a block
        highest = logits.max(axis=1, keepdims=True)
        found = np.where(logits == highest, tokens, np.float32(2**24)).min(axis=1)
    return np.asarray(found, np.int32)


def best_but_ends(figures: Numbers, blocks: int) -> Tokens:
    """The same without the tokens that end a generation."""
    n = (figures.shape[1] - blocks) // 2
    best = figures[:, 2 * n - blocks : 2 * n].argmax(axis=1)
    return np.asarray(figures[np.arange(len(best)), n - blocks + best], np.int32)


def guesses(figures: Numbers, width: int) -> tuple[Tokens, Numbers]:
    """Of GUESS's figures [rows, 3 * blocks]: each row's best token and its probability, if its logits are
    finite. `width` is that of a block."""
    blocks, rows = figures.shape[1] // 3, np.arange(len(figures))
    places, logits, chances = (figures[:, i * blocks : (i + 1) * blocks] for i in range(3))
    best = logits.argmax(axis=1)  # a NaN wins
    highest = logits[rows, best]
    with np.errstate(invalid="ignore"):
        # a block's exponentials come to that of its highest logit, over what this is of them
        total = (np.exp(logits - highest[:, None]) / chances).sum(axis=1)
    return best.astype(np.int32) * width + places[rows, best].astype(np.int32), 1 / total


def log_sums(figures: Numbers) -> Numbers:
    """Of LOGPROBS's figures [rows, 3 * blocks]: each row's logarithm of the sum of its logits' exponentials,
    if they are finite."""
    blocks = figures.shape[1] // 3
    logits, chances = figures[:, blocks : 2 * blocks], figures[:, 2 * blocks :]
    highest = logits.max(axis=1, keepdims=True)  # a NaN wins
    with np.errstate(invalid="ignore"):
        found: Numbers = highest[:, 0] + np.log((np.exp(logits - highest) / chances).sum(axis=1))
    return found


class Rows:
    """Outputs of the last batch, in its order; valid until the next. What a row can tell depends on its kind.

    Not made anew for each batch: `fill` is called after every decode. Nothing is copied.
    """

    def __init__(self, context: int, n_vocab: int, n_real: int) -> None:
        """`n_real` of the `n_vocab` tokens are no padding."""
        self._n_vocab, self._n_real = n_vocab, n_real
        self.kinds: Sequence[DeviceSampler] = ()
        """Of each row."""
        self._n_candidates = min(N_CANDIDATES, n_vocab)
        self._blocks = n_blocks(n_vocab)
        self._width = n_vocab // self._blocks
        self._ones = np.ones(self._blocks, np.float32)
        self._context = context
        self._n_figures = {
            DeviceSampler.BEST: 0,
            DeviceSampler.TOP_K: self._blocks,
            DeviceSampler.LOGPROBS: 3 * self._blocks,
            DeviceSampler.GUESS: 3 * self._blocks,
        }
        """Numbers of a row; for BEST, with two for each end of generation, as many as the first came with."""
        self._indices: Sequence[int] = ()
        self._raw: Numbers | None = None
        self._samplers: DeviceSamplers | None = None
        self._reduced = False
        """Whether these two are known yet."""
        self._tokens: list[int] = []
        """The best of each row."""
        self._checks: list[float] = []
        """For each row its probability, or a sum over its logits: finite if the row is usable."""
        self._outputs: dict[str, npt.NDArray[Any]] = {}
        """What was looked at so far, by its name in _ITH."""
        self._candidates: list[tuple[Tokens, Numbers]] = []
        """Of each row, once they were asked for."""

    def fill(
        self,
        kinds: Sequence[DeviceSampler],
        indices: Sequence[int],
        raw: Numbers | None,
        samplers: DeviceSamplers | None = None,
    ) -> Rows:
        """Take over a batch: each row's kind and index in the batch; `raw` logits if the host samples.

        The `samplers` may still have the whole rows that the batch ends with.
        """
        self.kinds, self._indices, self._raw, self._reduced = kinds, indices, raw, False
        self._samplers = samplers
        self._outputs.clear()
        self._candidates = []
        return self

    def __len__(self) -> int:
        return len(self.kinds)

    def logits(self, row: int) -> Numbers:
        """Shape [n_vocab], writable. For ROW. Raises FloatingPointError where they are not finite, or all
        0."""
        logits = self.unchecked(row)
        with np.errstate(invalid="ignore"):
            total = float(logits.sum())
        if not math.isfinite(total):
            raise FloatingPointError(NO_LOGITS.format(f"they add up to {total}"))
        if not logits.any():  # looks no further than the first that is not 0
            raise FloatingPointError(NO_LOGITS.format("all are 0"))
        return logits

    def unchecked(self, row: int) -> Numbers:
        """The same, whatever they are: a drafter with a reduced vocabulary has -inf for all other tokens."""
        whole = self._output("logits", np.float32, row) if self._raw is None else self._raw
        logits: Numbers = whole[row]
        return logits

    def fetch(self, row: int) -> Numbers | None:
        """The whole logits of a row that was sampled on the device, with a copy from there that waits;
        None where the device has them no more, which it has of a call's last pass."""
        return None if self._samplers is None else self._samplers.fetch(row, len(self.kinds))

    def best(self, row: int) -> int:
        """For BEST and GUESS. Raises FloatingPointError when there are no usable logits."""
        self._check(row)
        return self._tokens[row]

    def best_but_end(self, row: int) -> int:
        """The best token that does not end a generation. For BEST. Raises as `best` does."""
        self._check(row)
        return int(best_but_ends(self._of(DeviceSampler.BEST)[row : row + 1], self._blocks)[0])

    def all_best(self) -> list[int] | None:
        """The best token of every row at once; None if a row has another kind, or can not be
        used."""
        if not self.kinds:
            return None
        if self._raw is not None:
            ids = self._raw[:, : self._n_real].argmax(axis=1)
            with np.errstate(invalid="ignore"):
                usable = np.isfinite(self._raw.sum(axis=1)).all()
            # where 0 is the best, the others may be 0, too
            return ids.tolist() if usable and self._raw[np.arange(len(ids)), ids].all() else None
        if max(self.kinds) > DeviceSampler.BEST:
            return None
        self._reduce()
        return self._tokens if all(map(math.isfinite, self._checks)) else None

    def candidates(self, row: int) -> tuple[Tokens, Numbers]:
        """Ids and logits of the best tokens, in no order. For TOP_K and LOGPROBS. Raises as `best` does."""
        self._check(row)
        if not self._candidates:  # for all rows at once, which takes half as long
            n = self._n_candidates
            ids, logits = self._output("candidates", np.int32, row), self._output("logits", np.float32, row)
            self._candidates = list(zip(ids[:, :n], logits[:, :n], strict=True))
        found = self._candidates[row]
        if not self._checks[row] and not found[1].max():  # none is above 0, and they add up to 0
            raise FloatingPointError(NO_LOGITS.format("all are 0"))
        return found

    def log_sum(self, row: int) -> float:
        """What a logit is more than its token's log-probability. For LOGPROBS. Raises as `best` does."""
        self._check(row)
        return self._checks[row]

    def probability(self, row: int) -> float:
        """How likely the best token is. For GUESS."""
        self._reduce()
        return self._checks[row]

    def _check(self, row: int) -> None:
        self._reduce()
        if not math.isfinite(self._checks[row]):
            raise FloatingPointError(NO_LOGITS.format(f"they add up to {self._checks[row]}"))

    def _reduce(self) -> None:
        """Finish what the device left open, for all rows with figures, once for a batch."""
        if self._reduced:
            return
        n = len(self.kinds)
        self._tokens, self._checks, self._reduced = [0] * n, [math.nan] * n, True
        for kind in self._n_figures:
            count = self.kinds.count(kind)
            if count == n:
                self._tokens, self._checks = self._finish(kind, self._of(kind))
            elif count:  # the other rows' memory holds anything
                rows = [row for row in range(n) if self.kinds[row] is kind]
                tokens, checks = self._finish(kind, self._of(kind)[rows])
                for row, token, check in zip(rows, tokens, checks, strict=True):
                    self._tokens[row], self._checks[row] = token, check

    def _finish(self, kind: DeviceSampler, figures: Numbers) -> tuple[list[int], list[float]]:
        if kind is DeviceSampler.GUESS:
            tokens, chances = guesses(figures, self._width)
            return tokens.tolist(), chances.tolist()
        if kind is DeviceSampler.LOGPROBS:
            blocks = self._blocks
            sums, best, chances = log_sums(figures), figures[:, blocks : 2 * blocks], figures[:, 2 * blocks :]
            nothing = ~best.any(axis=1) & np.isclose(chances * self._width, 1, rtol=1e-5).all(axis=1)
            sums[nothing] = np.nan  # all are 0
            return [0] * len(figures), sums.tolist()
        # times 1 and added up: `sum` takes longer, and warns of what may be in there
        checks: list[float] = figures[:, -self._blocks :].dot(self._ones).tolist()
        if kind is not DeviceSampler.BEST:
            return [0] * len(figures), checks
        if 0.0 in checks:
            half = (figures.shape[1] - self._blocks) // 2
            highest = figures[:, half : 2 * half].max(axis=1)
            checks = [check if check or top else math.nan for check, top in zip(checks, highest, strict=True)]
        return best_tokens(figures, self._blocks).tolist(), checks

    def _of(self, kind: DeviceSampler) -> Numbers:
        """The figures of a kind of rows, of which there must be one: shape [rows, figures]."""
        row = self.kinds.index(kind)
        if not self._n_figures[kind]:
            self._n_figures[kind] = int(ggml.n_sampled_probs(self._context, self._indices[row]))
        figures: Numbers = self._output("probs", np.float32, row)[:, : self._n_figures[kind]]
        return figures

    def _output(self, name: str, dtype: Any, row: int) -> npt.NDArray[Any]:
        """One of the arrays that llama.cpp copies the results of samplers to: shape [rows, n_vocab]. `row`
        has something in it, from which its place is found."""
        if (found := self._outputs.get(name)) is None:
            address = int(_ITH[name](self._context, self._indices[row])) - 4 * self._n_vocab * row
            found = self._outputs[name] = matrix(address, len(self._indices), self._n_vocab, dtype)
        return found


def matrix(address: int, rows: int, width: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """llama.cpp's own memory, of 4 bytes a number: shape [rows, width]."""
    memory = (ctypes.c_char * (4 * rows * width)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype).reshape(rows, width)
