"""Which items are held out: a property of an item's key, not of when it was drawn."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE_IN = 8


class Keyed(Protocol):
    """An item whose key decides its side."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


def is_held_out(key: str) -> bool:
    """True for one key in ONE_IN. Training draws only False keys, the held-out files hold only True ones."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % ONE_IN == 0


def held_out(draw: Callable[[random.Random], T], seed: int, count: int) -> Iterator[T]:
    """The first `count` distinct held-out items that `draw` gives."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        item = draw(rng)
        if is_held_out(item.key) and item.key not in seen:
            seen.add(item.key)
            yield item
