"""Speculative decoding: drafts are verified many at a time, and the answers stay what they would have been.

`Speculator` is what the engine uses: it asks the drafters (`ngram.py`, `mtp.py`), weighs with measured times
(`times.py`) and learnt chances (`acceptance.py`) what pays (`plan.py`, asked by `choice.py`), and keeps the
way back open (`rollback.py`). A drafter is anything with `propose` (`base.py`).
"""

from .base import Drafter, Floors, Order
from .build import build_speculator
from .counts import DraftCounts
from .memory import DraftingMemory
from .speculator import Speculator

__all__ = [
    "DraftCounts",
    "Drafter",
    "DraftingMemory",
    "Floors",
    "Order",
    "Speculator",
    "build_speculator",
]
