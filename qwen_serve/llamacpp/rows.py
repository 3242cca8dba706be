"""The rows of one decode that were returned to the host.

The host completes the device's reductions for all rows at once: it finds the best of a row's block maxima,
and adds up the sums of its blocks. `_Outputs` in device_sampler.py describes the layout of a row's figures.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ggml
from .device_sampler import N_CANDIDATES, n_blocks
from .errors import LlamaError
from .needs import DeviceSampler
from .patches import STEPS_APART, brings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from .ahead import Outputs

    Tokens = npt.NDArray[np.int32]
    Numbers = npt.NDArray[np.float32]


READS_LOGITS = brings(STEPS_APART, "llama_read_logits")
"""Whether this build returns whole rows that were sampled on the device. It finds a row by its index in the
batch, in whatever pass it was computed."""

if READS_LOGITS:
    _read_logits = ggml.declare(
        "llama_read_logits", ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p
    )
    _set_keep_logits = ggml.quick("llama_set_keep_logits", None, ctypes.c_void_p, ctypes.c_bool)

_ITH = {
    "candidates": ggml.sampled_candidates,
    "logits": ggml.sampled_logits,
    "probs": ggml.sampled_probs,
}
"""The addresses of a row's sampler results."""


NO_LOGITS = (
    "the model computed no usable logits ({}): its weights are damaged, or hold values that are not finite"
)
"""All logits may be 0, because llama.cpp turns NaN into zeros when it quantizes a product's input."""


def best_tokens(figures: Numbers, blocks: int) -> Tokens:
    """The best token of each row, from BEST's figures [rows, width]; the lowest id if several are equal."""
    n = (figures.shape[1] - blocks) // 2
    tokens, logits = figures[:, :n], figures[:, n : 2 * n]
    best = logits.argmax(axis=1)
    if best.min() >= n - blocks:  # a block's best: blocks are in order
        found = tokens[np.arange(len(best)), best]
    else:  # an end token, which may only equal a block's best
        highest = logits.max(axis=1, keepdims=True)
        found = np.where(logits == highest, tokens, np.float32(2**24)).min(axis=1)
    return np.asarray(found, np.int32)


def best_but_ends(figures: Numbers, blocks: int) -> Tokens:
    """Like `best_tokens`, without the tokens that end a generation."""
    n = (figures.shape[1] - blocks) // 2
    best = figures[:, 2 * n - blocks : 2 * n].argmax(axis=1)
    return np.asarray(figures[np.arange(len(best)), n - blocks + best], np.int32)


def guesses(figures: Numbers, width: int) -> tuple[Tokens, Numbers]:
    """Each row's best token and its probability, from GUESS's figures [rows, 3 * blocks], if its logits are
    finite. `width` is a block's."""
    blocks, rows = figures.shape[1] // 3, np.arange(len(figures))
    places, logits, chances = (figures[:, i * blocks : (i + 1) * blocks] for i in range(3))
    best = logits.argmax(axis=1)  # a NaN wins
    highest = logits[rows, best]
    with np.errstate(invalid="ignore"):
        # a block's sum of exponentials is that of its highest logit, divided by its probability
        total = (np.exp(logits - highest[:, None]) / chances).sum(axis=1)
    return best.astype(np.int32) * width + places[rows, best].astype(np.int32), 1 / total


def log_sums(figures: Numbers) -> Numbers:
    """Each row's logarithm of the sum of its logits' exponentials, from LOGPROBS's figures [rows, 3 *
    blocks], if they are finite."""
    blocks = figures.shape[1] // 3
    logits, chances = figures[:, blocks : 2 * blocks], figures[:, 2 * blocks :]
    highest = logits.max(axis=1, keepdims=True)  # a NaN wins
    with np.errstate(invalid="ignore"):
        found: Numbers = highest[:, 0] + np.log((np.exp(logits - highest) / chances).sum(axis=1))
    return found


def keep_logits(context: int, *, keep: bool) -> None:
    """Have the next batches keep the whole rows of all passes: those of the last one on the device, copies of
    the others on the host. Otherwise only the last one's are kept. No effect without READS_LOGITS."""
    if READS_LOGITS:
        _set_keep_logits(context, keep)


