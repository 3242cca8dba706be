"""What was computed before, for whoever needs it again: a radix tree of checkpoints of a hybrid model.

A recurrent state can not be cut back to an earlier token, so a prompt can only go on from where a state was
kept. `Tree` knows where that is, `HostTier` what was put aside in host memory, `ShadowIndex` what was read
before, and `PrefixCache` decides what is kept, reused and evicted.
"""

from .cache import PrefixCache, PrefixStats
from .file import PrefixFile, PrefixFileError
from .tree import Node, Tree

__all__ = ["Node", "PrefixCache", "PrefixFile", "PrefixFileError", "PrefixStats", "Tree"]
