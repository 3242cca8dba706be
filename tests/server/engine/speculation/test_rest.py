"""Rests grow with each no, and end with a yes."""

from __future__ import annotations

from server.engine.speculation.rest import Rest


def steps_until_over(rest: Rest) -> int:
    steps = 0
    while not rest.over():
        steps += 1
    return steps


def test_each_no_doubles_the_rest_up_to_the_longest() -> None:
    rest, lengths = Rest(2, 10), list[int]()
    assert rest.over()
    assert not rest.begun
    for _ in range(4):
        rest.begin()
        assert rest.begun
        lengths.append(steps_until_over(rest))
    assert lengths == [2, 4, 8, 10]
    rest.end()
    assert not rest.begun
    rest.begin()
    assert steps_until_over(rest) == 2
