"""The radix tree against a dict of prefixes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_serve.server.engine.prefix_cache import Node, Tree
from tests.server.engine.inside import nodes_of, salts

Prefix = tuple[int, ...]


def tokens(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def prefix(node: Node) -> Prefix:
    """All tokens from the root to the node."""
    return tuple(int(token) for above in reversed([*node.path()]) for token in above.tokens)


def test_a_path_splits_where_another_leaves_it() -> None:
    tree = Tree()
    one = tree.insert(tokens(1, 2, 3, 4))
    other = tree.insert(tokens(1, 2, 7))
    assert one.parent is other.parent
    assert one.parent is not None
    assert prefix(one.parent) == (1, 2)
    assert (one.depth, other.depth, one.parent.depth) == (4, 3, 2)


def test_a_node_in_the_middle_of_an_edge() -> None:
    tree = Tree()
    deep = tree.insert(tokens(1, 2, 3, 4))
    middle = tree.insert(tokens(1, 2))
    assert deep.parent is middle
    assert tree.insert(tokens(1, 2)) is middle
    assert tree.insert(tokens(3, 4), middle) is deep


def test_the_root_is_the_node_of_nothing() -> None:
    tree = Tree()
    assert tree.insert(tokens()) is tree.root
    tree.prune(tree.root)
    assert [*tree.root.path()] == []


def test_what_nobody_needs_goes_and_edges_grow_together() -> None:
    tree = Tree()
    a, b = tree.insert(tokens(1, 2, 3)), tree.insert(tokens(1, 2, 4, 5))
    a.refcount = b.refcount = 1
    a.refcount = 0
    tree.prune(a)
    assert nodes_of(tree) == [b]
    assert prefix(b) == (1, 2, 4, 5)
    b.refcount = 0
    tree.prune(b)
    assert nodes_of(tree) == []


paths = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)


@settings(max_examples=200)
@given(st.lists(st.tuples(paths, st.booleans()), max_size=25))
def test_the_tree_holds_what_is_needed_and_where_paths_part(operations: list[tuple[Prefix, bool]]) -> None:
    tree = Tree()
    wanted: dict[Prefix, Node] = {}
    for path, keep in operations:
        if keep:
            node = tree.insert(tokens(*path))
            node.refcount = 1
            assert wanted.setdefault(path, node) is node
        elif path in wanted:
            node = wanted.pop(path)
            node.refcount = 0
            tree.prune(node)
        nodes = {prefix(node): node for node in nodes_of(tree)}
        assert len(nodes) == sum(1 for _ in nodes_of(tree))
        assert all(nodes[path] is node for path, node in wanted.items())
        assert all(len(path) == node.depth for path, node in nodes.items())
        for path, node in nodes.items():
            assert path in wanted or len(node.children) > 1, "a node that nothing needs"
            assert {first: child.parent for first, child in node.children.items()} == {
                int(child.tokens[0]): node for child in node.children.values()
            }
        branches = {
            a[:depth]
            for a in wanted
            for b in wanted
            for depth in range(1, min(len(a), len(b)))
            if a[:depth] == b[:depth] and a[depth] != b[depth]
        }
        assert branches <= set(nodes)


def test_a_node_that_went_with_another_may_be_pruned_again() -> None:
    tree = Tree()
    parent = tree.insert(tokens(1, 2))
    child = tree.insert(tokens(1, 2, 3))
    tree.prune(child)
    tree.prune(parent)
    assert nodes_of(tree) == []
    assert [*tree.root.children] == []


def test_what_was_salted_is_apart_and_goes_without_a_trace() -> None:
    tree, text = Tree(), tokens(*range(10))
    plain = tree.insert(text)
    ours, theirs = (tree.insert(text, tree.root_of(salt)) for salt in ("ours", "theirs"))
    assert len({plain, ours, theirs}) == 3
    assert [tree.salt_of(node) for node in (plain, ours, theirs)] == ["", "ours", "theirs"]
    assert {*nodes_of(tree)} == {plain, ours, theirs}
    for node in (ours, theirs):
        tree.prune(node)
    assert {*nodes_of(tree)} == {plain}
    assert salts(tree) == 0


def test_how_much_of_a_text_is_known() -> None:
    tree = Tree()
    long = tree.insert(tokens(1, 2, 3, 4, 5, 6))
    assert tree.common(tokens(1, 2, 3, 9)) == (3, True)
    assert tree.common(tokens(1, 2, 3)) == (3, False)
    assert tree.common(tokens(1, 2, 3, 4, 5, 6, 7)) == (6, False)
    assert tree.common(tokens(9)) == (0, False)
    tree.insert(tokens(7, 8), long)
    assert tree.common(tokens(1, 2, 3, 4, 5, 6, 9)) == (6, True)
    assert tree.common(tokens(1), tree.root_of("another")) == (0, False)
