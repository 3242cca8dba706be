"""When the interpreter's lock is held over a decode, and what is read out of which slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from server.engine.batch import Batch
from server.engine.errors import NoMemorySlot
from server.engine.llama import DeviceSampler
from server.engine.profile import StepProfile
from server.engine.runner import PATIENCE, Runner
from server.engine.sequence import Sequence
from tests.server.engine.fake_context import FakeContext

if TYPE_CHECKING:
    from server.engine.llama import Context
    from server.engine.sampling import Sampler


class Needs:
    """A sampler that never samples."""

    def __init__(self, need: DeviceSampler) -> None:
        self.need = need


class Device:
    """A runner on a device that computes by itself, and sequences that decode on it."""

    def __init__(self, *, alone: bool = True, n_samplers: int = 4, n_ubatch: int = 64) -> None:
        self.context = FakeContext(n_ubatch=n_ubatch, n_samplers=n_samplers)
        self.runner = Runner(cast("Context", self.context), StepProfile(), device_runs_alone=alone)
        self.sequences: list[Sequence] = []

    def come(self, need: DeviceSampler = DeviceSampler.BEST, prompt: int = 1) -> Sequence:
        """One more, in the next slot."""
        one = Sequence([300] * prompt, 5000, cast("Sampler", Needs(need)))
        one.slot = len(self.sequences)
        self.sequences.append(one)
        return one

    def decode(self, *chosen: Sequence) -> bool:
        """What is pending of some, or of all; whether the lock was held."""
        batch = Batch()
        for one in chosen or self.sequences:
            batch.add(one, one.pending)
        self.runner.launch(batch)
        self.runner.collect(batch)
        for one in chosen or self.sequences:
            one.computed = len(one.tokens)
            one.tokens.append(7)
            one.decoding = True
        return self.context.decodes[-1][1]


def test_a_graph_of_a_new_shape_is_built_with_the_lock_held() -> None:
    device = Device()
    first = device.come()
    assert [device.decode() for _ in range(3)] == [True, False, False]
    device.come()
    assert [device.decode() for _ in range(3)] == [True, False, False]
    assert device.decode(first), "who has gone leaves another shape"


@pytest.mark.parametrize("how", [{"alone": False}, {"n_samplers": 0}, {"n_ubatch": 2}])
def test_nowhere_else_is_it_held(how: dict[str, int]) -> None:
    """Where the host computes, where nothing calls back, and where one ubatch waits for another."""
    device = Device(**how)  # type: ignore[arg-type]
    for _ in range(3):
        device.come(prompt=3)
        assert not device.decode()


def test_it_is_not_held_as_graphs_are_planned_anew() -> None:
    """After a change of what is read out of a slot llama.cpp plans its largest graphs: that takes long."""
    device = Device()
    device.come()
    assert device.decode()
    device.come(DeviceSampler.ROW)
    assert not device.decode(), "a new shape, and a new plan"
    assert device.context.samplers.kinds[1] is DeviceSampler.ROW
    assert device.runner.sampler_changes == 1
    device.come()
    assert device.decode(), "a new shape alone"
    device.come(DeviceSampler.TOP_K)
    assert not device.decode()
    assert device.runner.sampler_changes == 2


def test_nor_when_a_slot_goes_back_to_less() -> None:
    device = Device()
    one = device.come(DeviceSampler.ROW)
    device.decode()
    one.sampler = cast("Sampler", Needs(DeviceSampler.BEST))
    for _ in range(PATIENCE):
        device.decode()
    assert device.context.samplers.kinds == [DeviceSampler.ROW] + [DeviceSampler.BEST] * 3
    device.come()
    assert not device.decode(), "another shape, and a plan for it"
    assert device.context.samplers.kinds == [DeviceSampler.BEST] * 4


def test_a_plan_that_was_not_carried_out_is_still_to_come() -> None:
    device = Device()
    one = device.come(DeviceSampler.ROW)
    decode = device.context.decode
    device.context.decode = full  # type: ignore[method-assign,assignment]
    with pytest.raises(NoMemorySlot):
        device.decode()
    device.context.decode = decode  # type: ignore[method-assign]
    device.come()
    device.sequences.remove(one)
    assert not device.decode()


def full(_n: int, *, hold: bool = False) -> None:
    raise NoMemorySlot("no room")


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
