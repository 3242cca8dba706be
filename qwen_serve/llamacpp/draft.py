"""A block drafter's context (llama.cpp's `dflash`), whose KV cache is computed from inputs of the trunk's
layers."""

import ctypes

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt

from .context import Context
from .context_options import ContextOptions
from .drafter import FIRST, DrafterContext
from .errors import LlamaError, NoMemorySlot
from .layers import set_ring_rows
from .model import Model
from .row_steps import RowSteps

POSITION_AXES = 4
"""Axes of a position if the target's positions have several (M-RoPE); the last is ignored."""


class DraftContext(DrafterContext):
    """Injects the trunk's rows into its cache, and guesses a block of tokens in one pass.

    If the trunk's rows stay on the device, they are injected from there, and one call injects and guesses.

    A row of features, the inputs of some of the trunk's layers side by side, becomes the keys and values of
    its position (`inject`). A block is the newest token followed by masks at the next positions. It is filled
    and decoded as in every context, and attends to the injected rows and to itself, in both directions. All
    its rows must be outputs, which `best` reads (src/models/dflash.cpp). Blocks leave cache entries, which
    the caller removes. A drafter without embeddings or head uses the trunk's. All tokens of a call must fit
    into one pass.
    """

    def __init__(
        self, model: Model, options: ContextOptions, trunk: Context, n_features: int, *, causal: bool = False
    ) -> None:
        super().__init__(model, options, other=trunk)
        C.llama_set_causal_attn(self._handle, causal)
        self._trunk = trunk
        n = self.n_batch
        self.source = trunk.ring
        """The ring that rows are injected from, if there is one."""
        if self.source is not None:
            self.source.share(self._handle, trunk._handle)
        self.injected: npt.NDArray[np.float32] | npt.NDArray[np.int32] = (
            np.zeros((n, n_features), np.float32) if self.source is None else np.zeros((n, 1), np.int32)
        )
        """Input of `inject` for `positions` of `sequences`: features, or their places in the ring."""
        self._axes = np.zeros(POSITION_AXES * n, np.int32)
        self._nothing = np.zeros(n, np.int8)
        self._injection = C.llama_batch(
            n_tokens=0,
            token=None,
            embd=self.injected.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=self._axes.ctypes.data_as(ctypes.POINTER(C.llama_pos)),
            n_seq_id=self._batch.n_seq_id,
            seq_id=self._batch.seq_id,
            logits=self._nothing.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def _is_read(self, steps: RowSteps) -> bool:
        trunk = self._trunk.row_steps  # only the trunk reads its tokens
        able = trunk is not None and trunk.read_next(FIRST, steps)
        if trunk is not None:
            trunk.read_next(FIRST[:0])
        return able

    def inject(self, n: int) -> None:
        """Inject the first `n` rows of `injected`. Raises as `decode` does."""
        if self.source is not None:
            self.inject_and_decode(n, 0)
            return
        self._axes[: 3 * n] = np.tile(self.positions[:n], 3)
        self._axes[3 * n : 4 * n] = 0
        self._injection.n_tokens = n
        status = C.llama_decode(self._handle, self._injection)
        if status == 1:
            raise NoMemorySlot(f"no room in the drafter's cache for {n} tokens")
        if status != 0:
            raise LlamaError(f"llama_decode returned {status} for {n} rows of the drafter's")

    def inject_and_decode(self, n: int, n_blocks: int) -> None:
        """Inject the first `n` rows of `injected` from a ring, and decode the `n_blocks` tokens of blocks
        after them. Raises as `decode` does."""
        self.tokens[:n] = self.outputs[:n] = 0
        set_ring_rows(self._handle, np.ascontiguousarray(self.injected[:n, 0], np.int32))
        self.decode(n + n_blocks)
