"""Device samplers decide what a row of logits returns: its best token, a few candidates, or the whole row.

llama.cpp lets a sampler add nodes to the graph for a sequence's rows (`llama_set_sampler`). Its own samplers
work row by row. The samplers here use the same interface (`llama_sampler_i` in llama.h), but process all rows
together, since they are in one tensor: one argmax, or one top-k, for up to 64 rows. The callbacks run while a
graph is built, not while it is reused.

CUDA assigns each row of an argmax or a sum to one thread block, so only one of a GPU's many processors would
read all 248,320 logits of a row. Therefore a row is cut into up to 128 equal blocks, each of which is reduced
to one or two figures. The host reduces the remaining 128 numbers (rows.py): copying 2 KB takes no longer than
copying 12 bytes.

A device sampler belongs to a sequence id, not to a request, because changing it makes llama.cpp build its
worst-case graphs again. The host draws among candidates, so a device sampler keeps no state.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from . import ggml
from .ahead import HAS_NEXT_TOKENS, MOST_ROWS, NextTokens
from .errors import LlamaError
from .guessed_draws import LINES, DrawTable, guess
from .needs import DeviceSampler
from .sampler_constants import Constants
from .top_k import at_places, best_places, lowest_of_best, top_k

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from .model import Model

N_CANDIDATES = 64
"""Number of candidates that TOP_K returns."""

SLAB = MOST_ROWS
"""Most rows processed together, which bounds the memory for their copy without banned tokens."""

N_BLOCKS = 128
"""Most blocks of a row: about as many as a GPU has processors."""

NARROWEST = 16
"""Least numbers in a block, so that a row's figures are smaller than the row."""


