"""One pass reads prompts of different lengths, each with the logits that it has alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import pytest

from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.ggml import Tensor
from qwen_serve.llamacpp.patches import RAGGED_PASSES, brings
from qwen_serve.server.engine.ubatches import ubatches
from tests.contexts import exact_options

if TYPE_CHECKING:
    import numpy.typing as npt

    Rows = dict[tuple[int, int], npt.NDArray[np.float32]]
    """Logits by sequence and position."""

CELLS = 512
PARTS = {0: 7, 1: 30, 2: 1, 3: 19, 4: 30}
MORE = {4: 3, 3: 12, 0: 2}
STEP = dict.fromkeys(range(5), 1)


def read(
    model: Model, *calls: dict[int, int], n_ubatch: int = 256, unified: bool = True
) -> tuple[Rows, list[int]]:
    """(rows of each sequence's last tokens in each call, number of tokens of each pass)."""
    passes: list[int] = []

    def look(address: int, ask: bool, _data: object) -> bool:
        tensor = Tensor.from_address(address)
        if ask and tensor.name == b"attn_norm-0":
            passes.append(tensor.ne[1])
        return False

    callback = C.ggml_backend_sched_eval_callback(look)
    options = exact_options(
        n_ctx=CELLS * (1 if unified else len(PARTS)),
        n_batch=256,
        n_outputs=len(PARTS),
        n_seq=len(PARTS),
        unified=unified,
        eval_callback=callback,
    )
    context = Context(model, replace(options, n_ubatch=n_ubatch))
    tokens = np.random.default_rng(1).integers(256, 2000, (len(PARTS), 128))
    held, rows = dict.fromkeys(PARTS, 0), {}
    for call in calls:
        ids, n, ended = [*call], 0, []
        most = context.most_lengths if sum(call.values()) > len(call) else 1
        left = dict(call)
        for one in ubatches([*call.values()], n_ubatch, most_lengths=most):
            for index, length in one:
                which, end, at = ids[index], n + length, held[ids[index]]
                context.tokens[n:end] = tokens[which, at : at + length]
                context.positions[n:end] = np.arange(at, at + length)
                context.sequences[n:end], context.outputs[n:end] = which, 0
                held[which] += length
                left[which] -= length
                n = end
                if not left[which]:
                    context.outputs[n - 1] = 1
                    ended.append(which)
        context.decode(n)
        for which, row in zip(ended, context.logits(len(ended)), strict=True):
            rows[which, held[which]] = row.copy()
    context.close()
    return rows, passes


def same_as_alone(model: Model, together: Rows, *calls: dict[int, int]) -> None:
    apart = [{which: n} for call in calls for which, n in call.items()]
    for place, row in read(model, *apart)[0].items():
        np.testing.assert_allclose(together[place], row, atol=1e-4)


@pytest.fixture(autouse=True)
def _needs_the_patch() -> None:
    if not brings(RAGGED_PASSES, "llama_n_runs_max"):
        pytest.skip("llama.cpp has no patch ragged-passes")


def test_prompts_of_several_lengths_are_one_pass(model: Model) -> None:
    calls = (PARTS, MORE, STEP, STEP)
    together, passes = read(model, *calls)
    assert passes == [sum(call.values()) for call in calls]
    same_as_alone(model, together, *calls)


def test_what_does_not_fit_is_read_in_equal_parts_first(model: Model) -> None:
    together, passes = read(model, PARTS, STEP, n_ubatch=84)
    assert passes == [5, 82, 5]
    same_as_alone(model, together, PARTS, STEP)


def test_sequences_with_cells_of_their_own_are_read_in_equal_parts(model: Model) -> None:
    together, passes = read(model, PARTS, STEP, unified=False)
    assert len(passes) > 2
    same_as_alone(model, together, PARTS, STEP)
