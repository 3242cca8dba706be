"""What was computed before, for whoever needs it again: a radix tree of checkpoints of a hybrid model.

A recurrent state can not be cut back to an earlier token, so a prompt can only go on from where a state was
kept. `Tree` knows where that is, `Spans` how many KV cells it takes, `HostTier` what was put aside in host
memory, and `PrefixCache` decides what is kept, taken and given up.
"""

from .cache import PrefixCache
from .memory import Memory, Saved
from .spans import Spans
from .stats import PrefixStats
from .tree import Node, Tree

__all__ = ["Memory", "Node", "PrefixCache", "PrefixStats", "Saved", "Spans", "Tree"]
