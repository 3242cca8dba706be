"""The second tier: checkpoints evicted from the device, in host memory."""

from qwen_serve.server.engine.states import SavedState

from .tree import Node


class HostTier:
    """Saved states within a budget of bytes; the least recently used is evicted first. Sets `node.saved`."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        """Bytes."""
        self._nodes: dict[Node, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> list[Node]:
        """Nodes with a saved state, the least recently used first."""
        return list(self._nodes)

    def put(self, node: Node, saved: SavedState) -> list[Node]:
        """Keep a state, if the budget allows; return the nodes whose states were evicted for it."""
        if saved.nbytes > self.budget:
            return []
        lost = []
        while self.used + saved.nbytes > self.budget:
            oldest = next(iter(self._nodes))
            self.discard(oldest)
            lost.append(oldest)
        node.saved = saved
        self._nodes[node] = None
        self.used += saved.nbytes
        return lost

    def touch(self, node: Node) -> None:
        """Mark a node's state as the most recently used."""
        del self._nodes[node]
        self._nodes[node] = None

    def discard(self, node: Node) -> None:
        """Discard a node's saved state."""
        assert node.saved is not None
        self.used -= node.saved.nbytes
        node.saved = None
        del self._nodes[node]