def n_blocks(n_vocab: int) -> int:
    """Number of equal blocks of a row of logits; 1 if its length has no suitable divisor."""
    most = max(1, min(N_BLOCKS, n_vocab // NARROWEST))
    return next(n for n in range(most, 0, -1) if n_vocab % n == 0)


class _Outputs(NamedTuple):
    """The outputs for a slab of rows, read by rows.py. Token ids are below 2^24, so F32 holds them
    exactly."""

    figures: int
    """F32 [width, n]. BEST: the next step's token, if that may read it on the device; the end tokens and each
    block's best token that is neither banned nor an end token; the logits of all these; and the sum of each
    block's logits, which is finite if all of them are. GUESS and LOGPROBS: the index of each block's best
    token within the block, its logit, and its probability within the block. TOP_K: the guessed token, as for
    BEST, and the sums."""
    width: int
    candidates: int = 0
    """I32 [k, n], for TOP_K and LOGPROBS. Each extra copy to the host is costly for each row, so the rest is
    in `figures`."""
    values: int = 0
    """F32 [k, n]."""
    k: int = 0
    chosen: int = 0
    """BEST and, if it guesses, TOP_K: the next step's tokens, F32 [1, n, 1]; 0 as for
    `Constants.next_tokens`."""
    after: int = 0
    """TOP_K: the tensor to compute after `chosen`."""


class _Whole(NamedTuple):
    """All rows of the graph being built."""

    padded: int
    """The tensor of which the rows that llama.cpp hands out are views."""
    logits: int
    n_rows: int
    n_vocab: int
    row_bytes: int


class DeviceSamplers:
    """Samplers for a context's sequence ids 0 to `n` - 1, all of one `kind` at first.

    `configs` is a parameter of the context to be created, which must be freed before `close`.
    """

    def __init__(
        self, model: Model, n: int, kind: DeviceSampler, *, ahead: bool = False, exact: bool = False
    ) -> None:
        """`ahead`: BEST chooses the next step's tokens on the device, if this build can read them there.
        `exact`: of equal logits it chooses the lowest token, as the host does."""
        self._ahead, self._exact = ahead and HAS_NEXT_TOKENS, exact
        self.kinds = [kind] * n
        self.active = n > 0
        """Whether any rows are sampled on the device."""
        self.refused = ""
        """Why the device cannot sample; then the host samples all rows."""
        self.error: BaseException | None = None
        """An exception from a callback, kept because it cannot pass through C."""
        self.n_real = model.n_real
        self._n_vocab = model.n_vocab
        self._ends = sorted(model.eog_ids)
        self._n_ends = sum(token < model.n_real for token in self._ends)
        self._lowest = 0
        """The lowest token that is neither banned nor an end."""
        self._constants: Constants | None = None
        self._memory = self._buffer = 0
        self.next_tokens: NextTokens | None = None
        """Tokens that the next step can read on the device; None if none can."""
        self._whole: _Whole | None = None
        self._slabs: dict[DeviceSampler, dict[int, _Outputs]] = {kind: {} for kind in DeviceSampler}
        """The slabs' shared outputs in the graph being built."""
        callbacks = {
            "name": ggml.Name(lambda _: b"device sampler"),
            "apply": ggml.Apply(lambda _sampler, _candidates: None),
            "backend_init": ggml.BackendInit(self._prepare),
        }
        # called for every sampler before any builds: one reset is enough, and sequence 0 always exists
        reset = ggml.BackendReset(self._reset)
        build = {kind: ggml.BackendApply(self._builder(kind)) for kind in DeviceSampler}
        self._interfaces = [
            {
                kind: ggml.SamplerInterface(**callbacks, **more, backend_apply=build[kind])
                for kind in DeviceSampler
            }
            for more in ({"backend_reset": reset}, {})
        ]
        self._chains = [self._chain(sequence) for sequence in range(n)]
        self.configs = (C.llama_sampler_seq_config * n)()
        for sequence, chain in enumerate(self._chains):
            self.configs[sequence].seq_id = sequence
            self.configs[sequence].sampler = chain

    def attach(self, context: int, sequence: int, kind: DeviceSampler) -> None:
        """Change a sequence id's device sampler. The next decode builds llama.cpp's worst-case graphs
        again."""
        old, self.kinds[sequence] = self._chains[sequence], kind
        self._chains[sequence] = self._chain(sequence)
        ggml.set_sampler(context, sequence, self._chains[sequence])
        ggml.sampler_free(old)

    def attach_all(self, context: int, kind: DeviceSampler | None) -> None:
        """Change the device samplers of all ids; with None every row is returned whole."""
        for sequence in range(len(self.kinds)):
            if kind is None:
                ggml.set_sampler(context, sequence, None)
                self.kinds[sequence] = DeviceSampler.ROW
            else:
                self.attach(context, sequence, kind)
        self.active = bool(self.kinds) and kind is not None

    def close(self) -> None:
        """Free the samplers and their device memory. Idempotent."""
        for chain in self._chains:
            ggml.sampler_free(chain)
        self._chains = []
        if self._buffer:
            ggml.free_buffer(self._buffer)
        if self._memory:
            ggml.free(self._memory)
        self._buffer = self._memory = 0

    def _chain(self, sequence: int) -> int:
        params = C.llama_sampler_chain_default_params()
        params.no_perf = True
        chain = int(ggml.chain_init(params))
        interface = self._interfaces[sequence > 0][self.kinds[sequence]]
        ggml.chain_add(chain, ggml.sampler_init(ctypes.byref(interface), None))
        return chain

    # --- callbacks -----------------------------------------------------------------------------------------

    def _prepare(self, _sampler: int, buffer_type: int, _rows: int) -> bool:
        """Place the constants on the device of the logits, once; returns whether the device supports all
        operations."""
        try:
            if not self._memory:
                if 3 * n_blocks(self._n_vocab) + 2 * self._n_ends + self._ahead > self._n_vocab:
                    self.refused = f"a row has no room for {self._n_ends} ends of generation"
                self._constants = self._place(buffer_type)
                if device := ggml.device_of(buffer_type):  # none for plain host memory, which supports all
                    self._refuse(device)
        except BaseException as error:
            self.error = error
            return False
        return not self.refused

    def _refuse(self, device: int) -> None:
        memory = ggml.init(ggml.InitParams(256 * ggml.tensor_overhead(), None, True))
        logits = ggml.new_tensor(memory, ggml.F32, self._n_vocab, 2)
        for kind in DeviceSampler:
            outputs = self._outputs(memory, kind, logits, 2)
            for tensor in filter(None, (outputs.figures, outputs.candidates, outputs.values)):
                missing = ggml.missing_operation(device, tensor)
                if missing:
                    self.refused = f"{ggml.device_name(device).decode()} has no {missing}"
        ggml.free(memory)

    def _place(self, buffer_type: int) -> Constants:
        """Allocate and fill the constants."""
        size, k = self._n_vocab, min(N_CANDIDATES, self._n_vocab)
        blocks = n_blocks(size)
        no_padding, no_end = np.zeros(size, np.float32), np.zeros(size, np.float32)
        no_padding[self.n_real :] = no_end[self.n_real :] = no_end[self._ends] = -np.inf
        self._lowest = int(no_end.argmax())
        nothing = (no_end < 0).reshape(blocks, -1).all(axis=1)
        starts = np.where(nothing, -size, np.arange(0, size, size // blocks)).astype(np.float32)
        ends = np.tile(np.array(self._ends[: self._n_ends], np.float32), SLAB)
        arrays: list[npt.NDArray[np.float32 | np.int32] | None] = [
            np.arange(size, dtype=np.int32),
            starts,
            no_padding if no_padding.any() else None,
            no_end if no_end.any() else None,
            ends if ends.size else None,
            np.zeros(SLAB, np.int32) if self._ahead else None,
            np.zeros((self._n_ends + blocks) * SLAB, np.float32) if self._ahead else None,
            np.zeros((LINES, SLAB), np.float32) if self._ahead else None,
            np.zeros((SLAB, k), np.float32) if self._ahead else None,
        ]
        self._memory = ggml.init(ggml.InitParams(len(arrays) * ggml.tensor_overhead(), None, True))
        tensors = [0] * len(arrays)
        for i, array in enumerate(arrays):
            if array is not None:
                dtype = ggml.I32 if array.dtype == np.int32 else ggml.F32
                tensors[i] = ggml.new_tensor(self._memory, dtype, *(*array.shape[::-1], 1)[:2])
        self._buffer = ggml.alloc_tensors(self._memory, buffer_type) or 0
        if not self._buffer:
            raise LlamaError("no memory on the device for masks of banned tokens")
        for tensor, array in zip(tensors, arrays, strict=True):
            if array is not None:
                ggml.tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        constants = Constants(*tensors)
        if self._ahead:
            width = self._n_ends + blocks
            draws = DrawTable(constants.table, constants.cut, SLAB, k)
            self.next_tokens = NextTokens(constants.next_tokens, constants.bans, width, self._n_ends, draws)
        return constants

    def _reset(self, _sampler: int) -> None:
        self._whole = None
        for slabs in self._slabs.values():
            slabs.clear()

    def _builder(self, kind: DeviceSampler) -> Callable[[int, int, int, int], None]:
        """Adds one row's outputs to the graph: views of its slab's results.

        Called for each sequence id, with row 0 for ids without rows: up to 160 times for a graph, so only the
        first call does the work. Idle ids get views of their own although one would do for all: a graph with
        as many nodes as the last one needs no new memory plan.
        """
        slabs, view_1d = self._slabs[kind], ggml.view_1d
        data_at, view_at = ggml.SamplerData.from_address, ggml.View.from_address
        logits, probs, candidates, view = ggml.LOGITS, ggml.PROBS, ggml.CANDIDATES, ggml.VIEW

        def build(_sampler: int, memory: int, graph: int, data: int) -> None:
            try:
                outputs = data_at(data)
                row = outputs[logits]
                place = view_at(row + view)
                whole = self._whole
                if whole is None or place[0] != whole.padded or not whole.padded:
                    whole = self._look(row, place[0])
                outputs[logits] = 0
                index = place[1] // whole.row_bytes
                if index >= whole.n_rows:
                    return
                if kind is DeviceSampler.ROW:
                    outputs[logits] = view_1d(memory, whole.logits, whole.n_vocab, place[1])
                    return
                at = index % SLAB
                slab = slabs.get(index - at) or self._slab(memory, graph, kind, whole, index - at)
                figures, width, ids, values, k = slab[:5]
                outputs[probs] = view_1d(memory, figures, width, 4 * width * at)
                if k:
                    outputs[candidates] = view_1d(memory, ids, k, 4 * k * at)
                    outputs[logits] = view_1d(memory, values, k, 4 * k * at)
            except BaseException as error:
                self.error = error

        return build

    def _look(self, row: int, source: int) -> _Whole:
        """Find all rows of the graph that `row`, a view of `source`, belongs to. When llama.cpp only counts
        the added nodes, the row is no view: then it is the only row, and an earlier graph's rows are not
        reused."""
        self._reset(0)
        logits, size = source or row, ggml.Tensor.from_address(row).ne[0]
        if source and ggml.Tensor.from_address(source).op == ggml.PAD:
            # all rows and a dummy: the original has no dummy, and needs no copy
            logits = ggml.Tensor.from_address(source).src[0]
        n = ggml.Tensor.from_address(logits).ne[1]
        self._whole = _Whole(source, logits, n, size, 4 * size)
        return self._whole

    def _slab(self, memory: int, graph: int, kind: DeviceSampler, whole: _Whole, start: int) -> _Outputs:
        n, size, logits = min(SLAB, whole.n_rows - start), whole.n_vocab, whole.logits
        if n < whole.n_rows:
            logits = ggml.view_2d(memory, logits, size, n, whole.row_bytes, whole.row_bytes * start)
        best = 0
        guesses = kind is DeviceSampler.TOP_K and self._guesses(n)
        if guesses and (name := DeviceSampler.BEST) in self.kinds:
            best = (self._slabs[name].get(start) or self._slab(memory, graph, name, whole, start)).chosen
        self._slabs[kind][start] = outputs = self._outputs(memory, kind, logits, n, best)
        if outputs.chosen and self._constants is not None and not start:
            tokens = ggml.view_1d(memory, self._constants.next_tokens, n, 0)
            ggml.expand(graph, ggml.cpy(memory, ggml.reshape_3d(memory, outputs.chosen, n, 1, 1), tokens))
            if outputs.after:
                ggml.expand(graph, outputs.after)
        return outputs

    def _guesses(self, n: int) -> bool:
        """Whether TOP_K guesses the draws of `n` rows. One row's guess takes as long as launching a step
        ahead saves (127 steps on an H100: 326 ms, and 318 without). With `exact` a wrong guess would have its
        tokens computed again in another pass, with other bits."""
        return self._ahead and not self._exact and n > 1

    def _outputs(self, memory: int, kind: DeviceSampler, logits: int, n: int, best: int = 0) -> _Outputs:
        """The outputs for a slab `logits` [n_vocab, n] of all rows; `best`: what BEST chose for them."""
        size = int(ggml.Tensor.from_address(logits).ne[0])
        blocks = n_blocks(size)
        width, count = size // blocks, blocks * n
        pieces = ggml.reshape_3d(memory, logits, width, count, 1)
        if kind in (DeviceSampler.GUESS, DeviceSampler.LOGPROBS):
            best, places = best_places(memory, pieces, width, count)
            values = at_places(memory, pieces, width, count, places)
            chances = at_places(memory, ggml.soft_max(memory, pieces), width, count, places)
            each = [ggml.reshape_3d(memory, tensor, blocks, n, 1) for tensor in (best, values, chances)]
            figures = ggml.concat(memory, ggml.concat(memory, each[0], each[1], 0), each[2], 0)
        else:
            figures = ggml.reshape_3d(memory, ggml.sum_rows(memory, pieces), blocks, n, 1)
        n_figures = ggml.Tensor.from_address(figures).ne[0]
        if kind is DeviceSampler.GUESS:
            return _Outputs(figures, n_figures)
        constants = self._constants
        if constants is None or size != self._n_vocab:  # llama.cpp only counts nodes: contents do not matter
            ids = ggml.new_tensor(memory, ggml.I32, size, 1)
            constants = Constants(ids, ggml.new_tensor(memory, ggml.F32, blocks, 1))
            if self._ahead:
                bans = ggml.new_tensor(memory, ggml.F32, blocks * SLAB, 1)
                tokens = ggml.new_tensor(memory, ggml.I32, SLAB, 1)
                no_end = ggml.new_tensor(memory, ggml.F32, size, 1)
                table = ggml.new_tensor(memory, ggml.F32, SLAB, LINES)
                cut = ggml.new_tensor(memory, ggml.F32, min(N_CANDIDATES, size), SLAB)
                constants = Constants(*constants[:3], no_end, 0, tokens, bans, table, cut)
        if kind is not DeviceSampler.BEST:
            allowed = ggml.add(memory, logits, constants.no_padding) if constants.no_padding else logits
            k = min(N_CANDIDATES, size)
            ids, values = top_k(memory, allowed, constants.ids, k)
            if kind is not DeviceSampler.TOP_K or not constants.table:
                return _Outputs(figures, n_figures, ids, values, k)
            if not self._guesses(n):  # any token, which nobody reads
                token = ggml.cast(memory, ggml.view_2d(memory, ids, 1, n, 4 * k, 0), ggml.F32)
                figures = ggml.concat(memory, ggml.reshape_3d(memory, token, 1, n, 1), figures, 0)
                return _Outputs(figures, 1 + n_figures, ids, values, k)
            what = constants.table, constants.cut, constants.no_end
            chosen, after = guess(memory, ids, values, k, n, what, best)
            figures = ggml.concat(memory, chosen, figures, 0)
            return _Outputs(figures, 1 + n_figures, ids, values, k, chosen, after)
        going_on = ggml.add(memory, logits, constants.no_end) if constants.no_end else logits
        best = ggml.argmax(memory, ggml.reshape_3d(memory, going_on, width, count, 1))
        tokens = ggml.reshape_3d(memory, ggml.cast(memory, best, ggml.F32), blocks, n, 1)
        # in a block without an allowed token argmax returns -1 or any index; the start of such a block is so
        # low that the sum is clamped to the lowest allowed token, which does not change the result
        tokens = ggml.add(memory, tokens, constants.starts)
        tokens = ggml.clamp(memory, tokens, float(self._lowest), float(size - 1))
        if constants.ends:
            ends = ggml.view_2d(memory, constants.ends, self._n_ends, n, 4 * self._n_ends, 0)
            tokens = ggml.concat(memory, ends, tokens, 0)
        n_tokens = ggml.Tensor.from_address(tokens).ne[0]
        places = ggml.reshape_3d(memory, ggml.cast(memory, tokens, ggml.I32), n_tokens, n, 1)
        values = ggml.get_rows(memory, ggml.reshape_3d(memory, logits, 1, size, n), places)
        values = ggml.reshape_3d(memory, values, n_tokens, n, 1)
        figures = ggml.concat(memory, ggml.concat(memory, tokens, values, 0), figures, 0)
        width = 2 * n_tokens + n_figures
        if not constants.next_tokens:
            return _Outputs(figures, width)
        allowed = ggml.add(memory, values, ggml.view_2d(memory, constants.bans, n_tokens, n, 4 * n_tokens, 0))
        if self._exact:
            best = lowest_of_best(memory, allowed, tokens, n_tokens, n)
        else:
            _, best = best_places(memory, allowed, n_tokens, n)
        chosen = ggml.reshape_3d(memory, at_places(memory, tokens, n_tokens, n, best), 1, n, 1)
        return _Outputs(ggml.concat(memory, chosen, figures, 0), 1 + width, chosen=chosen)
