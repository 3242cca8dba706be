"""Rows are sampled where they were computed, in whatever pass and order, and feed the next step there."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp import Context, Model
from qwen_serve.llamacpp.row_results import Status
from qwen_serve.llamacpp.row_sampler import (
    HAS_ROW_SAMPLER,
    Filters,
    Place,
    RowRequest,
    RowSampler,
    sample_rows,
)
from tests.contexts import exact_options

pytestmark = pytest.mark.skipif(not HAS_ROW_SAMPLER, reason="this llama.cpp has no row sampler")

N_SEQ = 8

Batch = dict[int, tuple[int, int]]
"""Tokens of each sequence id, and how many of the last ones have rows."""

BATCHES: dict[str, Batch] = {
    "a step": {0: (1, 1), 1: (1, 1), 2: (1, 1)},
    "a step with free ids between": {0: (1, 1), 2: (1, 1), 3: (1, 1), 6: (1, 1)},
    "ids in descending order": {5: (1, 1), 4: (1, 1), 1: (1, 1)},
    "ends of prompts": {0: (3, 1), 1: (9, 1), 2: (4, 1), 3: (9, 1)},
    "the last pass has no row": {0: (3, 1), 1: (9, 0), 2: (4, 1)},
    "drafts": {4: (5, 5), 1: (2, 2), 2: (5, 5), 3: (1, 1)},
    "several passes of one sequence": {0: (70, 40), 3: (2, 1)},
}


def make(model: Model, place: Place | None, *, unified: bool = True) -> Context:
    options = exact_options(n_ctx=128 * N_SEQ, n_batch=256, n_outputs=128, n_seq=N_SEQ, ahead=True)
    return Context(model, replace(options, unified=unified, n_ubatch=32, row_sampling=place))


def write(context: Context, batch: Batch) -> list[int]:
    """The index in the batch of each row."""
    start = 0
    indices: list[int] = []
    for sequence, (length, n_rows) in batch.items():
        end = start + length
        context.tokens[start:end] = np.random.default_rng(sequence).integers(256, 2000, length)
        context.positions[start:end], context.sequences[start:end] = np.arange(length), sequence
        context.outputs[start:end] = np.arange(length) >= length - n_rows
        indices += range(end - n_rows, end)
        start = end
    return indices


def samplers(model: Model, n: int) -> list[RowSampler]:
    """Of several kinds."""
    kinds = (
        Filters(("best",)),
        Filters(("top_k", "temperature"), 1, top_k=40),
        Filters(("top_p",), 2, top_p=0.9),
    )
    made = [RowSampler(kinds[i % 3], model.n_real) for i in range(n)]
    for one in made[1::2]:
        one.penalise(1.2, 0.5, 0.5, None, [300, 301, 302])
    return made


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("unified", [True, False], ids=["one pool", "own cells"])
@pytest.mark.parametrize("place", Place)
def test_each_row_is_that_of_its_token(model: Model, batch: Batch, unified: bool, place: Place) -> None:
    whole, sampled = make(model, None, unified=unified), make(model, place, unified=unified)
    n = sum(length for length, _ in batch.values())
    indices = write(whole, batch)
    whole.decode(n)
    right = whole.logits(len(indices)).copy()
    write(sampled, batch)
    assert sampled.row_steps is not None
    # every third row is read whole
    requests = [RowRequest(one, n_top=3 * (i % 2) - 1) for i, one in enumerate(samplers(model, len(indices)))]
    for i in range(0, len(requests), 3):
        requests[i] = RowRequest(None)
    sampled.row_steps.begin(requests, indices, now=False)
    sampled.decode(n)
    found = sampled.row_steps.results()
    for i, request in enumerate(requests):
        if request.sampler is None:
            np.testing.assert_allclose(found.whole(i), right[i], atol=1e-4)
            continue
        # chosen from the same logits but for the shape of a batch
        assert found.statuses[i] == Status.OK
        assert found.tokens[i] == sample_rows([request], [right[i]]).tokens[0]
        if request.n_top >= 0:
            logprobs = right[i].astype(np.float64) - np.log(np.exp(right[i].astype(np.float64)).sum())
            assert found[i].logprob == pytest.approx(logprobs[found.tokens[i]], abs=1e-3)
    whole.close()
    sampled.close()


def test_behind_a_batch_only_the_last_pass_is_there(model: Model) -> None:
    context = make(model, Place.DEVICE, unified=False)
    indices = write(context, BATCHES["a step with free ids between"])
    context.decode(4)
    assert context.row_steps is not None
    assert context.row_steps.n_in_order == 0
    context.row_steps.begin([RowRequest(one) for one in samplers(model, 4)], indices, now=True)
    assert context.row_steps.results().statuses == [Status.MISSING] * 3 + [Status.OK]
    context.close()


def test_the_next_step_reads_what_was_chosen(model: Model) -> None:
    """Without the host; and some tokens from the batch."""
    context, plain = make(model, Place.DEVICE), make(model, None)
    batch, choosing = BATCHES["a step"], samplers(model, 3)
    assert context.runs_ahead
    assert context.row_steps is not None
    for one in (context, plain):
        write(one, batch)
        one.decode(3)
    context.row_steps.begin([RowRequest(one) for one in choosing], range(3), now=True)
    context.positions[:3] = plain.positions[:3] = 1
    context.tokens[:3] = (7, 400, 7)
    context.decode(3, next_rows=np.array([2, -1, 0], np.int32))
    tokens = context.row_steps.results().tokens
    plain.tokens[:3] = tokens[2], 400, tokens[0]
    plain.decode(3)
    context.row_steps.begin([RowRequest(None)] * 3, range(3), now=True)
    found = context.row_steps.results()
    for row, logits in enumerate(plain.logits(3)):
        np.testing.assert_allclose(found.whole(row), logits, atol=1e-4)
    context.close()
    plain.close()


@pytest.mark.parametrize("unified", [True, False], ids=["one pool", "own cells"])
def test_hidden_rows_that_are_read_late_are_in_the_order_of_the_batch(model: Model, unified: bool) -> None:
    context = make(model, Place.DEVICE, unified=unified)
    context.keep_hidden()
    batch = {5: (9, 1), 2: (3, 1), 3: (9, 1)}
    n = sum(length for length, _ in batch.values())

    def hidden(late: bool) -> npt.NDArray[np.float32]:
        context.clear()
        write(context, batch)
        context.decode(n)
        if not late:
            return context.hidden(n).copy()
        write(context, {0: (1, 1)})
        assert context.keeps_rows(1, 1, 1)
        context.decode(1)
        return context.hidden(n).copy()

    right = hidden(late=False)
    np.testing.assert_allclose(hidden(late=True)[1:], right[1:], atol=1e-4)
    context.close()
