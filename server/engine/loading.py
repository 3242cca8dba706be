"""From settings to what the engine runs on: a model, its contexts, a drafter, a prefix cache, a warm card."""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from . import warmup
from .errors import DoesNotFit, LlamaError
from .hardware import nvidia_cards, physical_cores
from .llama import Context, Model, supports_gpu
from .llama.mtp import MtpContext
from .memory import context_options, head_options, uses_mtp, verified_rows
from .prefix_cache import PrefixCache, Spans
from .sampling import Sampler, SamplingParams
from .sequence_ids import LONE_SLOTS, SequenceIds
from .speculation import DraftingMemory, Speculator, build_speculator

if TYPE_CHECKING:
    from .memory import MemoryPlan
    from .runner import Runner
    from .settings import EngineSettings
    from .vocab import Vocab

log = logging.getLogger(__name__)

PREFILL_CPU = 128
"""Prompt tokens in a step with decodes, without a GPU, when nobody says how many. With few, a prompt takes
more passes over the weights, and decodes in between find fewer sequences to decode."""

WARM_UP_TOKENS_CPU = 32
"""Prompt tokens that the warm-up reads without a GPU: enough to page the weights in."""


def decide(settings: EngineSettings) -> EngineSettings:
    """Make the choices that do not depend on the model, and warn about a GPU that would lie idle.

    On a GPU, a `prefill_budget` that is left open stays so: the warm-up measures it.
    """
    on_gpu = supports_gpu() and settings.n_gpu_layers != 0
    if not supports_gpu() and settings.n_gpu_layers != 0 and (cards := nvidia_cards()):
        log.warning(
            "%s is present, but this build of llama-cpp-python can not use it (built without CUDA, or for "
            "a newer driver): everything will run on the CPU, many times slower. Run `make setup CUDA=1`, "
            "or set n_gpu_layers to 0 if the CPU is meant.",
            cards[0],
        )
    # ggml's threads spin at barriers: one without a core of its own stalls the others; leave clients a core.
    threads = settings.threads or max(1, physical_cores() - 1)
    return settings.replace(
        threads=threads,
        threads_batch=settings.threads_batch or threads,
        prefill_budget=settings.prefill_budget or (0 if on_gpu else PREFILL_CPU),
        speculation=("both" if on_gpu else "ngram")
        if settings.speculation == "auto"
        else settings.speculation,
        # without a GPU the logits are the host's already
        sampling="host" if settings.sampling == "auto" and not on_gpu else settings.sampling,
    )


class Loaded(NamedTuple):
    """What llama.cpp holds. `head` is the context of the MTP block, if that drafts."""

    model: Model
    context: Context
    head: MtpContext | None

    def close(self) -> None:
        """Free it. Idempotent."""
        if self.head is not None:
            self.head.close()
        self.context.close()
        self.model.close()


def load(plan: MemoryPlan) -> Loaded:
    """Load what was planned. Raises ModelLoadError when the file is no good, DoesNotFit without memory."""
    settings = plan.settings
    by_head = uses_mtp(settings, plan.spec)
    model = Model(
        settings.model,
        n_gpu_layers=settings.n_gpu_layers,
        main_gpu=settings.main_gpu,
        use_mmap=settings.use_mmap,
        mlock=settings.mlock,
        load_mtp=by_head,
    )
    context: Context | None = None
    try:
        context = Context(model, context_options(settings))
        head = MtpContext(model, head_options(settings)) if by_head else None
    except LlamaError as error:
        if context is not None:
            context.close()
        model.close()
        raise DoesNotFit(
            f"llama.cpp could not create the context: {error}. If memory is the reason, lower ctx_size "
            f"({settings.ctx_size}), parallel ({settings.parallel}) or ubatch_size "
            f"({settings.ubatch_size}), or set cache_type_k and cache_type_v to q8_0. "
            f"The plan was:\n{plan}"
        ) from error
    if refused := context.readouts.refused:
        log.warning("nothing is sampled on the device: %s", refused)
        context.set_readouts(None)
    return Loaded(model, context, head)


def speculator_for(settings: EngineSettings, loaded: Loaded) -> Speculator | None:
    """What drafts under these settings."""
    holders = SequenceIds.of(settings).rollback
    if not holders:
        return None
    rows = verified_rows(settings)
    return build_speculator(
        settings, loaded.context, loaded.head, holders=holders, alone=LONE_SLOTS, most_rows=rows
    )


def prefix_cache_for(
    plan: MemoryPlan, context: Context, vocab: Vocab, speculator: Speculator | None
) -> PrefixCache:
    """The cache that was planned; it holds nothing if the settings want none."""
    settings, spec = plan.settings, plan.spec
    spans = Spans(settings.parallel, context.n_ctx)
    if speculator is not None:
        speculator.spans = spans
    return PrefixCache(
        DraftingMemory(context, speculator) if speculator else context,
        spans,
        ids=SequenceIds.of(settings).checkpoints,
        total_cells=context.n_ctx,
        cells=settings.prefix_cells,
        shrinks=settings.prefix_shrinks,
        interval=settings.prefix_interval,
        host_bytes=settings.prefix_host_mib * 1024**2,
        turn_ids=vocab.turn_ids,
        cell_bytes=spec.cell(settings),
        state_bytes=spec.state,
    )


def warm_up(
    plan: MemoryPlan, context: Context, vocab: Vocab, runner: Runner, speculator: Speculator | None
) -> int:
    """Touch every shape that the first requests need, and measure what is to be chosen by measurement.

    Returns the prompt tokens for a step, if they are to be chosen so, else 0.
    """
    started, settings = perf_counter(), plan.settings
    on_gpu = len(plan.usages) > 1
    # on a GPU, kernels for up to 8 columns differ, and each is loaded when it is first used
    few = range(1, min(settings.parallel, 8) + 1) if on_gpu else (1,)
    many = [n for n in (16, 32, 64, 128) if on_gpu and n < settings.parallel]
    prefill = min(settings.ubatch_size if on_gpu else WARM_UP_TOKENS_CPU, context.n_batch, context.n_ctx)
    warmup.warm_up(
        context,
        sorted({*few, *many, settings.parallel}),
        prefill,
        choose=settings.sampling == "auto",
    )
    budget = 0
    if on_gpu and not settings.prefill_budget:
        seconds = warmup.time_prompt(context, prefill)
        budget = warmup.prompt_tokens(seconds, prefill, context.n_batch)
        log.info("a step reads up to %d prompt tokens: %d took %.1f ms", budget, prefill, 1000 * seconds)
    if speculator is not None:
        greedy = Sampler(SamplingParams(), vocab, [])
        speculator.measure(partial(runner.rehearse, greedy), 4.0 if on_gpu else 0.1)
    log.info("warm after %.1f s", perf_counter() - started)
    return budget
