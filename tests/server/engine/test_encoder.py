"""Pictures: each is encoded once while it is cached, and the cache stays within its limit."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Semaphore
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.vision import ImageRows
from qwen_serve.server.engine import EngineDead, GenerationError, QueueFull
from qwen_serve.server.engine.encoder import PictureEncoder

WIDTH = 8
"""Elements of a row: 32 bytes."""


class FakeTower:
    """A tower that gives a row for each pixel of a column."""

    fails = False

    def prepare(self, rgb: npt.NDArray[np.uint8]) -> ImageRows:
        return self.measure(*rgb.shape[1::-1])

    def measure(self, width: int, height: int) -> ImageRows:
        return ImageRows(height, height, np.zeros((4, height), np.int32), None)

    def encode(self, rows: ImageRows) -> npt.NDArray[np.float32]:
        if self.fails:
            raise LlamaError("no memory")
        return np.zeros((rows.n_rows, WIDTH), np.float32)

    def close(self) -> None:
        pass


def encoder(
    cache_rows: int, identity: str = "a", tower: FakeTower | None = None, most_rows: int = 1000
) -> PictureEncoder:
    return PictureEncoder(
        cast(Any, tower or FakeTower()),
        side=16,
        max_tokens=4096,
        identity=identity,
        cache_bytes=4 * WIDTH * cache_rows,
        most_bytes=4 * WIDTH * most_rows,
    )


def pixels(seed: int, height: int = 10, width: int = 5) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_a_known_picture_is_not_encoded_again() -> None:
    made = encoder(25)
    first = made.encode(pixels(1))
    assert made.encode(pixels(1).copy()) is first
    assert (made.encoded, made.cached) == (1, 1)
    made.encode(pixels(2))
    made.encode(pixels(3))  # there is room for two
    made.encode(pixels(1))
    assert (made.encoded, made.cached) == (4, 1)


def test_a_picture_is_known_to_those_who_share() -> None:
    made = encoder(50)
    first, other = made.encode(pixels(1), "ours"), made.encode(pixels(1), "theirs")
    assert made.encoded == 2
    assert other.ids == first.ids
    assert made.encode(pixels(1), "ours") is first
    assert made.encode(pixels(1), "theirs") is other
    assert (made.encoded, made.cached) == (2, 2)


def test_a_files_picture_is_recalled_by_those_who_share() -> None:
    made = encoder(25)
    assert made.recall(b"a", "ours") is None
    first = made.encode(pixels(1), "ours", file=b"a")
    assert made.recall(b"a", "ours") is first
    assert made.recall(b"a", "theirs") is made.recall(b"b", "ours") is None
    assert made.encode(pixels(1), "ours", file=b"b") is first  # the same pixels in another file
    assert made.recall(b"b", "ours") is first
    for seed in (2, 3):
        made.encode(pixels(seed), "ours")
    assert made.recall(b"a", "ours") is None  # there is room for two


def test_what_tells_pictures_apart() -> None:
    made, other = encoder(0), encoder(0, "b")
    ids = [
        made.encode(pixels(1)).ids,
        made.encode(pixels(2)).ids,
        made.encode(pixels(1).reshape(5, 10, 3)).ids * 2,  # the same bytes
        other.encode(pixels(1)).ids,
    ]
    assert len({tuple(one) for one in ids}) == 4
    assert made.encode(pixels(1)).ids == ids[0]  # known by what they show, encoded again or not
    assert made.encode(pixels(1)[:, ::-1][:, ::-1]).ids == ids[0]


def test_no_more_are_held_than_may_be() -> None:
    made = encoder(0, most_rows=15)
    held = [made.encode(pixels(seed)) for seed in range(2)]
    with pytest.raises(QueueFull, match="pictures of requests in flight take"):
        made.encode(pixels(3))
    held.pop()
    made.encode(pixels(3))


def test_what_llama_cpp_could_not_do() -> None:
    tower = FakeTower()
    made = encoder(10, tower=tower)
    tower.fails = True
    with pytest.raises(GenerationError, match="the picture could not be encoded: no memory"):
        made.encode(pixels(1))
    tower.fails = False
    assert len(made.encode(pixels(1))) == 10


class SlowTower(FakeTower):
    """Takes until `go` to encode; what llama.cpp would crash at fails."""

    def __init__(self) -> None:
        self.began, self.go, self.closed = Event(), Event(), False
        self.prepared = Semaphore(0)

    def prepare(self, rgb: npt.NDArray[np.uint8]) -> ImageRows:
        assert not self.closed
        self.prepared.release()
        return super().prepare(rgb)

    def measure(self, width: int, height: int) -> ImageRows:
        assert not self.closed
        return super().measure(width, height)

    def encode(self, rows: ImageRows) -> npt.NDArray[np.float32]:
        self.began.set()
        assert self.go.wait(20)
        assert not self.closed
        return super().encode(rows)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_nothing_is_encoded_by_a_tower_that_is_freed(threads: ThreadPoolExecutor) -> None:
    tower = SlowTower()
    made = encoder(25, tower=tower)
    first = threads.submit(made.encode, pixels(1))
    assert tower.began.wait(20)
    closed = threads.submit(made.close)
    others: list[Future[Any]] = [threads.submit(made.encode, pixels(seed)) for seed in range(2, 6)]
    assert not closed.done()
    tower.go.set()
    assert len(first.result(20)) == 10
    closed.result(20)
    made.close()
    for other in others:
        if (error := other.exception(20)) is not None:  # it came before the end, or after
            assert isinstance(error, EngineDead)
    with pytest.raises(EngineDead, match="the engine was closed"):
        made.encode(pixels(9))
    with pytest.raises(EngineDead, match="the engine was closed"):
        made.measure(64, 64)


def test_a_known_picture_waits_for_nobody(threads: ThreadPoolExecutor) -> None:
    tower = SlowTower()
    made = encoder(25, tower=tower)
    tower.go.set()
    known = made.encode(pixels(1))
    tower.began.clear()
    tower.go.clear()
    other = threads.submit(made.encode, pixels(2))
    assert tower.began.wait(20)
    try:
        assert threads.submit(made.encode, pixels(1)).result(10) is known
        assert threads.submit(made.measure, *pixels(3).shape[1::-1]).result(10) == 10
    finally:
        tower.go.set()
    assert len(other.result(20)) == 10


def test_the_next_picture_is_prepared_while_one_is_encoded(threads: ThreadPoolExecutor) -> None:
    tower = SlowTower()
    made = encoder(25, tower=tower)
    asked = [threads.submit(made.encode, pixels(seed)) for seed in range(3)]
    assert tower.began.wait(20)
    try:
        for _ in asked:
            assert tower.prepared.acquire(timeout=20)
        assert made.encoded == 0
    finally:
        tower.go.set()
    assert [len(one.result(20)) for one in asked] == [10, 10, 10]


class Left(Exception):
    """The client has disconnected."""


def test_who_left_while_theirs_waited_costs_nothing(threads: ThreadPoolExecutor) -> None:
    tower = SlowTower()
    made = encoder(25, tower=tower)
    first = threads.submit(made.encode, pixels(1))
    assert tower.began.wait(20)
    gone = Event()

    def interrupt() -> None:
        if gone.is_set():
            raise Left

    waiting = [threads.submit(made.encode, pixels(seed), "", interrupt) for seed in range(2, 5)]
    gone.set()
    tower.go.set()
    assert len(first.result(20)) == 10
    for one in waiting:
        with pytest.raises(Left):
            one.result(20)
    assert made.encoded == 1
