"""What comes back from the device for a row of logits: the best token, a few candidates, or the row itself.

llama.cpp lets a sampler add nodes to the graph for a sequence's rows (`llama_set_sampler`). Its own samplers
work row by row. The sampler here is written against the same interface (`llama_sampler_i` in llama.h), but
sees that all rows lie in one tensor and takes them together: one argmax, or one top-k, for up to 64 rows at
once. Its callbacks run while a graph is built, not while it is reused.

CUDA gives each row of an argmax or a sum to one block of threads, so that one of a GPU's many processors
would read all 248,320 logits of a row. Therefore a row is cut into up to 128 blocks of equal size, each of
which is reduced to a figure or two. What is left to do, over 128 numbers, is the host's (rows.py): a copy of
2 KB takes no longer than one of 12 bytes.

What is to come back is decided for a sequence id, not for a request: another kind of device sampler means
building llama.cpp's worst-case graphs again. The draw among candidates is the host's, so a device sampler
keeps no state.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from . import ggml
from .errors import LlamaError
from .top_k import at_places, best_places, top_k

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from .model import Model

N_CANDIDATES = 64
"""How many of the best tokens TOP_K gives."""

SLAB = 64
"""Rows that are taken together: bounds the memory for a copy of them without the banned tokens."""

N_BLOCKS = 128
"""The most that a row is cut into: about as many as a GPU has processors."""

NARROWEST = 16
"""The least numbers in a block, so that a row's figures take less room than the row itself."""


