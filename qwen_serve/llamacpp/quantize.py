"""`llama_model_quantize`."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING, Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
from gguf import GGMLQuantizationType

from .errors import LlamaError
from .log import reason, set_up, tapped_log
from .mixture import STOCK, Mixture

FLOATS = ctypes.POINTER(ctypes.c_float)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .probe import Floats


def quantize_file(
    source: Path,
    target: Path,
    *,
    file_type: int,
    overrides: Sequence[tuple[str, int]] = (),
    mixture: Mixture = STOCK,
    imatrix: Mapping[str, Floats] | None = None,
    metadata: Mapping[str, str | int] | None = None,
    threads: int = 0,
    on_tensor: Callable[[int, str], None] = lambda total, name: None,
) -> None:
    """`llama_model_quantize`: writes `source` to `target` as `file_type` (enum llama_ftype).

    Args:
        overrides: (regular expression, enum ggml_type); the first that matches a tensor's name decides.
        imatrix: mean squared input per column, by tensor name.
        metadata: keys to add to the output; strings are cut at llama.cpp's 127 bytes.
        on_tensor: called with (number of tensors, name) as each begins.

    Raises:
        LlamaError: llama.cpp failed; `target` may exist, incomplete.
    """

    def follow(line: str) -> None:
        # "[  12/ 340]  blk.0.attn_k.weight  - [...]": printed as each tensor's turn comes
        if line.startswith("[") and "]" in line:
            counts, _, rest = line[1:].partition("]")
            on_tensor(int(counts.partition("/")[2]), rest.split()[0])

    columns = {name: np.ascontiguousarray(values, np.float32) for name, values in (imatrix or {}).items()}
    params = _params(file_type, overrides, mixture, columns)
    params.nthread = threads
    if metadata:
        params.kv_overrides = (C.llama_model_kv_override * (len(metadata) + 1))(
            *(_kv_override(key, value) for key, value in metadata.items())
        )
    set_up()
    with tapped_log(follow) as log:
        code = C.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if code != 0:
        raise LlamaError(f"llama.cpp cannot quantize {source} to {target}: {reason(log)}")


_PLANNED = re.compile(
    r"\[ *\d+/ *(\d+)\] (\S+) .*type = +(\w+), size = [^\n]*?MiB(?: -> .*MiB \((\w+)\))?$", re.MULTILINE
)
"""A dry run's line for a tensor: number of tensors, name, type, and the new type if it differs."""


def quantized_types(
    source: Path,
    *,
    file_type: int,
    overrides: Sequence[tuple[str, int]] = (),
    mixture: Mixture = STOCK,
    weighted: bool = True,
) -> dict[str, GGMLQuantizationType]:
    """The type of each tensor after `quantize_file` of `source`, `weighted` by an importance matrix or not.

    Reads no weights: `source` may be a header without data (a sparse file).

    Raises:
        LlamaError: llama.cpp failed, or its log has an unknown form.
    """
    lines: list[str] = []
    # an importance matrix changes the types of some tensors
    columns = {"any": np.ones(1, np.float32)} if weighted else {}
    params = _params(file_type, overrides, mixture, columns)
    params.dry_run = True
    set_up()
    with tapped_log(lines.append) as log:
        code = C.llama_model_quantize(os.fsencode(source), os.fsencode(os.devnull), ctypes.byref(params))
    if code != 0:
        raise LlamaError(f"llama.cpp cannot quantize {source}: {reason(log)}")
    found = list(_PLANNED.finditer("".join(lines)))
    if not found or len(found) != int(found[0][1]):
        raise LlamaError(f"{source}: llama.cpp's dry run told the types of {len(found)} tensors")
    return {one[2]: GGMLQuantizationType[(one[4] or one[3]).upper()] for one in found}


def _params(
    file_type: int, overrides: Sequence[tuple[str, int]], mixture: Mixture, columns: Mapping[str, Floats]
) -> Any:
    """`llama_model_quantize_params`; `columns` must outlive it."""
    params = C.llama_model_quantize_default_params()
    params.ftype = file_type
    params.pure = mixture.pure
    if mixture.output is not None:
        params.output_tensor_type = mixture.output
    if mixture.embedding is not None:
        params.token_embedding_type = mixture.embedding
    if overrides:
        params.tt_overrides = (C.llama_model_tensor_override * (len(overrides) + 1))(
            *((pattern.encode(), kind) for pattern, kind in overrides), (None, C.GGML_TYPE_COUNT)
        )
    if columns:
        params.imatrix = (C.llama_model_imatrix_data * (len(columns) + 1))(
            *((name.encode(), values.ctypes.data_as(FLOATS), values.size) for name, values in columns.items())
        )
    return params


def _kv_override(key: str, value: str | int) -> Any:
    entry = C.llama_model_kv_override()
    entry.key = key.encode()
    if isinstance(value, int):
        entry.tag, entry.value.val_i64 = C.LLAMA_KV_OVERRIDE_TYPE_INT, value
    else:
        entry.tag, entry.value.val_str = C.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()[:127]
    return entry
