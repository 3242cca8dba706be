"""Which items are held out: a property of an item's key, not of when it was drawn."""

from __future__ import annotations

import hashlib

ONE_IN = 8


def is_held_out(key: str) -> bool:
    """True for one key in ONE_IN. Training draws only False keys, the held-out files hold only True ones."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % ONE_IN == 0
