"""Speculative decoding: drafts are verified many at a time, and the answers stay what they would have been.

`Speculator` is what the engine uses. Drafters guess (`ngram.py`, `mtp.py`, `dflash.py`; their protocol is in
`base.py`, what those share that read hidden rows in `hidden.py`). `Controller` decides from measured step
times (`times.py`) and from what became of earlier drafts how many rows a verification has, and lets who does
not pay rest.
"""

from .base import Draft, Drafter, DrafterStats, DraftRequest
from .speculator import Speculator, build_speculator

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterStats",
    "Speculator",
    "build_speculator",
]
