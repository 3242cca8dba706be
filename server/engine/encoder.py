"""Pixels to pictures in prompts: a vision tower, one picture at a time, and those that it has encoded."""

from __future__ import annotations

import hashlib
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING
from weakref import finalize

from cachetools import LRUCache

from qwen_serve.llamacpp.errors import LlamaError

from .errors import EngineDead, GenerationError, QueueFull
from .pictures import Picture, row_ids
from .stats import ImageStats

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from qwen_serve.llamacpp.vision import VisionTower


class PictureEncoder:
    """Encodes one picture at a time; any thread may call, and waits while another picture is encoded. The
    engine's steps do not wait, nor does a request whose picture is known."""

    def __init__(
        self,
        tower: VisionTower,
        *,
        side: int,
        max_tokens: int,
        identity: str,
        cache_bytes: int,
        most_bytes: int,
    ) -> None:
        """`side`: pixels along either side of a token, of which a picture has `max_tokens` at most.
        `identity`: of the tower and of how it is used, which a picture's rows depend on. Rows of at most
        `cache_bytes` are kept for when a picture comes again; with those that requests hold, `most_bytes`,
        but for those of one picture."""
        self.side = side
        self.max_pixels = max_tokens * side * side
        """Of a picture: larger ones are made smaller."""
        self._tower, self._identity = tower, identity.encode()
        self._cache: LRUCache[tuple[str, bytes], Picture]
        self._cache = LRUCache(cache_bytes, getsizeof=lambda one: one.rows.nbytes)
        self._encoding = Lock()
        """Of whoever encodes: a tower does it for one at a time."""
        self._lock = Lock()
        """Of what is here, and of towers that measure: held for a moment, also by whoever has the other."""
        self._closed = False
        self._most = most_bytes
        self._held = 0
        """Bytes of rows that somebody has, a request or the cache; those in `_released` not any more."""
        self._released: deque[int] = deque()
        """Written on any thread, in the middle of anything."""
        self.encoded = self.cached = 0
        """Pictures, and those that had been encoded before."""

    def measure(self, rgb: npt.NDArray[np.uint8]) -> int:
        """Tokens that a picture of shape [height, width, 3] will have. Raises as `encode` does."""
        height, width, _ = rgb.shape
        with self._lock:
            self._check_open()
            try:
                return self._tower.measure(width, height).n_rows
            except LlamaError as error:
                raise GenerationError(f"the picture could not be measured: {error}") from error

    def encode(
        self,
        rgb: npt.NDArray[np.uint8],
        salt: str = "",
        interrupt: Callable[[], None] = lambda: None,
    ) -> Picture:
        """A picture of shape [height, width, 3]. One that is known is not encoded again, but with another
        `salt`, as its requests share nothing. `interrupt` is called once its turn has come: what it raises
        ends the work.

        Raises GenerationError where llama.cpp fails, QueueFull while requests hold the rows of as many as may
        be, and EngineDead once it is closed.
        """
        size = b"%d x %d " % rgb.shape[:2]
        digest = hashlib.sha256(self._identity + size)
        digest.update(rgb.data if rgb.flags.c_contiguous else rgb.tobytes())
        key = digest.digest()
        place = salt, key
        if (known := self._known(place)) is not None:
            return known
        with self._encoding:
            if (known := self._known(place)) is not None:  # by now
                return known
            interrupt()
            with self._lock:
                self._check_open()
                self._count_released()
                if self._held >= self._most:
                    raise QueueFull(
                        f"pictures of requests in flight take {self._held // 2**20:,} MiB, as many as may; "
                        "try again later"
                    )
            try:
                prepared = self._tower.prepare(rgb)
                rows = self._tower.encode(prepared)
            except LlamaError as error:
                raise GenerationError(f"the picture could not be encoded: {error}") from error
            ids = row_ids(key, prepared.n_rows)
            picture = Picture(ids, rows, prepared.positions, prepared.n_pos)
            finalize(picture, self._released.append, rows.nbytes)
            with self._lock:
                self._held += rows.nbytes
                if rows.nbytes <= self._cache.maxsize:
                    self._cache[place] = picture
                self.encoded += 1
            return picture

    def stats(self) -> ImageStats:
        """Safe from any thread."""
        with self._lock:
            self._count_released()
            return ImageStats(self.encoded, self.cached, self._held)

    def _count_released(self) -> None:
        while self._released:
            self._held -= self._released.popleft()

    def _known(self, place: tuple[str, bytes]) -> Picture | None:
        with self._lock:
            if (known := self._cache.get(place)) is not None:
                self.cached += 1
            return known

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed")

    def close(self) -> None:
        """Waits for the picture that is being encoded, and frees the tower. Idempotent."""
        with self._encoding, self._lock:
            self._closed = True
            self._tower.close()
