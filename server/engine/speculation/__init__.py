"""Speculative decoding: drafts are verified many at a time, and the answers stay what they would have been.

`Speculator` is what the engine uses. Drafters guess (`ngram.py`, `mtp.py`, `dflash.py`; their protocol is in
`base.py`, what those share that read hidden rows in `hidden.py`, when they get them in `hidden_rows.py`).
`Policy` decides from measured step times
(`times.py`) and from what became of earlier drafts (`acceptance.py`) how many tokens are drafted, and has
drafts that lost wait (`cooldown.py`).
"""

from .base import Draft, Drafter, DrafterStats, DraftRequest
from .build import build_speculator
from .speculator import Speculator

__all__ = [
    "Draft",
    "DraftRequest",
    "Drafter",
    "DrafterStats",
    "Speculator",
    "build_speculator",
]
