"""Builds the speculator that an engine's settings ask for."""

from collections.abc import Callable

from qwen_serve.llamacpp import Context
from qwen_serve.llamacpp.draft import DraftContext
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.server.engine.planning.spec import DraftSpec
from qwen_serve.server.engine.settings import EngineSettings
from qwen_serve.server.engine.states import StateStore

from .always import Always
from .base import Drafter
from .dflash import DflashDrafter
from .mtp import WIDEST, MtpDrafter
from .ngram import NgramDrafter
from .policy import Policy
from .speculator import Speculator
from .times import StepTimes


def build_speculator(
    settings: EngineSettings,
    context: Context,
    head: MtpContext | None,
    states: StateStore,
    *,
    slots: int,
    most_rows: int,
    clock: Callable[[], float],
    draft: tuple[DraftContext, DraftSpec] | None = None,
) -> Speculator:
    """Build drafters and policy from the settings; without a `head` or a draft model (`draft`) drafts come
    from the text only.

    Slots below `slots` have rollback copies; `most_rows` bounds a verification; `clock` must be the one that
    measures `verify`'s seconds. The caller must register the `hidden_drafters` with `states`.
    """
    drafters: list[Drafter] = []
    most = min(slots, settings.draft_parallel or (slots if settings.draft_always else 1))
    if settings.speculation in ("both", "ngram"):
        drafters.append(NgramDrafter(settings.draft_max, slots, settings.draft_history))
    if draft is not None:
        drafters.append(DflashDrafter(*draft, settings.draft_window, slots=settings.parallel, most=most))
    if head is not None:
        drafters.append(
            MtpDrafter(
                head,
                settings.draft_window,
                depth=settings.mtp_depth,
                slots=settings.parallel,
                most=most,
                span=max(settings.draft_window + 1, head.n_ctx // settings.parallel - settings.mtp_depth),
                # if the host reads the rows, it also computes them, and each unused row costs time
                widest=WIDEST if head.samples_on_device else 0,
            )
        )
    times = StepTimes(ragged=context.ragged_passes)
    policy = Always(times) if settings.draft_always else Policy(times)
    rows = min(most_rows, context.n_batch)
    return Speculator(context, states, drafters, policy, slots=slots, most_rows=rows, clock=clock)