def n_blocks(n_vocab: int) -> int:
    """How many equal blocks a row of logits is cut into; 1 where its length has no divisor that would do."""
    most = max(1, min(N_BLOCKS, n_vocab // NARROWEST))
    return next(n for n in range(most, 0, -1) if n_vocab % n == 0)


class DeviceSampler(IntEnum):
    """What the host gets for a row. Banned are tokens that only pad the vocabulary."""

    BEST = 1
    """The best token that is not banned, and the best that is no end of a generation either."""
    TOP_K = 2
    """The N_CANDIDATES best tokens that are not banned, and their logits, in no order."""
    LOGPROBS = 3
    """The same, and what makes log-probabilities of logits: the logarithm of the sum of the exponentials of
    all of them, those of padding too."""
    GUESS = 4
    """The best token and its probability; nothing is banned."""
    ROW = 5
    """The logits, untouched."""

    def serves(self, need: DeviceSampler) -> bool:
        """Whether a sequence id with this device sampler can run a request that needs `need`."""
        return self is need or self is DeviceSampler.ROW or need < self <= DeviceSampler.LOGPROBS


class _Constants(NamedTuple):
    """Tensors that stay on the device; 0 where there is nothing to ban, or no end."""

    ids: int
    """All tokens in order: I32 [n_vocab]."""
    starts: int
    """The first token of each block; far below 0 if all of them are banned: F32 [blocks]."""
    no_padding: int = 0
    """To add to logits: -inf for what pads the vocabulary. F32 [n_vocab]."""
    no_end: int = 0
    """The same, and for ends of a generation."""
    ends: int = 0
    """The tokens that are ends, for each row of a slab: F32 [n_ends, SLAB]."""


class _Outputs(NamedTuple):
    """What is computed for a slab of rows; rows.py reads it. Tokens are below 2^24, exact as F32."""

    figures: int
    """F32 [width, n]. BEST: the ends, then each block's best token that is neither banned nor an end; their
    logits; each block's sum of logits, which are finite if all logits are. GUESS and LOGPROBS: the place of
    each block's best token in it, their logits, their probabilities within their blocks. TOP_K: the sums."""
    width: int
    candidates: int = 0
    """I32 [k, n]. For TOP_K and LOGPROBS, as all else: one copy to the host for each row is dear enough."""
    values: int = 0
    """F32 [k, n]."""
    k: int = 0


class _Whole(NamedTuple):
    """All rows of the graph being built."""

    padded: int
    """What the rows that llama.cpp hands out are views of."""
    logits: int
    n_rows: int
    n_vocab: int
    row_bytes: int


class DeviceSamplers:
    """A sampler for each of a context's sequence ids 0 to `n` - 1; all of one `kind` at first.

    `configs` goes into the parameters of the context to be made, which must be freed before `close`.
    """

    def __init__(self, model: Model, n: int, kind: DeviceSampler) -> None:
        self.kinds = [kind] * n
        self.active = n > 0
        """Whether rows are sampled on the device at all."""
        self.refused = ""
        """Why the device can not do it; nothing is sampled there then."""
        self.error: BaseException | None = None
        """What went wrong in a callback, where it can not be raised: C can not carry it."""
        self.n_real = model.n_real
        self._n_vocab = model.n_vocab
        self._ends = sorted(model.eog_ids)
        self._n_ends = sum(token < model.n_real for token in self._ends)
        self._lowest = 0
        """The lowest token that is neither banned nor an end."""
        self._constants: _Constants | None = None
        self._memory = self._buffer = 0
        self._whole: _Whole | None = None
        self._slabs: dict[DeviceSampler, dict[int, _Outputs]] = {kind: {} for kind in DeviceSampler}
        """What all rows of a slab have in common in the graph being built."""
        callbacks = {
            "name": ggml.Name(lambda _: b"device sampler"),
            "apply": ggml.Apply(lambda _sampler, _candidates: None),
            "backend_init": ggml.BackendInit(self._prepare),
        }
        # called for every sampler before any of them builds: once is enough, and sequence 0 is always there
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
        """Give a sequence id another device sampler. The next decode builds llama.cpp's worst-case graphs
        anew."""
        old, self.kinds[sequence] = self._chains[sequence], kind
        self._chains[sequence] = self._chain(sequence)
        ggml.set_sampler(context, sequence, self._chains[sequence])
        ggml.sampler_free(old)

    def attach_all(self, context: int, kind: DeviceSampler | None) -> None:
        """The same for every sequence id. None: sample nothing on the device, give every row back whole."""
        for sequence in range(len(self.kinds)):
            if kind is None:
                ggml.set_sampler(context, sequence, None)
                self.kinds[sequence] = DeviceSampler.ROW
            else:
                self.attach(context, sequence, kind)
        self.active = bool(self.kinds) and kind is not None

    def fetch(self, row: int, n_rows: int) -> npt.NDArray[np.float32] | None:
        """The whole logits [n_vocab] of a row of the last call's `n_rows`, the last of which belongs to its
        last token; None where they are gone.

        llama.cpp keeps the rows of a call's last pass on the device until the next: they are outputs of its
        graph (`llm_graph_result::set_outputs`), which nothing is written over.
        """
        whole = self._whole
        if whole is None or not whole.padded or (index := row - (n_rows - whole.n_rows)) < 0:
            return None
        logits = np.empty(whole.n_vocab, np.float32)
        ggml.tensor_get(whole.logits, logits.ctypes.data, whole.row_bytes * index, whole.row_bytes)
        return logits

    def close(self) -> None:
        """Free the samplers and what they keep on the device. Idempotent."""
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
        """Put the constants where the logits will be, once; whether the device has all that is needed."""
        try:
            if not self._memory:
                if 3 * n_blocks(self._n_vocab) + 2 * self._n_ends > self._n_vocab:
                    self.refused = f"a row has no room for {self._n_ends} ends of generation"
                self._constants = self._place(buffer_type)
                if device := ggml.device_of(buffer_type):  # plain host memory has none, and can do everything
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
                missing = self._missing(device, tensor)
                if missing:
                    self.refused = f"{ggml.device_name(device).decode()} has no {missing}"
        ggml.free(memory)

    def _missing(self, device: int, tensor: int) -> str | None:
        """An operation on the way to `tensor` that the device does not have."""
        seen, ahead = {tensor}, [tensor]  # a cast is a source of its own
        while ahead:
            address = ahead.pop()
            node = ggml.Tensor.from_address(address)
            if node.op and not ggml.supports_op(device, address):
                return str(ggml.op_name(node.op).decode())
            ahead += {source for source in node.src if source} - seen
            seen.update(ahead)
        return None

    def _place(self, buffer_type: int) -> _Constants:
        """Fill the constants in memory of their own."""
        size = self._n_vocab
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
        ]
        self._memory = ggml.init(ggml.InitParams(len(arrays) * ggml.tensor_overhead(), None, True))
        tensors = [0] * len(arrays)
        for i, array in enumerate(arrays):
            if array is not None:
                dtype = ggml.I32 if array.dtype == np.int32 else ggml.F32
                tensors[i] = ggml.new_tensor(self._memory, dtype, array.size, 1)
        self._buffer = ggml.alloc_tensors(self._memory, buffer_type) or 0
        if not self._buffer:
            raise LlamaError("no memory on the device for masks of banned tokens")
        for tensor, array in zip(tensors, arrays, strict=True):
            if array is not None:
                ggml.tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
        return _Constants(*tensors)

    def _reset(self, _sampler: int) -> None:
        self._whole = None
        for slabs in self._slabs.values():
            slabs.clear()

    def _builder(self, kind: DeviceSampler) -> Callable[[int, int, int, int], None]:
        """Adds one row's outputs to the graph: views of what is computed for its whole slab.

        Called for each sequence id, with row 0 for those that have none: up to 160 times for a graph, so only
        the first call takes its time. Idle ids get views of their own, although one would do for all: a graph
        with as many nodes as the last one needs no new plan of its memory.
        """
        slabs, view_1d = self._slabs[kind], ggml.view_1d
        data_at, view_at = ggml.SamplerData.from_address, ggml.View.from_address
        logits, probs, candidates, view = ggml.LOGITS, ggml.PROBS, ggml.CANDIDATES, ggml.VIEW

        def build(_sampler: int, memory: int, _graph: int, data: int) -> None:
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
                slab = slabs.get(index - at)
                if slab is None:
                    slab = slabs[index - at] = self._slab(memory, kind, whole, index - at)
                figures, width, ids, values, k = slab
                outputs[probs] = view_1d(memory, figures, width, 4 * width * at)
                if k:
                    outputs[candidates] = view_1d(memory, ids, k, 4 * k * at)
                    outputs[logits] = view_1d(memory, values, k, 4 * k * at)
            except BaseException as error:
                self.error = error

        return build

    def _look(self, row: int, source: int) -> _Whole:
        """Find the rows that `row` is one of: itself alone in llama.cpp's probe of how many nodes are added,
        where it is no view (`source`) and nothing of an earlier graph is of use."""
        self._reset(0)
        logits, size = source or row, ggml.Tensor.from_address(row).ne[0]
        if source and ggml.Tensor.from_address(source).op == ggml.PAD:
            # all rows and a dummy: the original has no dummy, and needs no copy
            logits = ggml.Tensor.from_address(source).src[0]
        n = ggml.Tensor.from_address(logits).ne[1]
        self._whole = _Whole(source, logits, n, size, 4 * size)
        return self._whole

    def _slab(self, memory: int, kind: DeviceSampler, whole: _Whole, start: int) -> _Outputs:
        n, size, logits = min(SLAB, whole.n_rows - start), whole.n_vocab, whole.logits
        if n < whole.n_rows:
            logits = ggml.view_2d(memory, logits, size, n, whole.row_bytes, whole.row_bytes * start)
        return self._outputs(memory, kind, logits, n)

    def _outputs(self, memory: int, kind: DeviceSampler, logits: int, n: int) -> _Outputs:
        """The outputs for `logits` [n_vocab, n], which are a slab of all rows."""
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
        if constants is None or size != self._n_vocab:  # the probe again: what is in them does not matter
            ids = ggml.new_tensor(memory, ggml.I32, size, 1)
            constants = _Constants(ids, ggml.new_tensor(memory, ggml.F32, blocks, 1))
        if kind is not DeviceSampler.BEST:
            allowed = ggml.add(memory, logits, constants.no_padding) if constants.no_padding else logits
            k = min(N_CANDIDATES, size)
            return _Outputs(figures, n_figures, *top_k(memory, allowed, constants.ids, k), k)
        going_on = ggml.add(memory, logits, constants.no_end) if constants.no_end else logits
        best = ggml.argmax(memory, ggml.reshape_3d(memory, going_on, width, count, 1))
        tokens = ggml.reshape_3d(memory, ggml.cast(memory, best, ggml.F32), blocks, n, 1)
        # argmax finds -1 or anything in a block without a token to choose: its start is so low that it comes
        # to the lowest token that can be chosen, which says nothing new
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
        return _Outputs(figures, 2 * n_tokens + n_figures)
