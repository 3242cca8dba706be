"""The llama.cpp contexts that settings describe: their sequence ids, rows, and options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .llama import ContextOptions, Readout
from .settings import MAX_SEQUENCES
from .speculation.mtp import WIDEST

if TYPE_CHECKING:
    from .settings import EngineSettings
    from .shape import Shape

MAX_DRAFTING = 16
"""Most sequences that draft at once. A larger batch keeps the device busy with tokens that are certain."""

HEAD_SPAN, HEAD_LEAST = 2048, 16_384
"""Tokens of a sequence that the head looks back on, and those of all together at least."""

PASSES, BATCH_CPU = 4, 2_048
"""Passes in a step on a GPU, and tokens in one without, when nobody says how many. With several in a call,
llama.cpp writes the mask of the next while the device computes, and sequences start and end together: one,
two and four gave 1,207, 1,243 and 1,293 tok/s at 64 sequences on an H200 (bench/README.md)."""

ALONE = 2
"""Slots, the first ones, in which a sequence that decodes alone may go back to snapshots: a copy of it may
take a buffer for another state, which llama.cpp keeps."""


def n_sequences(settings: EngineSettings) -> int:
    """Sequence ids of the context, each with a recurrent state: those that run, then those that hold what
    the first of these go back to after a wrong draft, then those of checkpoints."""
    return settings.parallel + n_holders(settings) + settings.prefix_checkpoints


def n_holders(settings: EngineSettings) -> int:
    """Sequences that may draft: in a larger crowd it does not pay."""
    if settings.speculation == "off":
        return 0
    return min(settings.parallel, MAX_DRAFTING, MAX_SEQUENCES - settings.parallel)


def head_cells(settings: EngineSettings) -> int:
    """Tokens that the head's own cache holds: every one there is looked at whenever guesses are taken back,
    and a guess needs no more than what came last."""
    each = max(HEAD_SPAN, 2 * settings.mtp_window)
    return min(settings.ctx_size, max(settings.parallel * each, HEAD_LEAST))


def drafts_by_head(settings: EngineSettings, shape: Shape) -> bool:
    """Whether the multi-token-prediction head is loaded."""
    return settings.speculation in ("both", "mtp") and shape.mtp_weights > 0


def with_passes(
    settings: EngineSettings, wanted: EngineSettings, usual: int, *, on_gpu: bool
) -> EngineSettings:
    """Decide the tokens of a pass (`usual`) and of a step, where `wanted` leaves them open."""
    ubatch = wanted.ubatch_size or usual
    batch = max(PASSES * ubatch if on_gpu else BATCH_CPU, ubatch, settings.parallel)
    return settings.replace(ubatch_size=ubatch, batch_size=wanted.batch_size or batch)


def verified_rows(settings: EngineSettings) -> int:
    """Most rows of a verification: one long draft, or a few tokens of the head for everyone who drafts."""
    if (holders := n_holders(settings)) == 0:
        return 0
    return min(
        settings.ubatch_size,
        settings.batch_size,
        max(settings.draft_max + 1, holders * (settings.mtp_depth + 1)),
    )


def context_options(settings: EngineSettings) -> ContextOptions:
    """The llama.cpp context that these settings describe; sizes and threads must be decided."""
    return ContextOptions(
        n_ctx=settings.ctx_size,
        n_seq=n_sequences(settings),
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        # llama.cpp reserves a row for each id, whatever is asked for
        n_outputs=max(n_sequences(settings), verified_rows(settings)),
        n_outputs_per_seq=max(1, min(settings.draft_max + 1, verified_rows(settings))),
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        flash_attn=settings.flash_attn,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        n_readouts=0 if settings.sampling == "host" else settings.parallel,
        n_snapshots=settings.mtp_snapshots,
    )


def head_options(settings: EngineSettings) -> ContextOptions:
    """The context of the multi-token-prediction head beside it: the same sequence ids, a row for each.

    Its batches are short but for the first of a sequence, and its buffers grow with them.
    """
    options = context_options(settings)
    return replace(
        options,
        n_ctx=head_cells(settings),
        n_batch=max(options.n_seq, min(settings.batch_size, 512)),
        n_ubatch=min(settings.ubatch_size, 256),
        n_outputs=max(options.n_seq, WIDEST),
        n_outputs_per_seq=WIDEST,
        n_snapshots=0,
        readout=Readout.GUESS,
    )