class Rows:
    """Outputs of the last batch, in order; valid until the next. A row's kind decides which methods can be
    called for it.

    The object is reused: `fill` is called after every decode. Nothing is copied.
    """

    def __init__(self, context: int, n_vocab: int, n_real: int, n_chosen: int = 0) -> None:
        """`n_real` of the `n_vocab` tokens are not padding. `n_chosen` is 1 if the figures of BEST and
        TOP_K begin with the token that the next step reads on the device, else 0."""
        self._n_chosen = n_chosen
        self._n_vocab, self._n_real = n_vocab, n_real
        self.kinds: Sequence[DeviceSampler] = ()
        """The kind of each row."""
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
        """Number of figures of a row; for BEST, plus two for each end token, known from the first row."""
        self._ahead: Outputs | None = None
        self._chosen = False
        self._indices: Sequence[int] = ()
        self._raw: Numbers | None = None
        self._reduced = False
        """Whether `_tokens` and `_checks` are computed."""
        self._tokens: list[int] = []
        """The best token of each row."""
        self._checks: list[float] = []
        """For each row its probability, or a sum over its logits: finite if the row is usable."""
        self._outputs: dict[str, npt.NDArray[Any]] = {}
        """Arrays already read, by their name in _ITH."""
        self._candidates: list[tuple[Tokens, Numbers]] = []
        """The candidates of each row, once requested."""

    def fill(
        self,
        kinds: Sequence[DeviceSampler],
        indices: Sequence[int],
        raw: Numbers | None,
        ahead: Outputs | None = None,
        *,
        chosen: bool = False,
    ) -> Rows:
        """Set the rows of a batch: each row's kind and index in the batch; `raw` logits if the host samples.

        `ahead`: the batch's outputs, if another batch was decoded since. With `chosen` the next step reads
        `next_tokens` on the device; if all rows are BEST, these are their best tokens.
        """
        self.kinds, self._indices, self._raw, self._reduced = kinds, indices, raw, False
        self._ahead, self._chosen = ahead, chosen
        self._outputs.clear()
        self._candidates = []
        return self

    def __len__(self) -> int:
        return len(self.kinds)

    def logits(self, row: int) -> Numbers:
        """A row's logits, shape [n_vocab], writable. For ROW. Raises FloatingPointError if they are not
        finite, or all 0."""
        logits = self.unchecked(row)
        with np.errstate(invalid="ignore"):
            total = float(logits.sum())
        if not math.isfinite(total):
            raise FloatingPointError(NO_LOGITS.format(f"they add up to {total}"))
        if not logits.any():  # stops at the first that is not 0
            raise FloatingPointError(NO_LOGITS.format("all are 0"))
        return logits

    def unchecked(self, row: int) -> Numbers:
        """`logits` without checks, for a drafter with a reduced vocabulary: its other tokens have -inf."""
        whole = self._output("logits", np.float32, row) if self._raw is None else self._raw
        logits: Numbers = whole[row]
        return logits

    def fetch(self, row: int) -> Numbers:
        """All logits of a row that was sampled on the device, which waits for a copy. Needs READS_LOGITS, and
        a batch that was decoded with `keep` and is the last one. Raises LlamaError if the row is not
        there, or if its own candidates have other logits."""
        logits, index = np.empty(self._n_vocab, np.float32), self._indices[row]
        kept = READS_LOGITS and self._ahead is None
        if not (kept and _read_logits(self._context, index, logits.ctypes.data)):
            raise LlamaError(f"the logits of token {index} of the batch were not kept")
        if self.kinds[row] in (DeviceSampler.TOP_K, DeviceSampler.LOGPROBS):
            ids, values = self.candidates(row)
            real = values > -np.inf  # padding is banned among the candidates only
            if not np.array_equal(logits[ids[real]], values[real]):
                raise LlamaError(f"the logits read for token {index} of the batch are those of another token")
        return logits

    def best(self, row: int) -> int:
        """The best token. For BEST and GUESS. Raises FloatingPointError if the logits are unusable."""
        self._check(row)
        return self._tokens[row]

    def best_but_end(self, row: int) -> int:
        """The best token that does not end a generation. For BEST. Raises as `best` does."""
        self._check(row)
        return int(best_but_ends(self._of(DeviceSampler.BEST)[row : row + 1], self._blocks)[0])

    def next_tokens(self) -> list[int]:
        """The token of every row that the next step reads on the device. For BEST and TOP_K."""
        tokens: list[int] = self._output("probs", np.float32, 0)[:, 0].astype(np.int32).tolist()
        return tokens

    def all_best(self) -> list[int] | None:
        """The best token of every row; None if a row has another kind, or is unusable."""
        if not self.kinds:
            return None
        if self._raw is not None:
            ids = self._raw[:, : self._n_real].argmax(axis=1)
            with np.errstate(invalid="ignore"):
                usable = np.isfinite(self._raw.sum(axis=1)).all()
            # if the best logit is 0, all may be 0
            return ids.tolist() if usable and self._raw[np.arange(len(ids)), ids].all() else None
        if max(self.kinds) > DeviceSampler.BEST:
            return None
        self._reduce()
        return self._tokens if all(map(math.isfinite, self._checks)) else None

    def candidates(self, row: int) -> tuple[Tokens, Numbers]:
        """Ids and logits of the best tokens, in no order. For TOP_K and LOGPROBS. Raises as `best` does."""
        self._check(row)
        if not self._candidates:  # for all rows at once, in half the time
            n = self._n_candidates
            ids, logits = self._output("candidates", np.int32, row), self._output("logits", np.float32, row)
            self._candidates = list(zip(ids[:, :n], logits[:, :n], strict=True))
        found = self._candidates[row]
        if not self._checks[row] and not found[1].max():  # none is above 0, and their sum is 0
            raise FloatingPointError(NO_LOGITS.format("all are 0"))
        return found

    def log_sum(self, row: int) -> float:
        """A logit minus its token's log-probability. For LOGPROBS. Raises as `best` does."""
        self._check(row)
        return self._checks[row]

    def probability(self, row: int) -> float:
        """The best token's probability. For GUESS."""
        self._reduce()
        return self._checks[row]

    def _check(self, row: int) -> None:
        self._reduce()
        if not math.isfinite(self._checks[row]):
            raise FloatingPointError(NO_LOGITS.format(f"they add up to {self._checks[row]}"))

    def _reduce(self) -> None:
        """Finish the reductions for all rows with figures, once for a batch."""
        if self._reduced:
            return
        n = len(self.kinds)
        self._tokens, self._checks, self._reduced = [0] * n, [math.nan] * n, True
        for kind in self._n_figures:
            count = self.kinds.count(kind)
            if count == n:
                self._tokens, self._checks = self._finish(kind, self._of(kind))
                if self._chosen and self._n_chosen:
                    self._tokens = self.next_tokens()
            elif count:  # the other rows' memory is undefined
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
        # a dot product with ones: `sum` is slower, and warns of NaN and infinity
        checks: list[float] = figures[:, -self._blocks :].dot(self._ones).tolist()
        if kind is not DeviceSampler.BEST:
            return [0] * len(figures), checks
        if 0.0 in checks:
            half = (figures.shape[1] - self._blocks) // 2
            highest = figures[:, half : 2 * half].max(axis=1)
            checks = [check if check or top else math.nan for check, top in zip(checks, highest, strict=True)]
        return best_tokens(figures, self._blocks).tolist(), checks

    def _of(self, kind: DeviceSampler) -> Numbers:
        """The figures of rows of a kind, at least one of which must exist: shape [rows, figures]."""
        row, first = self.kinds.index(kind), self._n_chosen if kind <= DeviceSampler.TOP_K else 0
        if not self._n_figures[kind]:
            self._n_figures[kind] = int(ggml.n_sampled_probs(self._context, self._indices[row])) - first
        figures: Numbers = self._output("probs", np.float32, row)[:, first : first + self._n_figures[kind]]
        return figures

    def _output(self, name: str, dtype: Any, row: int) -> npt.NDArray[Any]:
        """One of llama.cpp's arrays of sampler results: shape [rows, n_vocab]. `row` must have a result,
        which locates the array."""
        if (found := self._outputs.get(name)) is not None:
            return found
        if self._ahead is not None:
            address = int(getattr(self._ahead, name))
        else:
            address = int(_ITH[name](self._context, self._indices[row])) - 4 * self._n_vocab * row
        found = self._outputs[name] = matrix(address, len(self._indices), self._n_vocab, dtype)
        return found


def matrix(address: int, rows: int, width: int, dtype: Any = np.float32) -> npt.NDArray[Any]:
    """A view of llama.cpp's memory with 4 bytes a number: shape [rows, width]."""
    memory = (ctypes.c_char * (4 * rows * width)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype).reshape(rows, width)
