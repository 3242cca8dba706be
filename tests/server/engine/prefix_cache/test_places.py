"""The places of checkpoints in a prompt, without a model."""

import pytest

from tests.server.engine.prefix_cache.test_cache import A, B
from tests.server.engine.prefix_cache.world import World


def test_turns_and_intervals_leave_checkpoints() -> None:
    world = World(interval=64, turn_ids=[1], ids=16)
    system, user = [1, *range(100, 180)], [1, *range(200, 240)]
    world.serve([*system, *user, 1, 5, 6])
    assert world.serve([*system, 77, 78]).reused == len(system)  # after the first message
    assert world.serve([*system, *user, 9, 9]).reused == len(system) + len(user)  # before the answer's turn
    assert world.serve([*system[:70], 9]).reused == 64


@pytest.mark.parametrize(("question", "passes"), [(40, 1), (70, 2)])
def test_on_a_gpu_a_short_turn_is_read_in_one_pass(question: int, passes: int) -> None:
    """A checkpoint at a turn's start would cost a pass in which the GPU could read as many tokens."""
    system = [1, *range(100, 180)]
    prompt = [*system, 1, *range(200, 200 + question), 1, 5, 6]
    steps = []
    for on_gpu in (False, True):
        world = World(turn_ids=[1], ids=16, batch=256, budget=256, on_gpu=on_gpu)
        world.serve([*system, 1, *range(300, 340)])
        world.add(prompt)
        steps.append(world.finish())
    assert steps == [2, passes]


@pytest.mark.parametrize(("length", "passes"), [(40, [1, 2, 1]), (66, [2, 1, 1])])
def test_on_a_gpu_a_short_prompt_leaves_its_end_when_it_comes_again(length: int, passes: list[int]) -> None:
    world = World(ids=16, batch=256, budget=256, on_gpu=True)
    steps, computed = [], []
    for _ in passes:
        before = world.computed
        world.add(range(100, 100 + length))
        steps.append(world.finish())
        computed.append(world.computed - before)
    assert steps == passes
    assert computed[-1] == 1


@pytest.mark.parametrize(("least", "passes"), [(0, 1), (16, 2), (40, 2), (41, 1), (3, 2)])
def test_how_short_is_a_setting(least: int, passes: int) -> None:
    world = World(ids=16, batch=256, budget=256, on_gpu=True, min_tokens=least)
    world.add(range(100, 141))  # 40 tokens and the last
    assert world.finish() == passes


def test_on_a_gpu_too_a_short_turn_that_two_share_is_read_once() -> None:
    world = World(turn_ids=[1], ids=16, batch=256, budget=256, on_gpu=True)
    prompt = [1, *range(100, 180), 1, *range(200, 240), 1, 5, 6]
    twins = [world.add(prompt) for _ in range(2)]
    world.finish()
    assert [twin.reused for twin in twins] == [0, len(prompt) - 1]


@pytest.mark.parametrize("before", [1, 4, 40])
def test_a_picture_leaves_one_checkpoint_at_its_end(before: int) -> None:
    """An interval that ends within the picture leaves no checkpoint, since a prompt has all of a picture or
    nothing."""
    world = World(interval=64, ids=16, batch=256, budget=256)
    shown = [*range(before), *range(-60, 0)]
    world.serve([*shown, *range(500, 520)])
    assert world.cache.stats().checkpoints == 2, "the picture's end and the prompt's"
    assert world.serve([*shown, *range(600, 620)]).reused == len(shown)


def test_checkpoints_a_few_tokens_apart_are_not_worth_it() -> None:
    world = World()
    world.serve(A)
    world.serve(B)
    taken = world.cache.stats().checkpoints
    world.serve([*A[:105], *range(40)])  # leaves A five tokens behind where B did
    assert world.cache.stats().checkpoints == taken + 1  # at its end
