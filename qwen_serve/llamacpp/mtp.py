"""The checkpoint's multi-token-prediction head, in a context of its own that reads the trunk's hidden
rows."""

import ctypes

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp_ext

from .context_options import ContextOptions
from .drafter import FIRST, DrafterContext
from .model import Model
from .row_steps import RowSteps


class MtpContext(DrafterContext):
    """Decodes drafts: a token and the hidden row of the token before it give the token after it.

    The head's input at position p is token p and the trunk's hidden row of token p - 1 (after the output
    norm); its logits are for token p + 1. To draft one token further, its own hidden row replaces the trunk's
    (DeepSeek-V3 report, section 2.2; `graph_mtp` in llama.cpp's qwen35.cpp). Its layer is full attention with
    a KV cache of its own, so a tail can be removed. The model must be loaded with `load_mtp`.

    Fill and decode it as any other context, and also fill `input_hidden`. Then `best` returns the best
    tokens. The head's own hidden rows are read by `decode_next`, or if it does not `queues` they are on the
    host: `hidden(n)`.
    """

    _type = C.LLAMA_CONTEXT_TYPE_MTP

    def __init__(self, model: Model, options: ContextOptions) -> None:
        super().__init__(model, options)
        # of all tokens: with "masked" llama.cpp would copy the first rows, whichever are outputs
        llama_cpp_ext.llama_set_embeddings_nextn(self._handle, not self.queues, False)
        self.input_hidden: npt.NDArray[np.float32] = np.zeros((self.n_batch, model.n_embd), np.float32)
        """The hidden row of the token before each of `tokens`."""
        self._batch.embd = self.input_hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def decode_next(self, rows: npt.NDArray[np.int32], hidden: npt.NDArray[np.int32]) -> None:
        """`decode` as many tokens as there are `rows`, each read from a row that is being chosen: they count
        on over the batches of `choose`. Its hidden row is that of a token of the last batch, by its index.
        Raises as `decode` does."""
        assert self.row_steps is not None
        self.row_steps.read_hidden(hidden)
        self.decode(len(rows), next_rows=rows)

    def _is_read(self, steps: RowSteps) -> bool:
        able = steps.read_next(FIRST) and steps.read_hidden(FIRST)
        steps.read_next(FIRST[:0])
        steps.read_hidden(FIRST[:0])
        return able
