"""What comes back from the device for a row of logits: the best token, a few candidates, or the row itself.

llama.cpp lets a sampler add nodes to the graph for a sequence's rows (`llama_set_sampler`). Its own samplers
work row by row, and its argmax gives a row of 248,320 logits to one block of a GPU, one row after the other.
The sampler here is written against the same interface (`llama_sampler_i` in llama.h), but sees that all rows
lie in one tensor and takes them together: one argmax, or one top-k, for up to 64 rows at once. Its callbacks
run while a graph is built, not while it is reused.

What is to come back is decided for a sequence id, not for a request: another kind of readout means building
llama.cpp's worst-case graphs again. The draw among candidates is the host's, so a readout keeps no state.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np

from server.engine.errors import LlamaError

from . import ggml
from .top_k import top_k

if TYPE_CHECKING:
    from collections.abc import Callable

    from .model import Model

Result = TypeVar("Result")

N_CANDIDATES = 64
"""How many of the best tokens TOP_K gives."""

SLAB = 64
"""Rows that are taken together: bounds the memory for a copy of them without the banned tokens."""


class Readout(IntEnum):
    """What the host gets for a row. Banned are tokens that only pad the vocabulary."""

    BEST = 1
    """The best token that is not banned, and the best that is no end of a generation either."""
    TOP_K = 2
    """The N_CANDIDATES best tokens that are not banned, and their logits, in no order."""
    GUESS = 3
    """The best token and its probability; nothing is banned."""
    ROW = 4
    """The logits, untouched."""

    def serves(self, need: Readout) -> bool:
        """Whether a sequence id with this readout can run a request that needs `need`."""
        return self is need or self is Readout.ROW or (self is Readout.TOP_K and need is Readout.BEST)


class Readouts:
    """A sampler for each of a context's sequence ids 0 to `n` - 1; it reads out a `kind`.

    `configs` goes into the parameters of the context to be made, which must be freed before `close`.
    """

    def __init__(self, model: Model, n: int, kind: Readout) -> None:
        self.kinds = [kind] * n
        self.active = n > 0
        """Whether rows are read out on the device at all."""
        self.refused = ""
        """Why the device can not do it; nothing is sampled there then."""
        self.error: BaseException | None = None
        """What went wrong in a callback, where it can not be raised."""
        self.n_real = model.n_real
        self._n_vocab = model.n_vocab
        self._padding = range(model.n_real, model.n_vocab)
        self._ends = model.eog_ids
        self._no_padding = self._no_end = 0
        """Tensors to add to logits: -inf for what must not be chosen; 0 where there is no such thing."""
        self._ids = 0
        """A tensor of all ids, in order."""
        self._memory = self._buffer = 0
        self._shared: dict[tuple[int, int, Readout], tuple[int, ...]] = {}
        """What all rows of a slab have in common in the graph being built."""
        callbacks = {
            "name": ggml.Name(lambda _: b"readout"),
            "apply": ggml.Apply(lambda _sampler, _candidates: None),
            "backend_init": ggml.BackendInit(self._safe(self._prepare, False)),
            "backend_apply": ggml.BackendApply(self._safe(self._build, None)),
        }
        # called for every sampler before any of them builds: once is enough, and sequence 0 is always there
        reset = ggml.BackendReset(lambda _: self._shared.clear())
        self._first_interface = ggml.SamplerInterface(**callbacks, backend_reset=reset)
        self._interface = ggml.SamplerInterface(**callbacks)
        self._chains = [self._chain(sequence) for sequence in range(n)]
        self.configs = (C.llama_sampler_seq_config * n)()
        for sequence, chain in enumerate(self._chains):
            self.configs[sequence].seq_id = sequence
            self.configs[sequence].sampler = chain

    def attach(self, context: int, sequence: int, kind: Readout) -> None:
        """Give a sequence id another readout. The next decode builds llama.cpp's worst-case graphs anew."""
        old, self.kinds[sequence] = self._chains[sequence], kind
        self._chains[sequence] = self._chain(sequence)
        ggml.set_sampler(context, sequence, self._chains[sequence])
        ggml.sampler_free(old)

    def attach_all(self, context: int, kind: Readout | None) -> None:
        """The same for every sequence id. None: sample nothing on the device, give every row back whole."""
        for sequence in range(len(self.kinds)):
            if kind is None:
                ggml.set_sampler(context, sequence, None)
                self.kinds[sequence] = Readout.ROW
            else:
                self.attach(context, sequence, kind)
        self.active = bool(self.kinds) and kind is not None

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
        interface = self._interface if sequence else self._first_interface
        ggml.chain_add(chain, ggml.sampler_init(ctypes.byref(interface), int(self.kinds[sequence])))
        return chain

    def _safe(self, callback: Callable[..., Result], otherwise: Result) -> Callable[..., Result]:
        """`callback`, with what it raises kept in `error`: C can not carry it."""

        def call(*arguments: Any) -> Result:
            try:
                return callback(*arguments)
            except BaseException as error:
                self.error = error
                return otherwise

        return call

    # --- callbacks -----------------------------------------------------------------------------------------

    def _prepare(self, _sampler: int, buffer_type: int, _rows: int) -> bool:
        """Put the masks where the logits will be, once; whether the device has all that is needed."""
        if not self._memory:
            self._memory = ggml.init(ggml.InitParams(256 * ggml.tensor_overhead(), None, True))
            if device := ggml.device_of(buffer_type):  # plain host memory has none, and can do everything
                self._refuse(device)
            self._place_masks(buffer_type)
        return not self.refused

    def _refuse(self, device: int) -> None:
        logits = ggml.new_tensor(self._memory, ggml.F32, self._n_vocab, 2)
        self._ids = ggml.new_tensor(self._memory, ggml.I32, self._n_vocab, 1)
        for kind in Readout:
            figures, _, candidates, values = self._outputs(self._memory, kind, logits, 2, logits, logits)
            for tensor in filter(None, (figures, candidates, values)):
                missing = self._missing(device, tensor)
                if missing:
                    self.refused = f"{ggml.device_name(device).decode()} has no {missing}"

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

    def _place_masks(self, buffer_type: int) -> None:
        """Shapes: [n_vocab]. None for padding where there is none. The ids go with them."""
        ggml.free(self._memory)
        self._memory = ggml.init(ggml.InitParams(4 * ggml.tensor_overhead(), None, True))
        banned = [ids for ids in (self._padding, {*self._padding, *self._ends}) if ids]
        tensors = [ggml.new_tensor(self._memory, ggml.F32, self._n_vocab, 1) for _ in banned]
        self._ids = ggml.new_tensor(self._memory, ggml.I32, self._n_vocab, 1)
        self._buffer = ggml.alloc_tensors(self._memory, buffer_type) or 0
        if not self._buffer:
            raise LlamaError("no memory on the device for masks of banned tokens")
        for tensor, ids in zip(tensors, banned, strict=True):
            mask = np.zeros(self._n_vocab, np.float32)
            mask[list(ids)] = -np.inf
            ggml.tensor_set(tensor, mask.ctypes.data, 0, mask.nbytes)
        order = np.arange(self._n_vocab, dtype=np.int32)
        ggml.tensor_set(self._ids, order.ctypes.data, 0, order.nbytes)
        self._no_end = tensors[-1] if tensors else 0
        self._no_padding = tensors[0] if self._padding else 0

    def _build(self, sampler: int, memory: int, _graph: int, data: int) -> None:
        """Add one row's outputs to the graph: views of what is computed for its whole slab."""
        kind = Readout(ggml.Sampler.from_address(sampler).context)
        outputs = ggml.SamplerData.from_address(data)
        view = ggml.Tensor.from_address(outputs.logits)
        whole, row, n_rows = outputs.logits, 0, 1
        if view.view_src:  # not in llama.cpp's probe of how many nodes a chain adds
            padded = ggml.Tensor.from_address(view.view_src)
            row = view.view_offs // padded.nb[1]
            # all rows and a dummy: the original has no dummy, and needs no copy
            whole = padded.src[0] if padded.op == ggml.PAD else view.view_src
            n_rows = ggml.Tensor.from_address(whole).ne[1]
        n_vocab = view.ne[0]
        outputs.logits = None
        if row >= n_rows:
            return
        if kind is Readout.ROW:
            outputs.logits = ggml.view_1d(memory, whole, n_vocab, 4 * n_vocab * row)
            return
        slab, place = divmod(row, SLAB)
        key = whole, slab, kind
        if key not in self._shared or not view.view_src:
            n = min(SLAB, n_rows - slab * SLAB)
            logits = whole
            if n < n_rows:
                logits = ggml.view_2d(memory, whole, n_vocab, n, 4 * n_vocab, 4 * n_vocab * SLAB * slab)
            masks = (self._no_padding, self._no_end) if n_vocab == self._n_vocab else (0, 0)
            self._shared[key] = self._outputs(memory, kind, logits, n, *masks)
        figures, width, candidates, values = self._shared[key]
        outputs.probs = ggml.view_1d(memory, figures, width, 4 * width * place)
        if candidates:
            k = self._n_candidates(n_vocab)
            outputs.candidates = ggml.view_1d(memory, candidates, k, 4 * k * place)
            outputs.logits = ggml.view_1d(memory, values, k, 4 * k * place)

    def _outputs(
        self, memory: int, kind: Readout, logits: int, n: int, no_padding: int, no_end: int
    ) -> tuple[int, int, int, int]:
        """For `logits` [n_vocab, n]: figures [width, n], their width, candidates [k, n], their logits [k, n].

        A copy to the host for each row costs more than what is in it, so the figures are all that most kinds
        have: BEST the two tokens and the sum of the logits, which is finite if they all are; GUESS the token
        and its probability; TOP_K the sum. Tokens are whole numbers below 2^24, exact as F32.
        """
        n_vocab = ggml.Tensor.from_address(logits).ne[0]
        if kind is Readout.GUESS:
            best = self._best(memory, logits, n)
            # without a single number among the logits, argmax finds -1
            place = ggml.cast(memory, ggml.clamp(memory, best, 0.0, float(n_vocab - 1)), ggml.I32)
            chances = ggml.reshape_3d(memory, ggml.soft_max(memory, logits), 1, n_vocab, n)
            chance = ggml.get_rows(memory, chances, ggml.reshape_3d(memory, place, 1, n, 1))
            chance = ggml.reshape_3d(memory, chance, 1, n, 1)
            return ggml.concat(memory, best, chance, 0), 2, 0, 0
        sums = ggml.sum_rows(memory, logits)
        allowed = ggml.add(memory, logits, no_padding) if no_padding else logits
        if kind is Readout.TOP_K:
            ids = self._ids if n_vocab == self._n_vocab else ggml.new_tensor(memory, ggml.I32, n_vocab, 1)
            return sums, 1, *top_k(memory, allowed, ids, self._n_candidates(n_vocab))
        going_on = ggml.add(memory, logits, no_end) if no_end else logits
        tokens = ggml.concat(memory, self._best(memory, allowed, n), self._best(memory, going_on, n), 0)
        return ggml.concat(memory, tokens, sums, 0), 3, 0, 0

    @staticmethod
    def _best(memory: int, logits: int, n: int) -> int:
        """The best tokens, as F32: shape [1, n]."""
        found = ggml.cast(memory, ggml.argmax(memory, logits), ggml.F32)
        return int(ggml.reshape_3d(memory, found, 1, n, 1))

    @staticmethod
    def _n_candidates(n_vocab: int) -> int:
        return min(N_CANDIDATES, int(n_vocab))
