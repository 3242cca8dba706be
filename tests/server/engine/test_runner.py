"""When the rows of a batch are sampled."""

from collections.abc import Sequence
from typing import cast

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.row_sampler import RowRequest
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.profile import StepProfile
from qwen_serve.server.engine.request import Request, RequestStatus
from qwen_serve.server.engine.runner import Runner
from qwen_serve.server.engine.sampling import Sampler
from tests.server.engine.fake_context import FakeContext


class Asks:
    """A sampler that is asked for requests only."""

    def constrained(self, draft: Sequence[int]) -> None: ...

    def requests(self, draft: Sequence[int], n_top: int, masks: Sequence[object]) -> list[RowRequest]:
        return [RowRequest(None)] * (len(draft) + 1)


def batch_of(*lengths: int, decoding: bool) -> Batch:
    batch = Batch()
    for slot, length in enumerate(lengths):
        one = Request([300] * length, 5000, cast("Sampler", Asks()))
        one.slot, one.status = slot, RequestStatus.DECODE if decoding else RequestStatus.PREFILL
        batch.add(one, length)
    return batch


def test_a_step_of_one_pass_is_sampled_behind_it() -> None:
    context = FakeContext(n_ubatch=64)
    runner = Runner(cast("Context", context), StepProfile())
    step = runner.launch(batch_of(1, 1, 1, decoding=True))
    assert not context.row_steps.begun
    runner.sample(step)
    assert context.row_steps.begun == [(3, True)]


def test_several_passes_are_sampled_one_by_one() -> None:
    """The logits of a pass are written over by the next one."""
    context = FakeContext(n_ubatch=64)
    runner = Runner(cast("Context", context), StepProfile())
    step = runner.launch(batch_of(40, 30, decoding=False))
    runner.sample(step)
    assert context.row_steps.begun == [(2, False)]


def test_what_a_batch_dropped_is_not_sampled() -> None:
    context = FakeContext(n_ubatch=64)
    runner = Runner(cast("Context", context), StepProfile())
    batch = batch_of(1, 1, 1, decoding=True)
    step = runner.launch(batch)
    batch.drop(batch.chunks[1].sequence)
    runner.sample(step)
    assert context.row_steps.begun == [(2, True)]
