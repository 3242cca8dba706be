"""States that were evicted from the device return from host memory. A failure costs only that state."""

import pytest

from tests.server.engine.prefix_cache.test_cache import A
from tests.server.engine.prefix_cache.world import World


def test_evicted_checkpoints_come_back_from_host_memory() -> None:
    world = World(ids=2, host_bytes=600, slots=1)
    long = list(range(300))
    world.serve(long)
    for n in range(3):
        world.serve([n + 5000, *range(60)])
    assert world.serve(long).reused == 299
    stats = world.cache.stats()
    assert (stats.restores, stats.host_bytes) == (1, 299)


def test_host_memory_has_its_own_budget_and_order() -> None:
    world = World(ids=1, host_bytes=450, slots=1)
    prompts = [[n, *range(200)] for n in range(4)]
    for prompt in prompts:
        world.serve(prompt)
    assert world.cache.stats().host_bytes <= 450
    assert world.serve(prompts[0]).reused == 0
    assert world.serve(prompts[2]).reused == 200


def test_a_state_may_come_back_though_its_copy_has_to_leave_for_what_makes_room() -> None:
    world = World(slots=1, ids=3, total_cells=420, host_bytes=260)
    old = list(range(250))
    world.serve(old)
    for n in range(2):
        world.serve([n + 5000, *range(180)])
    assert world.serve(old).reused in (0, 249)
    world.check()
    for n in range(6):
        world.serve([*old[: 130 + 20 * n], 7, 7, 7])
        world.serve([n + 5000, *range(180)])
        world.check()


def test_a_sequence_that_failed_leaves_nothing_of_its_answer() -> None:
    world = World()
    sequence = world.add(A, 60)
    for _ in range(40):
        world.step()
    world.scheduler.remove(sequence, failed=True)
    assert world.serve(sequence.tokens).reused == len(A) - 1


def test_a_state_larger_than_host_memory_is_gone() -> None:
    world = World(ids=1, host_bytes=100, slots=1)
    world.serve(list(range(300)))
    world.serve(list(range(500, 550)))
    assert world.serve(list(range(300))).reused == 0
    assert world.cache.stats().host_bytes == 0


def test_a_copy_to_host_memory_that_fails_costs_the_copy_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ids=1, host_bytes=10_000, slots=1)
    prompts = [[n, *range(200)] for n in range(3)]
    world.serve(prompts[0])
    world.context.fails_to_save = True
    for prompt in prompts[1:]:
        world.serve(prompt)
    stats = world.cache.stats()
    assert (stats.failed_copies, stats.evictions, stats.host_checkpoints) == (2, 2, 0)
    assert "a checkpoint of 200 tokens could not be saved: no host memory" in caplog.text
    assert [world.serve(prompts[n]).reused for n in (2, 1)] == [200, 0]
    world.context.fails_to_save = False
    assert [world.serve(prompts[n]).reused for n in (2, 1)] == [0, 200], "copies are made again"


def test_a_copy_that_can_not_come_back_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    world = World(ids=1, host_bytes=10_000, slots=1)
    prompts = [[n, *range(200)] for n in range(3)]
    for prompt in prompts:
        world.serve(prompt)
    assert world.cache.stats().host_checkpoints == 2
    world.context.fails_to_restore = True
    assert world.serve(prompts[0]).reused == 0
    stats = world.cache.stats()
    assert (stats.failed_copies, stats.restores) == (1, 0)
    assert "could not be restored: no cells" in caplog.text
    world.context.fails_to_restore = False
    assert world.serve(prompts[1]).reused == 200
    assert world.cache.stats().restores == 1
