"""The checks of abi_checks.py that need a model: how a small context processes a batch.

    python -m qwen_serve.llamacpp.abi_checks_model [MODEL.gguf]

prints for each check whether it holds; the exit status is 1 if one does not.
"""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt

from . import ggml
from .abi_checks import LIBRARY, Check, hidden_rows
from .context import Context
from .context_options import ContextOptions
from .model import Model

EMBEDDED = b"model.input_embed"
"""The embedded tokens of a pass: the tensor's name in llama.cpp's graphs."""

LENGTHS, N_UBATCH = (1, 5, 3), 6
"""Tokens of three sequences, and the most tokens of a pass."""

PASSES = {
    False: [[100, 200, 300], [201, 202, 301, 302], [203, 204]],
    True: [[100, 200, 201, 202, 203, 204], [300, 301, 302]],
}
"""The tokens of each expected pass. With the patch ragged-passes (True), a pass takes one sequence after the
other; without, from each sequence as many as the shortest one has left."""

OPTIONS = ContextOptions(
    n_ctx=64,
    n_seq=len(LENGTHS),
    n_batch=16,
    n_ubatch=16,
    n_outputs=16,
    threads=1,
    threads_batch=1,
    flash_attn="off",
    type_k="f32",
    type_v="f32",
)


def with_model(path: Path) -> list[Check]:
    """Checks with a context of this GGUF on the CPU; it must be a Qwen3.5 with the MTP head."""
    return [
        Check(
            "split_equal", "the order in which prompts are written into a batch", lambda: split_equal(path)
        ),
        Check("output_reserve", "drafts by the MTP head", lambda: output_reserve(path)),
    ]


def split_equal(path: Path) -> str:
    """Checks the passes over a ragged batch (src/llama-batch.cpp)."""
    ragged, found = passes(path)
    return "" if found == PASSES[ragged] else f"tokens are computed as {found}, not {PASSES[ragged]}"


def output_reserve(path: Path) -> str:
    """Checks where hidden rows are, for one output and for more outputs than sequences."""
    model = Model(path, n_gpu_layers=0, load_mtp=True)
    context = Context(model, OPTIONS)
    try:
        context.keep_hidden()
        for n in (1, 5):
            context.clear()
            _decode(context, range(n), range(n), [0] * n)
            size = 4 * context._n_reserved * context._n_vocab
            if different := hidden_rows(context._handle, size).found():
                return different
    finally:
        context.close()
        model.close()
    return ""


def passes(path: Path) -> tuple[bool, list[list[int]]]:
    """Whether passes are ragged, and the tokens of each pass over a batch of `LENGTHS`, in the order of
    computation. The batch is written sequence by sequence.

    A token is recognized by its embedding. A first batch, of one sequence, shows the embeddings of all
    tokens.
    """
    seen: list[npt.NDArray[np.float32]] = []

    def look(pointer: int, ask: bool, _: Any) -> bool:
        tensor = ggml.Tensor.from_address(pointer)
        if tensor.name == EMBEDDED and not ask:
            size = tensor.ne[0] * tensor.ne[1]
            rows = (ctypes.c_float * size).from_address(tensor.data)
            seen.append(np.frombuffer(rows, np.float32).reshape(tensor.ne[1], tensor.ne[0]).copy())
        return bool(tensor.name == EMBEDDED) or not ask

    callback = C.ggml_backend_sched_eval_callback(look)
    tokens = [100 * (s + 1) + i for s, n in enumerate(LENGTHS) for i in range(n)]
    model = Model(path, n_gpu_layers=0)
    context = Context(model, replace(OPTIONS, n_ubatch=N_UBATCH, eval_callback=callback))
    try:
        _decode(context, tokens, range(len(tokens)), [0] * len(tokens))
        known = {row.tobytes(): token for row, token in zip(np.concatenate(seen), tokens, strict=True)}
        seen.clear()
        context.clear()
        positions = [i for n in LENGTHS for i in range(n)]
        _decode(context, tokens, positions, [s for s, n in enumerate(LENGTHS) for _ in range(n)])
    finally:
        context.close()
        model.close()
    return context.ragged_passes, [[known.get(row.tobytes(), -1) for row in rows] for rows in seen]


def _decode(
    context: Context, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int]
) -> None:
    """Decodes the tokens, each with an output."""
    n = len(tokens)
    context.tokens[:n], context.positions[:n], context.sequences[:n] = tokens, positions, sequences
    context.outputs[:n] = 1
    context.decode(n)
    context.wait()


def main(arguments: Sequence[str]) -> int:
    """Prints one line for each check; returns 1 if any fails."""
    failed = 0
    for check in [*LIBRARY, *(each for path in arguments for each in with_model(Path(path)))]:
        different = check.found()
        failed += bool(different)
        print(f"{check.name}: {different or 'as expected'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
