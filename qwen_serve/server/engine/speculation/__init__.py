"""Speculative decoding: one step verifies several drafted tokens, and answers do not change.

The engine uses `Speculator`. Drafters guess tokens (`ngram.py`, which also reads the answers of `earlier.py`,
`mtp.py`, `dflash.py`; their protocol is in `base.py`). `hidden.py` is the base of drafters that read hidden
rows, and `hidden_rows.py` decides when they get them. `Policy` chooses how many tokens to draft, from
measured step times (`times.py`) and from the acceptance of earlier drafts (`acceptance.py`). Drafts that did
not pay go into cooldown (`cooldown.py`).
"""

from .base import Draft, Drafter, DrafterStats, DraftRequest
from .build import build_speculator
from .speculator import Speculator
