"""Decides which states are kept, which requests start from them, and which are evicted."""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp.errors import LlamaError
from qwen_serve.server.engine.request import CacheMiss, Request
from qwen_serve.server.engine.states import SavedState, StateStore

from .file import Entry
from .host import HostTier
from .shadow_index import BLOCK, ShadowIndex
from .tree import Node, Tree

log = logging.getLogger(__name__)

MIN_GAIN = 16
"""Minimum tokens between a checkpoint and the one before it: reading fewer again is as fast as a copy."""

MIN_TURN = 64
"""Minimum tokens before a checkpoint at the start of a chat turn, which costs a pass of its own. On a GPU
only the tokens since the last checkpoint count, since there a pass takes as long as this many tokens."""

HEAD = 4
"""How many first tokens of a chat turn show its role and whether it holds a tool's result."""

FULL = 1 / 2
"""From this reuse ratio on the full cell budget is allowed; below it the budget is proportional."""

MIN_RESTORE = 128
"""Minimum tokens that a copy in host memory saves beyond the device's checkpoint; restoring it takes time."""


@dataclass
class PrefixStats:
    """A snapshot of the statistics. Counts run from the engine's start; the rest is the current state."""

    hits: int = 0
    """Requests that started from a checkpoint."""
    misses: int = 0
    """Requests that started without one."""
    tokens_saved: int = 0
    """Prompt tokens that were not computed again."""
    checkpoints: int = 0
    """Checkpoints taken so far."""
    evictions: int = 0
    """Checkpoints evicted from the device."""
    restores: int = 0
    """Checkpoints restored from host memory."""
    failed_copies: int = 0
    """Copies to or from host memory that failed; the checkpoint was lost."""
    resident: int = 0
    """Checkpoints on the device."""
    resident_cells: int = 0
    """KV cells that only checkpoints occupy."""
    resident_bytes: int = 0
    """Bytes of the resident checkpoints: those cells, and a recurrent state each."""
    host_checkpoints: int = 0
    host_bytes: int = 0


@dataclass(slots=True, eq=False)
class _PromptPath:
    """A request's prompt in the tree."""

    end: Node
    """The prompt without its last token, which must be computed for its logits."""
    root: Node
    """The root of the prefixes that it may share."""
    known: int
    """Prompt tokens that the tree already held when the request arrived."""
    parts: bool
    """Whether another prompt in the tree diverges after the `known` tokens."""
    nodes: list[Node]
    """The nodes that this request refers to: those where it wants checkpoints, `end` included, and the one
    from which it started."""
    again: bool = False
    """Whether all of the prompt had been read before."""
    suspended: Node | None = None
    """The node that keeps its state while another sequence has its slot, or None."""


