"""Access to an engine's internals for tests: drafters, and what remains of requests."""
# ruff: noqa: SLF001 - leaks show from the inside alone, and a public way in would be for tests only

import llama_cpp.llama_cpp as C  # noqa: N812 - the C API

from qwen_serve.llamacpp import Context
from qwen_serve.server.engine import Engine
from qwen_serve.server.engine.planning.sequence_ids import SequenceIds
from qwen_serve.server.engine.prefix_cache import Node, PrefixCache, Tree
from qwen_serve.server.engine.speculation import Drafter, Speculator
from qwen_serve.server.engine.speculation.dflash import DflashDrafter
from qwen_serve.server.engine.speculation.hidden import DraftCacheState, HiddenDrafter
from qwen_serve.server.engine.speculation.mtp import MtpDrafter
from qwen_serve.server.engine.speculation.ngram import NgramDrafter
from qwen_serve.server.engine.speculation.policy import Policy


def drafters(speculator: Speculator) -> list[Drafter]:
    """The drafters, in the order in which they are asked."""
    return [health.drafter for health in speculator._drafters]


def draft_by(speculator: Speculator, drafter: Drafter) -> None:
    """Replace the first drafter, which drafts from the text."""
    speculator._drafters[0].drafter = drafter


def policy(speculator: Speculator) -> Policy:
    return speculator._policy


def draft_states(drafter: HiddenDrafter) -> dict[int, DraftCacheState]:
    """The drafter's state of each sequence id."""
    return drafter._states


def held(cache: PrefixCache) -> list[Node]:
    """The checkpoints in device memory."""
    return [*cache._held]


def nodes_of(kept: Tree | PrefixCache) -> list[Node]:
    """All nodes of the tree except the roots, parents first."""
    tree = kept._tree if isinstance(kept, PrefixCache) else kept
    found = [node for root in (tree.root, *tree._salted.values()) for node in root.children.values()]
    for node in found:
        found += node.children.values()
    return found


def needed(node: Node) -> bool:
    """Whether a node holds something, and is not only a branching point."""
    return node._needed


def salts(kept: Tree | PrefixCache) -> int:
    """Number of salts for which anything is kept."""
    tree = kept._tree if isinstance(kept, PrefixCache) else kept
    assert len(tree._salted) == len(tree._salts)
    return len(tree._salts)


def lookups(drafter: NgramDrafter) -> int:
    """Number of texts that the lookup knows."""
    return len(drafter._lookups)


def at_rest(engine: Engine) -> bool:
    """Whether no request runs, waits or left anything behind, and only checkpoints hold cells."""
    stats, parts = engine.stats(), engine.components
    remembered = (
        engine._open,
        parts.cache._paths,
        parts.states._rollback._held,
        parts.speculator._alive,
        *(lookups(one) for one in drafters(parts.speculator) if isinstance(one, NgramDrafter)),
    )
    chains = {id_ for id_, chain in parts.states.cells._chains.items() if chain}
    return (
        not any(remembered)
        and stats.running == stats.waiting == engine._admission._total == 0
        and len(parts.scheduler._free_slots) == engine.settings.parallel
        and stats.kv_cells_used == stats.prefix.resident_cells
        and chains <= {node.seq_id for node in held(parts.cache)}
    )


def check_contexts(engine: Engine) -> None:
    """Check that the contexts of trunk and drafter hold what the prefix cache records."""
    parts = engine.components
    [head] = [one for one in drafters(parts.speculator) if isinstance(one, MtpDrafter | DflashDrafter)]
    depths = {node.seq_id: node.depth for node in held(parts.cache)}
    for sequence in range(len(SequenceIds.of(engine.settings))):
        assert parts.states.length(sequence) == depths.get(sequence, 0)
        assert _tokens(parts.context, sequence) == depths.get(sequence, 0)
        state = draft_states(head).get(sequence)
        fed = state.fed if state and state.fed > state.first else 0
        assert _tokens(head._context, sequence) == fed + (fed > 0 and isinstance(head, MtpDrafter))
        assert state is None or state.end <= depths[sequence]


def _tokens(context: Context, sequence: int) -> int:
    """Number of tokens of a sequence id in llama.cpp."""
    return int(C.llama_memory_seq_pos_max(context._memory, sequence)) + 1
