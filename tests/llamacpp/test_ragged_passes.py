"""One pass reads sequences of any lengths, each with the logits and the state that it has alone."""

from dataclasses import replace

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.context import HAS_BATCH_INVARIANCE
from qwen_serve.llamacpp.ggml import Tensor
from qwen_serve.llamacpp.patches import RAGGED_PASSES, brings
from qwen_serve.server.engine.ubatches import ubatches
from tests.contexts import exact_options

Rows = dict[tuple[int, int], npt.NDArray[np.float32]]
"""Logits by sequence and position."""

Call = dict[int, int] | tuple[int, int]

CELLS = 512
PARTS = {0: 7, 1: 30, 2: 1, 3: 19, 4: 30}
MORE = {4: 3, 3: 12, 0: 2}
STEP = dict.fromkeys(range(5), 1)


def read(
    model: Model,
    *calls: Call,
    n_ubatch: int = 256,
    all_rows: bool = False,
    states: dict[int, bytes] | None = None,
    **options: int,
) -> tuple[Rows, list[int]]:
    """(rows of each sequence's last tokens in each call, or of all, number of tokens of each pass).

    A call is how many tokens each sequence reads, or a copy from one to another.

    The states at the end are put in `states`.
    """
    passes: list[int] = []

    def look(address: int, ask: bool, _data: object) -> bool:
        tensor = Tensor.from_address(address)
        if ask and tensor.name == b"attn_norm-0":
            passes.append(tensor.ne[1])
        return False

    callback = C.ggml_backend_sched_eval_callback(look)
    exact = exact_options(
        n_ctx=CELLS * (1 if options.get("unified", True) else len(PARTS)),
        n_batch=256,
        n_outputs=256 if all_rows else len(PARTS),
        n_seq=len(PARTS),
        eval_callback=callback,
        **options,
    )
    context = Context(model, replace(exact, n_ubatch=n_ubatch))
    tokens = np.random.default_rng(1).integers(256, 2000, (len(PARTS), 128))
    held, rows = dict.fromkeys(PARTS, 0), {}
    for call in calls:
        if isinstance(call, tuple):
            context.copy(*call)
            held[call[1]] = held[call[0]]
            continue
        ids, n = [*call], 0
        ended: list[tuple[int, int]] = []
        left = dict(call)
        tail = context.n_snapshots + 1 if context.n_snapshots else 0
        for one in ubatches([*call.values()], n_ubatch, tail, ragged=context.ragged_passes):
            for index, length in one:
                which, end, at = ids[index], n + length, held[ids[index]]
                context.tokens[n:end] = tokens[which, at : at + length]
                context.positions[n:end] = np.arange(at, at + length)
                context.sequences[n:end], context.outputs[n:end] = which, all_rows
                left[which] -= length
                n = end
                if not left[which]:
                    context.outputs[n - 1] = 1
                first = 1 if all_rows else length
                ended += [(which, at + i) for i in range(first, length + 1) if all_rows or not left[which]]
                held[which] += length
        context.decode(n)
        for place, row in zip(ended, context.logits(len(ended)), strict=True):
            rows[place] = row.copy()
    if states is not None:
        states.update((which, context.save(which).tobytes()) for which in held if held[which])
    context.close()
    return rows, passes


def one_by_one(*calls: Call) -> list[Call]:
    """The same, with a call for each sequence."""
    apart: list[Call] = []
    for call in calls:
        apart += [call] if isinstance(call, tuple) else [{which: n} for which, n in call.items()]
    return apart


def same_as_alone(model: Model, together: Rows, *calls: Call, all_rows: bool = False) -> None:
    for place, row in read(model, *one_by_one(*calls), all_rows=all_rows)[0].items():
        np.testing.assert_allclose(together[place], row, atol=1e-4)


@pytest.fixture(autouse=True)
def _needs_the_patch() -> None:
    if not brings(RAGGED_PASSES, "llama_ragged_passes"):
        pytest.skip("llama.cpp has no patch ragged-passes")


def test_prompts_of_several_lengths_are_one_pass(model: Model) -> None:
    calls = (PARTS, MORE, STEP, STEP)
    together, passes = read(model, *calls)
    assert passes == [sum(call.values()) for call in calls]
    same_as_alone(model, together, *calls)


def test_a_pass_is_full_before_another_one_begins(model: Model) -> None:
    together, passes = read(model, PARTS, STEP, n_ubatch=60)
    assert passes == [60, 27, 5]
    same_as_alone(model, together, PARTS, STEP)


def test_ends_stay_whole_where_snapshots_are_kept(model: Model) -> None:
    calls = (PARTS, {1: 70}, STEP)
    together, passes = read(model, *calls, n_ubatch=39, n_snapshots=3)
    assert passes == [39, 39, 9, 39, 31, 5]
    same_as_alone(model, together, *calls)
    # 1 token of the last part's 3 would fit, 2 of them be left
    assert read(model, {0: 37, 1: 3}, n_ubatch=38, n_snapshots=3)[1] == [37, 3]


def test_verifications_of_several_lengths_are_one_pass(model: Model) -> None:
    verified = {0: 5, 1: 1, 3: 3, 4: 4}
    together, passes = read(model, PARTS, verified, STEP, all_rows=True)
    assert passes == [sum(PARTS.values()), 13, 5]
    same_as_alone(model, together, PARTS, verified, STEP, all_rows=True)


def test_a_copy_and_its_source_go_on_in_one_pass(model: Model) -> None:
    calls: tuple[Call, ...] = (
        {0: 9, 1: 4},
        (0, 2),
        (0, 3),
        {3: 2, 0: 3, 2: 5, 4: 6},
        (2, 4),
        {4: 2, 2: 1, 1: 3},
        STEP,
    )
    together, passes = read(model, *calls)
    assert passes == [13, 16, 6, 5]
    same_as_alone(model, together, *calls)


@pytest.mark.skipif(not HAS_BATCH_INVARIANCE, reason="the build's rows depend on how many are computed")
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 9), min_size=1), min_size=1, max_size=5))
def test_batch_invariant_bits_do_not_depend_on_the_pass(model: Model, calls: list[dict[int, int]]) -> None:
    states: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
    together, _ = read(model, *calls, all_rows=True, states=states[0], batch_invariant=True)
    singly = [{which: 1} for call in calls for which, n in call.items() for _ in range(n)]
    apart, _ = read(model, *singly, all_rows=True, states=states[1], batch_invariant=True)
    assert together.keys() == apart.keys()
    for place, row in apart.items():
        np.testing.assert_array_equal(together[place], row)
    assert states[0] == states[1]


def test_sequences_with_cells_of_their_own_are_read_in_equal_parts(model: Model) -> None:
    together, passes = read(model, PARTS, STEP, unified=False)
    assert len(passes) > 2
    same_as_alone(model, together, PARTS, STEP)
