"""A radix tree over token ids. Its nodes are prefixes whose state is kept or worth keeping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from qwen_serve.server.engine.states import SavedState

    Tokens = npt.NDArray[np.int32]


class Node:
    """A prefix: the `depth` tokens on the path from the root to here.

    It exists for one of four reasons: a checkpoint is held here on the device (`seq_id`) or in host memory
    (`saved`), requests refer to it (`refcount`), or paths branch here.
    """

    __slots__ = ("children", "depth", "parent", "refcount", "saved", "seq_id", "tokens")

    def __init__(self, tokens: Tokens, parent: Node | None) -> None:
        self.tokens = tokens
        """The tokens between the parent and here."""
        self.parent = parent
        self.depth: int = len(tokens) + (parent.depth if parent else 0)
        self.children: dict[int, Node] = {}
        """Keyed by the first token after this node."""
        self.seq_id: int | None = None
        """The sequence id that holds the state at this depth."""
        self.saved: SavedState | None = None
        self.refcount = 0
        """Requests in flight that want a checkpoint here, or have started from it."""

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    @property
    def _needed(self) -> bool:
        return self.seq_id is not None or self.saved is not None or self.refcount > 0 or self.parent is None


class Tree:
    """`insert` makes nodes and `prune` removes them; where two paths branch, `insert` adds a node."""

    def __init__(self) -> None:
        self.root = Node(np.zeros(0, np.int32), None)
        self._salted: dict[str, Node] = {}
        self._salts: dict[Node, str] = {}

    def root_of(self, salt: str) -> Node:
        """The root of the prefixes that only requests with this salt share; it is made if there is none."""
        if not salt:
            return self.root
        root = self._salted.get(salt)
        if root is None:
            root = self._salted[salt] = Node(np.zeros(0, np.int32), None)
            self._salts[root] = salt
        return root

    def salt_of(self, node: Node) -> str:
        """The salt of the root that a node is below."""
        while node.parent is not None:
            node = node.parent
        return self._salts.get(node, "")

    def insert(self, tokens: Tokens, start: Node | None = None) -> Node:
        """The node at the end of `tokens`, which start at `start` (default: the root); it is made if there is
        none."""
        node = start or self.root
        while len(tokens):
            child = node.children.get(int(tokens[0]))
            if child is None:
                child = node.children[int(tokens[0])] = Node(tokens.copy(), node)
                return child
            common = _common(child.tokens, tokens)
            if common < len(child.tokens):
                child = self._split(child, common)
            node, tokens = child, tokens[common:]
        return node

    def common(self, tokens: Tokens, start: Node | None = None) -> tuple[int, bool]:
        """Length of the longest prefix of `tokens` known below `start` (default: the root), and whether the
        known path continues with another token there."""
        node, depth = start or self.root, 0
        while len(tokens) and (child := node.children.get(int(tokens[0]))) is not None:
            common = _common(child.tokens, tokens)
            depth += common
            if common < len(child.tokens):
                return depth, common < len(tokens)
            node, tokens = child, tokens[common:]
        return depth, len(tokens) > 0 and depth > 0 and bool(node.children)

    def prune(self, node: Node) -> None:
        """Remove the node, and then its ancestors, while nothing needs them. Does nothing if the node is
        already removed."""
        while not node._needed:
            parent = node.parent
            assert parent is not None
            if len(node.children) > 1:
                return
            node.parent = None  # marks it as removed
            if node.children:
                [child] = node.children.values()
                child.tokens = np.concatenate([node.tokens, child.tokens])
                child.parent = parent
                parent.children[int(child.tokens[0])] = child
                return
            del parent.children[int(node.tokens[0])]
            node = parent
        if node in self._salts and not node.children and not node.refcount:
            del self._salted[self._salts.pop(node)]

    @staticmethod
    def _split(node: Node, length: int) -> Node:
        """Insert a new node `length` tokens into the edge that leads to `node`."""
        parent = node.parent
        assert parent is not None
        middle = Node(node.tokens[:length], parent)
        parent.children[int(middle.tokens[0])] = middle
        node.tokens = node.tokens[length:]
        node.parent = middle
        middle.children[int(node.tokens[0])] = node
        return middle


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n
