"""Encodes pixels to pictures in prompts: a vision tower, and a cache of encoded pictures."""

import hashlib
from collections import deque
from collections.abc import Callable
from threading import Lock
from weakref import finalize

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.llamacpp.vision import VisionTower

from .errors import EngineDead, GenerationError, QueueFull
from .pictures import Picture, row_ids
from .stats import ImageStats

MAX_FILES = 16_384
"""Files whose pictures are remembered, in a few hundred bytes each."""


class PictureEncoder:
    """Encodes one picture at a time, and prepares the next one meanwhile. Any thread may call it; the call
    waits for its turn. The engine's steps and requests with a cached picture do not wait."""

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
        """
        Args:
            side: width and height of a token, in pixels.
            max_tokens: most tokens of a picture.
            identity: names the tower and its settings, on which a picture's rows depend.
            cache_bytes: most bytes of cached rows.
            most_bytes: most bytes of cached rows and of rows that requests hold; one picture more is allowed.
        """
        self.side = side
        self.max_pixels = max_tokens * side * side
        """Maximum pixels of a picture: larger ones are made smaller."""
        self._tower, self._identity = tower, identity.encode()
        self._cache: LRUCache[tuple[str, bytes], Picture]
        self._cache = LRUCache(cache_bytes, getsizeof=lambda one: one.rows.nbytes)
        self._files: LRUCache[tuple[str, bytes], bytes] = LRUCache(MAX_FILES)
        """Salt and digest of a file -> the key of its picture in `_cache`, without the salt."""
        self._preparing, self._encoding = Lock(), Lock()
        """Held while a picture is prepared on the host, and while one is encoded. To hold both, take
        `_preparing` first."""
        self._lock = Lock()
        """Guards the fields and the tower's `measure`. Held briefly; may be taken while the others are
        held."""
        self._closed = False
        self._most = most_bytes
        self._held = 0
        """Bytes of rows that requests or the cache hold, including those in `_released`."""
        self._released: deque[int] = deque()
        """Bytes of released rows; finalizers append on any thread at any time."""
        self.encoded = self.cached = 0
        """Pictures encoded, and pictures found in the cache."""

    def measure(self, width: int, height: int) -> int:
        """Tokens of a picture of this size in pixels. Raises GenerationError and EngineDead."""
        with self._lock:
            self._check_open()
            try:
                return self._tower.measure(width, height).n_rows
            except LlamaError as error:
                raise GenerationError(f"the picture could not be measured: {error}") from error

    def recall(self, file: bytes, salt: str) -> Picture | None:
        """The cached picture of a file that was decoded before, by the file's digest. Decoding it again would
        take as long as answering a second question from the prefix cache."""
        with self._lock:
            key = self._files.get((salt, file))
        return None if key is None else self._known((salt, key))

    def encode(
        self,
        rgb: npt.NDArray[np.uint8],
        salt: str = "",
        interrupt: Callable[[], None] = lambda: None,
        file: bytes = b"",
    ) -> Picture:
        """Encode a picture of shape [height, width, 3], or return its cached rows.

        Args:
            salt: only requests with the same salt share cached rows.
            interrupt: called before the picture is prepared and before it is encoded; may raise to stop.
            file: digest of the file from which the picture was decoded, for `recall`.

        Raises GenerationError if llama.cpp fails, QueueFull while requests hold the maximum of rows, and
        EngineDead once it is closed.
        """
        size = b"%d x %d " % rgb.shape[:2]
        digest = hashlib.sha256(self._identity + size)
        digest.update(rgb.data if rgb.flags.c_contiguous else rgb.tobytes())
        key = digest.digest()
        place = salt, key
        if file:
            with self._lock:
                self._files[salt, file] = key
        if (known := self._known(place)) is not None:
            return known
        with self._preparing:
            interrupt()
            with self._lock:
                self._check_open()
            try:
                prepared = self._tower.prepare(rgb)
            except LlamaError as error:
                raise GenerationError(f"the picture could not be prepared: {error}") from error
        with self._encoding:
            if (known := self._known(place)) is not None:  # encoded while this call waited
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
        """Counters; safe from any thread."""
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
        """Wait for pictures that are being prepared or encoded, then free the tower. Idempotent."""
        with self._preparing, self._encoding, self._lock:
            self._closed = True
            self._tower.close()
