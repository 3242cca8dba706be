"""The prefix cache: a radix tree of checkpoints of a hybrid model.

A recurrent state cannot be cut back to an earlier token, so a prompt can only continue from a kept state.
`Tree` records where states are, `HostTier` holds those in host memory, `ShadowIndex` records what was read
before, and `PrefixCache` decides what is kept, reused and evicted.
"""

from .cache import PrefixCache, PrefixStats
from .file import PrefixFile, PrefixFileError
from .tree import Node, Tree