class PrefixCache:
    """Checkpoints of prefixes, in spare sequence ids of the context that share cells with running sequences.

    A checkpoint is taken at these places of a prompt: the beginning of its last chat turn, around its last
    question, after its first message, every `interval` tokens, where it leaves another prompt's path
    (computed or waiting), and before its last token. One more is taken at the end of the answer. Two
    checkpoints are at least MIN_GAIN tokens apart.

    The least recently used are evicted when ids or cells run short; `max_cells` bounds the cells held beyond
    the running sequences. Used by the scheduler on the engine's thread. Disabled if there are no `ids`.
    """

    def __init__(
        self,
        states: StateStore,
        *,
        ids: Collection[int],
        max_cells: int,
        shrinks: bool = True,
        interval: int = 0,
        chunk: int = 1,
        host_bytes: int = 0,
        turn_ids: Collection[int] = (),
        tool_ids: Collection[int] = (),
        on_gpu: bool = False,
        min_tokens: int = 0,
        cell_bytes: int = 0,
        state_bytes: int = 0,
    ) -> None:
        self._states, self._cells = states, states.cells
        self.enabled = bool(ids)
        self._free = sorted(ids, reverse=True)
        self._max_cells = max_cells
        self._shrinks, self._interval = shrinks, interval
        self.chunk = chunk
        """Checkpoints are only at multiples of this many prompt tokens; 1: everywhere."""
        self._turn_ids = np.array(sorted(turn_ids), np.int32)
        self._tool_ids = np.array(sorted(tool_ids), np.int32)
        """Tokens that mark a turn as a tool's result, and so not as a question."""
        self._turn_gain = max(MIN_GAIN, min_tokens or (MIN_TURN if on_gpu else MIN_GAIN))
        """MIN_GAIN for a checkpoint at the start of a turn or at the end of a new prompt."""
        self._cell_bytes, self._state_bytes = cell_bytes, state_bytes
        self._tree = Tree()
        self._host = HostTier(host_bytes)
        self._held: dict[Node, None] = {}  # the least recently used first
        self._paths: dict[Request, _PromptPath] = {}
        self._shadow, self._again = ShadowIndex(), 1.0
        """`_again` is the reuse ratio: the share of prompt tokens that had been read before, over about as
        many recent tokens as the budget has cells."""
        self._stats = PrefixStats()
        """Only its counts; `stats` fills in the rest."""

    # --- a request's life ----------------------------------------------------------------------------------

    def track(self, sequence: Request) -> None:
        """Insert a new request's prompt, so that later prompts find where they differ from it."""
        if not self.enabled:
            return
        tokens = np.asarray(sequence.tokens[: sequence.prompt_length - 1], np.int32)
        root = self._tree.root_of(sequence.salt)
        known, parts = self._tree.common(tokens, root)
        nodes, node, start = [], root, 0
        for depth in self._wanted(tokens, known):
            node = self._tree.insert(tokens[start:depth], node)
            start = depth
            node.refcount += 1
            nodes.append(node)
        self._paths[sequence] = _PromptPath(node, root, known, parts, nodes)
        if best := self._deepest_held(node):
            self._touch(best)

    def match_prefix(self, sequence: Request) -> int:
        """Give an admitted sequence, whose slot is empty, the deepest cached prefix; return its tokens."""
        if not self.enabled:
            sequence.missed = CacheMiss("off", 0)
            return 0
        assert sequence.slot is not None
        if found := self._resume(sequence):
            return found
        node = None if sequence.reads_all else self._source(sequence)
        if node is not None and node.seq_id is not None:
            self._states.copy(node.seq_id, sequence.slot)
            found = node.depth
            nodes = self._paths[sequence].nodes
            nodes.append(node)  # kept while this request runs, since others are likely to share it
            node.refcount += 1
            for above in nodes:  # the next request is likely to want these too
                if above.seq_id is not None:
                    self._touch(above)
        if sequence.reused is None:  # its first start, not one after a preemption
            sequence.reused = found
            before = self._read(sequence, sequence.tokens[: sequence.prompt_length])
            sequence.missed = self._missed(sequence, found, before)
            path = self._paths[sequence]
            path.again = path.end.depth - before < BLOCK
            again = max(found, before)
            weight = min(1.0, sequence.prompt_length / max(1, self._max_cells))
            self._again += weight * (again / sequence.prompt_length - self._again)
            self._stats.tokens_saved += found
            self._stats.hits += found > 0
            self._stats.misses += found == 0
        return found

    def _missed(self, sequence: Request, found: int, before: int) -> CacheMiss | None:
        """Why the sequence did not find more; `before`: how many of its tokens had been read earlier."""
        path = self._paths[sequence]
        if found >= path.end.depth:
            return None
        known = max(path.known, found)
        if before >= known + BLOCK:
            return CacheMiss("evicted", before)
        return CacheMiss("diverged" if path.parts else "new", known)

    def can_suspend(self, sequence: Request) -> bool:
        """Whether a running sequence's state can be kept while another sequence has its slot."""
        if sequence.computed == 0:
            return True
        if not self.enabled or self.chunk > 1 or sequence.slot is None:
            return False
        whole = self._cells.length(sequence.slot) == sequence.computed
        return whole and (bool(self._free) or self._spare(sequence) is not None)

    def suspend(self, sequence: Request) -> None:
        """Keep the state of a sequence that is about to lose its slot; `match_prefix` gives it back, unless
        it was evicted by then."""
        if sequence.computed == 0 or sequence.slot is None:
            return
        path = self._paths[sequence]
        tokens = np.asarray(sequence.tokens[: sequence.computed], np.int32)
        node = self._tree.insert(tokens, path.root)
        node.refcount += 1
        path.suspended = node
        if node.seq_id is None:
            if not self._free and (spare := self._spare(sequence)) is not None:
                self._evict(spare)
            self._hold(node, sequence.slot)

    def _spare(self, sequence: Request) -> Node | None:
        """A checkpoint that no request in flight refers to, except perhaps `sequence`, which no longer needs
        it."""
        own = self._paths[sequence].nodes
        return next(
            (
                held
                for held in self._held
                if held.refcount == (held in own and held.depth <= sequence.computed)
            ),
            None,
        )

    def _resume(self, sequence: Request) -> int:
        """Continue from the state kept by `suspend`, if it is still there, and release it; return its
        tokens."""
        path = self._paths[sequence]
        node, path.suspended = path.suspended, None
        if node is None:
            return 0
        held = 0
        if node.seq_id is not None and sequence.slot is not None:
            self._states.copy(node.seq_id, sequence.slot)
            held = node.depth
        node.refcount -= 1
        if node.seq_id is not None and not node.refcount and node.depth > path.end.depth:
            self._evict(node, keep=False)
        self._tree.prune(node)
        return held

    def waits(self, sequence: Request, earlier: Iterable[Request]) -> bool:
        """Whether one of the `earlier` sequences is about to compute a prefix that this one can start
        from."""
        if not self.enabled or sequence.reads_all or self._suspended(sequence) is not None:
            return False
        own = self._paths[sequence].end
        best = self._deepest_held(own)
        needed = MIN_GAIN + (best.depth if best else 0)
        shared = {
            node for node in own.path() if node.depth >= needed and (node.children or node.refcount > 1)
        }
        return bool(shared) and any(
            node in shared and self._has_id(node)
            for leader in earlier
            if leader.computed < leader.prompt_length - 1 and not (self.chunk > 1 and leader.reads_all)
            for node in self._cuts(leader)
        )

    def next_checkpoint(self, sequence: Request) -> int | None:
        """The next depth at which the sequence must pause so that a checkpoint can be taken."""
        if not self.enabled:
            return None
        return next((node.depth for node in self._cuts(sequence) if self._has_id(node)), None)

    def cache_unfinished(self, sequence: Request) -> None:
        """Take a checkpoint if the sequence has just reached a depth where one is wanted."""
        if not self.enabled or sequence.slot is None or sequence.computed >= sequence.prompt_length:
            return
        if self.chunk > 1 and sequence.reads_all:  # its passes are not those of others
            return
        for node in self._paths[sequence].end.path():
            if node.depth == sequence.computed and node.seq_id is None:
                if self._has_id(node) and node in self._cuts(sequence, since=sequence.computed - 1):
                    self._hold(node, sequence.slot)
                return

    def cache_finished(self, sequence: Request, beyond: Sequence[int] = ()) -> None:
        """Keep the state of a running sequence that ends, for later prompts; its slot is still intact.
        `beyond`: computed tokens behind its own."""
        slot, depth = sequence.slot, sequence.computed
        if not self.enabled:
            return
        tokens = [*sequence.tokens, *beyond][:depth]
        self._read(sequence, tokens)
        if self.chunk > 1:  # as part of a prompt the generated tokens would be read in other passes
            return
        if slot is None or depth < MIN_GAIN or self._cells.length(slot) != depth:
            return  # last condition: the state includes drafts after the end, which cannot be rolled back
        end = self._paths[sequence].end
        start = end if depth >= end.depth else self._paths[sequence].root
        node = self._tree.insert(np.asarray(tokens[start.depth :], np.int32), start)
        best = self._deepest_held(node)
        if best is node:
            self._touch(node)
        elif depth - (best.depth if best else 0) >= MIN_GAIN and self._has_id(node):
            self._hold(node, slot)
        else:
            self._tree.prune(node)

    def forget(self, sequence: Request) -> None:
        """Release the nodes of a request that is over, in any state; its checkpoints may stay."""
        track = self._paths.pop(sequence, None)
        suspended = [track.suspended] if track and track.suspended else []
        for node in [*track.nodes, *suspended] if track else ():
            node.refcount -= 1
            self._tree.prune(node)

    # --- room ----------------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Evict checkpoints until the rest fit the budget of cells.

        If the budget may shrink, it is smaller while prompts are not reused; the last checkpoint may stay.
        """
        share = min(1.0, self._again / FULL) if self._shrinks else 1.0
        last = next(reversed(self._held), None)
        least = min(self._max_cells, self._cells.idle_in(self._seq_id(last))) if last else 0
        cells = max(int(share * self._max_cells), least)
        while self._cells.idle > cells:
            sizes = {node: self._cells.exclusive(self._seq_id(node)) for node in self._held}
            # evict a checkpoint larger than the whole budget first, or all others would go before it
            too_large = (node for node, size in sizes.items() if size > self._max_cells)
            victim = next(too_large, None) or next(node for node, size in sizes.items() if size)
            self._evict(victim)

    def make_room(self, cells: int) -> bool:
        """Evict checkpoints until `cells` are free; if that is impossible, return False and evict none."""
        if cells > self._cells.available:
            return False
        while cells > self._cells.free:
            self._evict(next(node for node in self._held if self._cells.exclusive(self._seq_id(node))))
        return True

    def reusable(self, sequence: Request) -> tuple[int, int]:
        """Tokens that the sequence would find on the device, and how many of their cells are idle."""
        reads_all = not self.enabled or sequence.reads_all
        best = self._suspended(sequence)
        if best is None and not reads_all:
            best = self._deepest_held(self._paths[sequence].end)
        return (best.depth, self._cells.idle_in(self._seq_id(best))) if best else (0, 0)

    def clear(self) -> None:
        """Discard all checkpoints, those in host memory too."""
        for node in self._host.nodes:
            self._host.discard(node)
            self._tree.prune(node)
        for node in list(self._held):
            self._evict(node, keep=False)

    def erase(self, salt: str) -> int:
        """Discard the checkpoints that requests with this salt share; return how many."""
        host = [node for node in self._host.nodes if self._tree.salt_of(node) == salt]
        held = [node for node in self._held if self._tree.salt_of(node) == salt]
        for node in host:
            self._host.discard(node)
            self._tree.prune(node)
        for node in held:
            self._evict(node, keep=False)
        return len({*host, *held})

    # --- across a restart ----------------------------------------------------------------------------------

    def entries(self, salt: str | None = None) -> Iterator[Entry]:
        """The checkpoints on the device, then those in host memory, each from the most recently used on; with
        `salt` only those of requests with that salt.

        They are copied one at a time, and steps may run in between. A checkpoint that was evicted meanwhile,
        or that cannot be copied, is left out.
        """
        # a restored checkpoint is in both tiers
        for node in dict.fromkeys([*reversed(self._held), *reversed(self._host.nodes)]):
            if node.depth < MIN_RESTORE or (node.seq_id is None and node.saved is None):
                continue
            if salt is not None and self._tree.salt_of(node) != salt:
                continue
            try:
                state = node.saved or self._states.save(self._seq_id(node))
            except LlamaError as error:
                self._stats.failed_copies += 1
                log.warning("a checkpoint of %d tokens could not be saved: %s", node.depth, error)
                continue
            tokens = np.concatenate([above.tokens for above in reversed([*node.path()])])
            yield Entry(self._tree.salt_of(node), tokens, state.trunk)

    def take_in(self, entry: Entry) -> Node | None:
        """Keep a checkpoint if it fits: on the device, else in host memory. Return its node if it is kept, or
        was before."""
        length = len(entry.tokens)
        node = self._tree.insert(entry.tokens, self._tree.root_of(entry.salt))
        saved = SavedState(entry.state, (None,) * len(self._states.hidden_drafters), length)
        fits = self._free and self._cells.idle + length <= min(self._max_cells, self._cells.free)
        taken = node.seq_id is not None or node.saved is not None
        if node.depth % self.chunk == 0 and node.seq_id is None:
            if fits:
                taken |= self._bring_back(node, saved)
            elif node.saved is None and self._host.used + saved.nbytes <= self._host.budget:
                self._host.put(node, saved)
                taken = True
        self._tree.prune(node)
        return node if taken else None

    def refresh(self, nodes: Sequence[Node | None]) -> None:
        """Make the first of `nodes` the most recently used checkpoint, and so on; None is passed over."""
        for node in reversed(nodes):
            if node in self._held:
                self._touch(node)

    def stats(self) -> PrefixStats:
        """Counters, and what the cache holds now."""
        return replace(
            self._stats,
            resident=len(self._held),
            resident_cells=self._cells.idle,
            resident_bytes=self._cells.idle * self._cell_bytes + len(self._held) * self._state_bytes,
            host_checkpoints=len(self._host),
            host_bytes=self._host.used,
        )

    # --- how -----------------------------------------------------------------------------------------------

    def _wanted(self, tokens: npt.NDArray[np.int32], known: int) -> list[int]:
        """Depths of a prompt at which checkpoints are wanted: later prompts are likely to continue there."""
        picture_ends = np.flatnonzero((tokens[:-1] < 0) & (tokens[1:] >= 0)) + 1
        places: set[int] = set(picture_ends.tolist())
        if self._interval:
            cuts = range(self._interval, len(tokens), self._interval)
            # no other prompt shares a part of a picture
            places.update(cut for cut in cuts if tokens[cut - 1] >= 0 or tokens[cut] >= 0)
        turns = np.flatnonzero(np.isin(tokens, self._turn_ids))
        for turn in sorted({*turns[1:2].tolist(), *self._question(tokens, turns)}):
            before = max((place for place in places if place < turn), default=0)
            if turn >= MIN_TURN and turn - before >= self._turn_gain:
                places.add(turn)
        if self.chunk > 1:
            places.update((known, len(tokens)))
            places = {place // self.chunk * self.chunk for place in places}
        return [*sorted(places - {0, len(tokens)}), len(tokens)]

    def _question(self, tokens: npt.NDArray[np.int32], turns: npt.NDArray[np.intp]) -> list[int]:
        """Where the last question begins and ends, and where the last turn begins.

        Users edit a question and ask it again. The template drops the reasoning that follows a question when
        the next question comes; clients that do not send reasoning back drop it at once. A question is a turn
        that has another role than the last turn and holds no tool's result.
        """
        if not len(turns) or turns[-1] + 1 >= len(tokens):
            return [int(turn) for turn in turns[-1:]]
        heads = tokens[np.minimum(turns[:, None] + np.arange(1, HEAD + 1), len(tokens) - 1)]
        asks = (heads[:, 0] != heads[-1, 0]) & ~np.isin(heads, self._tool_ids).any(axis=1)
        last = np.flatnonzero(asks)[-1:]
        return [*turns[last].tolist(), *turns[last + 1].tolist(), int(turns[-1])]

    def _cuts(self, sequence: Request, since: int | None = None) -> Iterator[Node]:
        """The nodes deeper than `since` (default: computed) at which the sequence will take a checkpoint."""
        since = sequence.computed if since is None else since
        path, previous = self._paths[sequence], 0
        for node in reversed([*path.end.path()]):
            new = node is path.end and node.refcount == 1 and not path.again
            gain = self._turn_gain if new else MIN_GAIN
            worth = node.depth > since and node.depth - previous >= gain
            if node.seq_id is not None:
                previous = node.depth
            elif worth and node.depth % self.chunk == 0:
                previous = node.depth
                yield node

    def _has_id(self, node: Node) -> bool:
        """Whether a state may be kept here. A state that only one request wants must not evict states that
        other requests in flight want."""
        return node.refcount > 1 or bool(self._free) or any(not held.refcount for held in self._held)

    def _read(self, sequence: Request, tokens: Sequence[int]) -> int:
        """Remember the sequence's `tokens`; return how many were read before. On a full hit this does nothing
        and returns 0."""
        if sequence.prompt_length - (sequence.reused or 0) <= BLOCK:
            return 0
        return self._shadow.read(tokens, sequence.salt)

    def _suspended(self, sequence: Request) -> Node | None:
        """The node that keeps the state of a suspended sequence; None if there is none."""
        node = self._paths[sequence].suspended if self.enabled else None
        return node if node is not None and node.seq_id is not None else None

    def _deepest_held(self, node: Node) -> Node | None:
        return next((above for above in node.path() if above.seq_id is not None), None)

    def _source(self, sequence: Request) -> Node | None:
        """The node to start from; one that is only in host memory is restored if that pays."""
        end = self._paths[sequence].end
        held = self._deepest_held(end)
        worth = MIN_RESTORE + (held.depth if held else 0)
        saved = next((node for node in end.path() if node.saved is not None), None)
        if saved is not None and saved.seq_id is None and saved.depth >= worth and self._restore(saved):
            return saved
        return self._deepest_held(end)  # looked up again: making room may have evicted it

    def _hold(self, node: Node, source: int) -> None:
        """Take a checkpoint of the sequence id `source`."""
        seq_id = self._take_id(node)
        try:
            self._states.copy(source, seq_id)
        except LlamaError as error:
            self._lost_copy(seq_id, "a checkpoint of %d tokens could not be taken: %s", node.depth, error)
            return
        node.seq_id = seq_id
        self._held[node] = None
        self._stats.checkpoints += 1

    def _restore(self, node: Node) -> bool:
        saved = node.saved
        assert saved is not None
        # checkpoints that are evicted for it may move to host memory and evict its own copy there
        self._host.touch(node)
        node.refcount += 1
        try:
            return self.make_room(node.depth) and self._bring_back(node, saved)
        finally:
            node.refcount -= 1

    def _bring_back(self, node: Node, saved: SavedState) -> bool:
        seq_id = self._take_id(node)
        try:
            self._states.restore(seq_id, saved)
        except LlamaError as error:
            self._lost_copy(seq_id, "a checkpoint of %d tokens could not be restored: %s", node.depth, error)
            if node.saved is not None:
                self._host.discard(node)
            return False
        node.seq_id = seq_id
        self._held[node] = None
        self._stats.restores += 1
        return True

    def _take_id(self, node: Node) -> int:
        """A free sequence id for `node`. If there is none, another checkpoint is evicted, never `node`."""
        node.refcount += 1
        if not self._free:
            unwanted = (held for held in self._held if not held.refcount)
            self._evict(next(unwanted, None) or next(iter(self._held)))
        node.refcount -= 1
        return self._free.pop()

    def _evict(self, node: Node, *, keep: bool = True) -> None:
        """Evict a checkpoint from the device; with `keep`, copy it to host memory first if that has room."""
        seq_id = self._seq_id(node)
        if keep and node.depth >= MIN_RESTORE and self._host.budget and node.saved is None:
            self._save(node, seq_id)
        self._states.free(seq_id)
        self._free.append(seq_id)
        node.seq_id = None
        del self._held[node]
        self._stats.evictions += 1
        self._tree.prune(node)

    def _save(self, node: Node, seq_id: int) -> None:
        """Copy a checkpoint to host memory; if the copy fails, only this checkpoint is lost."""
        try:
            saved = self._states.save(seq_id)
        except Exception as error:
            self._stats.failed_copies += 1
            log.warning("a checkpoint of %d tokens could not be saved: %s", node.depth, error)
            return
        for lost in self._host.put(node, saved):
            self._tree.prune(lost)

    def _lost_copy(self, seq_id: int, text: str, *about: object) -> None:
        """Log that a copy to a sequence id failed, and free the id."""
        self._stats.failed_copies += 1
        log.warning(text, *about)
        self._states.free(seq_id)
        self._free.append(seq_id)

    def _touch(self, node: Node) -> None:
        del self._held[node]
        self._held[node] = None

    @staticmethod
    def _seq_id(node: Node) -> int:
        assert node.seq_id is not None
        return node.seq_id
