"""A step's graph is reused for steps of other sequences."""

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.patches import patches
from qwen_serve.llamacpp.row_sampler import Place, RowRequest
from tests.contexts import exact_options

N_SEQ, LENGTH = 3, 60
ANY_SEQUENCES = "any-sequences"


@pytest.mark.parametrize("place", [None, Place.DEVICE])
def test_a_step_of_other_sequences_has_the_graph_of_the_step_before(
    model: Model, place: Place | None
) -> None:
    """One sequence between two others leaves and another joins; each has the logits that it has alone."""
    if ANY_SEQUENCES not in patches():
        pytest.skip("llama.cpp has no patch any-sequences")
    tokens = np.random.default_rng(2).integers(256, 2000, (N_SEQ, LENGTH))

    def steps(*which: tuple[int, ...]) -> dict[tuple[int, int], npt.NDArray[np.float32]]:
        options = exact_options(n_ctx=256, n_batch=256, n_outputs=256, n_seq=N_SEQ + 1, row_sampling=place)
        context, held, found = Context(model, options), [20] * N_SEQ, {}
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
            if context.row_steps is not None:
                context.row_steps.begin([RowRequest(None)] * n, range(n), now=True)
                results = context.row_steps.results()
            for row, sequence in enumerate(some):
                logits = context.logits(n)[row] if context.row_steps is None else results.whole(row)
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
        for at, row in steps(*[(sequence,)] * n).items():
            np.testing.assert_allclose(together[at], row, atol=1e-4)
