"""A step's graph is reused for steps of other sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from qwen_serve.llamacpp import DeviceSampler, Model
from qwen_serve.llamacpp.patches import patches
from tests.llamacpp.test_device_sampler import LENGTH, N_SEQ, make

if TYPE_CHECKING:
    import numpy.typing as npt

ANY_SEQUENCES = "any-sequences"


@pytest.mark.parametrize("kind", [None, DeviceSampler.BEST])
def test_a_step_of_other_sequences_has_the_graph_of_the_step_before(
    model: Model, kind: DeviceSampler | None
) -> None:
    """One sequence between two others leaves and another joins; each has the logits that it has alone."""
    if ANY_SEQUENCES not in patches():
        pytest.skip("llama.cpp has no patch any-sequences")
    tokens = np.random.default_rng(2).integers(256, 2000, (N_SEQ, LENGTH))

    def steps(*which: tuple[int, ...]) -> dict[tuple[int, int], npt.NDArray[np.float32]]:
        context, held, found = make(model, kind), [20] * N_SEQ, {}
        for sequence in range(N_SEQ):
            context.tokens[:20], context.positions[:20] = tokens[sequence, :20], np.arange(20)
            context.sequences[:20], context.outputs[:20] = sequence, 0
            context.decode(20)
        for index, some in enumerate(which):
            n = len(some)
            context.tokens[:n] = [tokens[sequence, held[sequence]] for sequence in some]
            context.positions[:n] = [held[sequence] for sequence in some]
            context.sequences[:n], context.outputs[:n] = some, 1
            before = context.graphs_reused
            context.decode(n)
            rows = context.rows(some, range(n))
            for row, sequence in enumerate(some):
                logits = rows.logits(row) if kind is None else rows.fetch(row)
                found[sequence, held[sequence]] = logits.copy()
                held[sequence] += 1
            if index:
                reused.append(context.graphs_reused - before)
        context.close()
        return found

    reused: list[int] = []
    together = steps((0, 1), (0, 2), (2, 1), (0, 2))
    assert reused == [1, 1, 1]
    for sequence in range(N_SEQ):
        n = sum(which == sequence for which, _ in together)
        for place, row in steps(*[(sequence,)] * n).items():
            np.testing.assert_allclose(together[place], row, atol=1e-4)
