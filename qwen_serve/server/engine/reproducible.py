"""Finds, for `deterministic`, in which passes a token has the same bits, by computing rows and comparing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from qwen_serve.llamacpp import BATCH_INVARIANT_TOKENS, HAS_BATCH_INVARIANCE, Context

from .planning.contexts import scored_rows
from .request import Request
from .settings import EngineSettings

CHUNK_GPU, CHUNK_CPU = 512, 128
"""Prompts are cut at multiples of this many tokens, if they cannot be cut anywhere."""

LONG = 700
"""Tokens of a sequence whose rows are compared: kernels change at 512 cells."""

SHORT = 100
"""Tokens of the text after which verifications are compared."""

SINGLE = 17
"""Tokens after that text that are computed one by one."""

COMPARED = 4
"""How many rows are compared at each end of a decode."""


@dataclass(frozen=True, slots=True)
class Reproducible:
    """Rules under which a sequence's logits are the same, bit for bit, whatever else is computed.

    Each sequence also needs KV cells of its own, since attention sums in the order of cells.
    """

    chunk: int
    """Prompts are cut at multiples of this many tokens. 1: anywhere, since a token has the same bits in all
    passes with fewer tokens than `together`."""
    together: int = 1
    """Maximum tokens of a decode step, if there are fewer slots: with more tokens the bits may differ."""
    abreast: int = 1
    """Number of prompts whose whole chunks have the same bits in one pass as each chunk alone."""
    alone: bool = False
    """Rows of several sequences are not computed together, since their bits would differ."""

    def group(self, first: Request, pieces: Mapping[Request, int], budget: int) -> list[Request]:
        """The prompts whose next pieces share a pass with that of `first`. `pieces`: each prompt's tokens up
        to its next cut.

        Short pieces share a small pass. Whole chunks share a pass, within the budget, if their bits stay the
        same. Any other piece has a pass of its own.
        """
        count, taken = pieces[first], [first]
        if count < self.together and not self.alone:
            room = self.together - 1 - count
            for one, more in pieces.items():
                if one is not first and more <= room:
                    taken.append(one)
                    room -= more
        elif count == self.chunk:
            alike = (one for one, more in pieces.items() if more == count and one is not first)
            taken += islice(alike, max(0, min(self.abreast, budget // count) - 1))
        return taken

    def told(self, *, drafts: bool, experts: bool) -> str:
        """The rules as text, for the log."""
        if self.alone:
            who = "rows of a model with experts" if experts else "rows"
            rest = " and nothing is drafted" if drafts else ""
            return (
                f"{who} depend on how many are computed together, so each is computed by itself{rest}; "
                f"prompts are cut every {self.chunk}, and none starts from the end of an answer"
            )
        same = "rows are the same however many are computed together"
        if self.chunk == 1:
            return f"{same}, and prompts wherever they are cut"
        beside = f"{self.abreast} at once" if self.abreast > 1 else "each alone"
        return f"{same}; prompts are cut every {self.chunk}, whole chunks of them are read {beside}"


def chunk_of(settings: EngineSettings, *, on_gpu: bool) -> int:
    """Prompts are cut at multiples of this many tokens, if they cannot be cut anywhere."""
    wanted = settings.prefill_budget or (CHUNK_GPU if on_gpu else CHUNK_CPU)
    return min(wanted, settings.ubatch_size, settings.batch_size)


def reproduced(
    context: Context, settings: EngineSettings, counts: Sequence[int], *, on_gpu: bool
) -> Reproducible:
    """Compute the same rows in passes of several sizes, and find which have the same bits.

    If small passes have the same bits, prompts on the CPU are read in small passes and cut anywhere. On a GPU
    that would take eight times as many passes.
    """
    chunk, together = chunk_of(settings, on_gpu=on_gpu), BATCH_INVARIANT_TOKENS
    sizes = sorted(n for n in {2, 4, *counts} if 1 < n <= settings.parallel)
    most = min(scored_rows(settings), context.n_ctx_seq - SHORT)
    lengths = [n for n in verified_lengths(on_gpu=on_gpu) if n <= most]
    drafts = settings.speculation != "off"
    if not rows_are_the_same(context, sizes, lengths if drafts else ()):
        return Reproducible(chunk, together, alone=True)
    if not drafts and not rows_are_the_same(context, (), lengths):
        together = 1  # no passes of several tokens of several prompts, but steps of several sequences
    anywhere = chunk < together if settings.prefill_budget else not on_gpu and together > 1
    if anywhere and HAS_BATCH_INVARIANCE:
        return Reproducible(1, together)
    most = min(settings.ubatch_size // chunk, settings.parallel) if chunk < context.n_ctx_seq else 1
    same = most > 1 and chunks_are_the_same(context, chunk, sorted({2, most}))
    return Reproducible(chunk, together, abreast=most if same else 1)


def verified_lengths(*, on_gpu: bool) -> tuple[int, ...]:
    """Tokens of one sequence in the compared passes, so that the kernels for few, some and many tokens are
    compared."""
    return (2, 4, 9, 17, 33, 63) if on_gpu else (2, 9, 17, 63)


def rows_are_the_same(context: Context, counts: Sequence[int], lengths: Sequence[int] = ()) -> bool:
    """Whether logits have the same bits in a decode of one sequence as in decodes of several.

    Args:
        counts: numbers of sequences that are decoded together.
        lengths: numbers of tokens of one sequence, decoded at once and token by token.

    One of the sequences is long, since the choice of kernels depends on that, too. Each decode has different
    tokens, and several rows are compared, since with small matrices two orders of summation agree on many
    rows.
    """
    length = min(LONG, context.n_batch, context.n_ubatch, context.n_ctx_seq - 1)

    def rows(ids: Sequence[int], tokens: Sequence[int], long: int) -> npt.NDArray[np.float32]:
        context.clear()
        if long in ids:
            _read(context, long, length)
        n = len(ids)
        context.tokens[:n] = tokens
        context.positions[:n] = [length if id_ == long else 0 for id_ in ids]
        context.sequences[:n] = ids
        context.outputs[:n] = 1
        context.decode(n)
        logits: npt.NDArray[np.float32] = context.logits(n).copy()
        return logits

    alone = rows([0], [0], 0)[0]  # the long sequence; its prompt takes most of the time

    def same(n: int, long: int) -> bool:
        tokens = [0 if id_ == long else (31 * n + 7 * id_ + long) % 256 for id_ in range(n)]
        together = rows(range(n), tokens, long)
        ends = {*range(n)[:COMPARED], *range(n)[-COMPARED:]} - {long}
        return np.array_equal(alone, together[long], equal_nan=True) and all(
            np.array_equal(rows([id_], [tokens[id_]], long)[0], together[id_], equal_nan=True)
            for id_ in sorted(ends)
        )

    def verified(lengths: Sequence[int]) -> npt.NDArray[np.float32]:
        """Rows after each token that follows a text, in decodes of these lengths."""
        context.clear()
        _read(context, 0, SHORT)
        place, found = SHORT, []
        for n in lengths:
            context.tokens[:n] = 7 * np.arange(place, place + n) % 256
            context.positions[:n] = np.arange(place, place + n)
            context.sequences[:n], context.outputs[:n] = 0, 1
            context.decode(n)
            found.append(context.logits(n).copy())
            place += n
        return np.concatenate(found)

    found = all(same(n, long) for n in counts for long in {0, n - 1})
    if found and lengths:
        single = min(max(lengths), SINGLE)
        each = verified([1] * single + [max(lengths) - single] * (max(lengths) > single))
        found = all(np.array_equal(verified([n]), each[:n], equal_nan=True) for n in lengths)
    context.clear()
    return found


def chunks_are_the_same(context: Context, chunk: int, counts: Sequence[int]) -> bool:
    """Whether the first `chunk` tokens of a prompt have the same bits alone as in a pass with as many tokens
    of each of the other prompts. `counts`: the numbers of prompts in such a pass. The rows of the chunk's
    last token and of the token after it are compared."""

    def rows(ids: Sequence[int]) -> npt.NDArray[np.float32]:
        context.clear()
        found, n = [], len(ids)
        for start, length in ((0, chunk), (chunk, 1)):
            places = np.arange(start, start + length)
            context.tokens[: n * length] = [(7 * at + 31 * id_) % 256 for id_ in ids for at in places]
            context.positions[: n * length] = np.tile(places, n)
            context.sequences[: n * length] = np.repeat(ids, length)
            context.outputs[: n * length] = np.tile(places == places[-1], n)
            context.decode(n * length)
            found.append(context.logits(n).copy())
        return np.stack(found, axis=1)

    alone = np.concatenate([rows([id_]) for id_ in range(max(counts))])
    same = all(np.array_equal(rows(range(n)), alone[:n], equal_nan=True) for n in counts)
    context.clear()
    return same


def _read(context: Context, slot: int, length: int) -> None:
    for start in range(0, length, context.n_batch):
        n = min(context.n_batch, length - start)
        context.tokens[:n] = np.arange(start, start + n) % 256
        context.positions[:n] = np.arange(start, start + n)
        context.sequences[:n] = slot
        context.outputs[:n] = 0
        context.outputs[n - 1] = 1
        context.decode(n)
