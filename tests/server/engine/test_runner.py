"""The part of each slot's row that is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from qwen_serve.llamacpp import DeviceSampler
from qwen_serve.server.engine.batch import Batch
from qwen_serve.server.engine.profile import StepProfile
from qwen_serve.server.engine.runner import PATIENCE, Runner
from qwen_serve.server.engine.sequence import Sequence, SequenceStatus
from tests.server.engine.fake_context import FakeContext

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Context
    from qwen_serve.server.engine.sampling import Sampler


class Needs:
    """A sampler that is never called."""

    def __init__(self, need: DeviceSampler) -> None:
        self.need, self.never_fetches = need, True


class Device:
    """A runner with device samplers, and sequences that decode."""

    def __init__(self) -> None:
        self.context = FakeContext(n_ubatch=64, n_samplers=4)
        self.runner = Runner(cast("Context", self.context), StepProfile())
        self.sequences: list[Sequence] = []

    def come(self, need: DeviceSampler = DeviceSampler.BEST) -> Sequence:
        """Add a sequence in the next slot."""
        one = Sequence([300], 5000, cast("Sampler", Needs(need)))
        one.slot = len(self.sequences)
        self.sequences.append(one)
        return one

    def decode(self) -> None:
        """Decode the pending tokens of all sequences."""
        batch = Batch()
        for one in self.sequences:
            batch.add(one, one.pending)
        self.runner.collect(self.runner.launch(batch))
        for one in self.sequences:
            one.computed = len(one.tokens)
            one.tokens.append(7)
            one.status = SequenceStatus.DECODE


def test_a_slot_is_read_out_as_its_request_needs() -> None:
    device = Device()
    device.come()
    device.decode()
    assert device.runner.sampler_changes == 0
    device.come(DeviceSampler.ROW)
    device.decode()
    assert device.context.samplers.kinds[1] is DeviceSampler.ROW
    device.come(DeviceSampler.TOP_K)
    device.decode()
    device.decode()
    assert device.runner.sampler_changes == 2


def test_a_slot_goes_back_to_less_after_a_while() -> None:
    device = Device()
    one = device.come(DeviceSampler.ROW)
    device.decode()
    one.sampler = cast("Sampler", Needs(DeviceSampler.BEST))
    for _ in range(PATIENCE):
        device.decode()
    assert device.context.samplers.kinds == [DeviceSampler.ROW] + [DeviceSampler.BEST] * 3
    device.decode()
    assert device.context.samplers.kinds == [DeviceSampler.BEST] * 4


def test_a_sequence_gets_a_slot_that_tells_enough() -> None:
    device = Device()
    runner, kinds = device.runner, device.context.samplers.kinds
    kinds[:] = [DeviceSampler.BEST, DeviceSampler.ROW, DeviceSampler.TOP_K, DeviceSampler.BEST]

    def place(need: DeviceSampler, *free: int) -> int:
        return runner.place(Sequence([1], 1, cast("Sampler", Needs(need))), free)

    assert place(DeviceSampler.TOP_K, 0, 1, 2, 3) == 2
    assert place(DeviceSampler.TOP_K, 0, 1, 3) == 1
    assert place(DeviceSampler.TOP_K, 0, 3) == 0
    assert place(DeviceSampler.BEST, 1, 2, 3) == 3
    assert place(DeviceSampler.BEST, 1, 2) == 1
    device.context.samplers.active = False
    assert place(DeviceSampler.ROW, 2, 3) == 2
