"""`llama_model_quantize`."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp as api

from .bindings import FLOATS, failure, log_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .bindings import Floats


def quantize_file(
    source: Path,
    target: Path,
    *,
    file_type: int,
    overrides: Sequence[tuple[str, int]] = (),
    imatrix: Mapping[str, Floats] | None = None,
    metadata: Mapping[str, str | int] | None = None,
    threads: int = 0,
    on_tensor: Callable[[int, str], None] = lambda total, name: None,
) -> None:
    """`llama_model_quantize`: writes `source` to `target` as `file_type` (enum llama_ftype).

    Args:
        overrides: (regular expression, enum ggml_type), the first that is found in a tensor's name decides.
        imatrix: mean squared input per column, by tensor name.
        metadata: keys to add to the output; strings are cut at llama.cpp's 127 bytes.
        on_tensor: called with (number of tensors, name) as each begins.

    Raises:
        LlamaError: llama.cpp gave up; `target` may be there, incomplete.
    """

    def follow(line: str) -> None:
        # "[  12/ 340]  blk.0.attn_k.weight  - [...]": printed as each tensor's turn comes
        if line.startswith("[") and "]" in line:
            counts, _, rest = line[1:].partition("]")
            on_tensor(int(counts.partition("/")[2]), rest.split()[0])

    params = api.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, file_type
    columns = {name: np.ascontiguousarray(values, np.float32) for name, values in (imatrix or {}).items()}
    if overrides:
        params.tt_overrides = (api.llama_model_tensor_override * (len(overrides) + 1))(
            *((pattern.encode(), kind) for pattern, kind in overrides), (None, api.GGML_TYPE_COUNT)
        )
    if columns:
        params.imatrix = (api.llama_model_imatrix_data * (len(columns) + 1))(
            *((name.encode(), values.ctypes.data_as(FLOATS), values.size) for name, values in columns.items())
        )
    if metadata:
        params.kv_overrides = (api.llama_model_kv_override * (len(metadata) + 1))(
            *(_kv_override(key, value) for key, value in metadata.items())
        )
    with log_to(follow):
        code = api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code != 0:
        raise failure(f"llama.cpp cannot quantize {source} to {target}")


def _kv_override(key: str, value: str | int) -> Any:
    entry = api.llama_model_kv_override()
    entry.key = key.encode()
    if isinstance(value, int):
        entry.tag, entry.value.val_i64 = api.LLAMA_KV_OVERRIDE_TYPE_INT, value
    else:
        entry.tag, entry.value.val_str = api.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()[:127]
    return entry
