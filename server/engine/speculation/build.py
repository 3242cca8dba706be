"""A speculator from the engine's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .eager import Eager
from .mtp import WIDEST, MtpDrafter
from .ngram import NgramDrafter
from .plan import Planner
from .rollback import Rollback
from .speculator import Speculator
from .times import DraftTimes, StepTimes

if TYPE_CHECKING:
    from server.engine.llama import Context
    from server.engine.llama.mtp import MtpContext
    from server.engine.settings import EngineSettings


def build_speculator(
    settings: EngineSettings,
    context: Context,
    head: MtpContext | None,
    *,
    holders: range,
    alone: int,
    most_rows: int,
) -> Speculator:
    """Drafters and planner as the settings want them; without a `head` the text alone is drafted from.

    `holders` are the sequence ids that slots from 0 on are saved in; slots below `alone` may go back to
    snapshots; `most_rows` bounds a verification.
    """
    times, draft_times = StepTimes(), DraftTimes()
    mtp = None
    if head is not None:
        context.keep_hidden()
        # where the host reads the rows, it computes them, too, and a row that counts for nothing costs most
        widest = WIDEST if head.readouts.active else 0
        span = max(settings.mtp_window + 1, head.n_ctx // settings.parallel)
        mtp = MtpDrafter(head, settings.mtp_window, draft_times, span=span, widest=widest)
    return Speculator(
        context,
        Rollback(context, times, holders.start, alone, copied=settings.mtp_depth if mtp else 0),
        Eager() if settings.draft_always else Planner(times, draft_times),
        times,
        ngram=NgramDrafter() if settings.speculation in ("both", "ngram") else None,
        mtp=mtp,
        slots=len(holders),
        longest=settings.draft_max,
        deepest=settings.mtp_depth,
        most_rows=min(most_rows, context.n_batch),
    )
