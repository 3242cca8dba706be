"""The part of the llama.cpp API that the engine and the converter use: the only package that touches ctypes.

Errors are exceptions, batches and logits are numpy views of llama.cpp's own memory, and its log goes to
Python's logging (logger `llama.cpp`). Only the tokenizer is thread-safe.
"""

import llama_cpp  # before numpy: some CUDA builds crash at model load the other way round

from .adapter import LoraAdapter
from .context import (
    BATCH_INVARIANT_SNAPSHOTS,
    BATCH_INVARIANT_TOKENS,
    HAS_BATCH_INVARIANCE,
    Context,
)
from .context_options import ContextOptions
from .devices import (
    CACHE_TYPES,
    HAS_F16_COPIES,
    Device,
    devices,
    is_quantized,
    keeps_f16_copies,
    row_bytes,
    supports_gpu,
    takes_rows,
)
from .layers import HAS_RING, Ring
from .log import set_up, tapped_log
from .model import Model
from .operands import HAS_OPERANDS
from .patches import READS_OWN_CELLS, patches
from .pipe import wake
from .recurrent_states import HAS_STATE_F16
from .samplers import DrySampler
from .snapshots import SHARED as SHARES_SNAPSHOTS
