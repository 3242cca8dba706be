"""From settings to what the engine runs on: a model, its contexts, and everything that works on them."""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from . import warmup
from .batch import Batch
from .errors import DoesNotFit, LlamaError
from .grammar import GrammarCompiler
from .hardware import nvidia_cards, physical_cores
from .llama import Context, Model, patches, supports_gpu
from .llama.mtp import MtpContext
from .llama.tokenizer import llguidance_tokenizer
from .memory import context_options, head_options, uses_mtp, verified_rows
from .prefix_cache import PrefixCache
from .runner import Runner
from .sampling import Sampler, SamplingParams
from .scheduler import Scheduler
from .sequence import Sequence
from .sequence_ids import SequenceIds
from .speculation import build_speculator
from .states import StateStore
from .verification import sample
from .vocab import Vocab

if TYPE_CHECKING:
    from .memory import MemoryPlan
    from .profile import StepProfile
    from .settings import EngineSettings

log = logging.getLogger(__name__)

PREFILL_CPU = 128
"""Most prompt tokens in a step beside running answers, without a GPU, when nobody says how many."""

WARM_UP_TOKENS_CPU = 32
"""Prompt tokens that the warm-up reads without a GPU: enough to page the weights in."""

MEASURING_GPU, MEASURING_CPU = 4.0, 0.2
"""Seconds for which the warm-up times verifications and drafts."""


def decide(settings: EngineSettings) -> EngineSettings:
    """Make the choices that do not depend on the model, and warn about a GPU that would lie idle."""
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
    speculation = settings.speculation
    if speculation == "auto":
        speculation = "both" if on_gpu else "ngram"
    return settings.replace(
        threads=threads,
        threads_batch=settings.threads_batch or threads,
        speculation=speculation,
        # without a GPU the logits are the host's already
        sampling="host" if settings.sampling == "auto" and not on_gpu else settings.sampling,
    )


class Parts:
    """What the engine is made of, put together as planned. `close` frees what llama.cpp holds.

    Raises ModelLoadError when the file is no good, DoesNotFit without memory.
    """

    def __init__(self, plan: MemoryPlan, profile: StepProfile) -> None:
        settings, spec = plan.settings, plan.spec
        self._plan = plan
        log.info("llama.cpp is %s", f"patched: {', '.join(patches())}" if patches() else "stock")
        self.model = Model(
            settings.model,
            n_gpu_layers=settings.n_gpu_layers,
            main_gpu=settings.main_gpu,
            use_mmap=settings.use_mmap,
            mlock=settings.mlock,
            load_mtp=uses_mtp(settings, spec),
        )
        self.context, self._head = _contexts(self.model, plan)
        self.device_runs_alone = plan.leaves_the_host_alone
        """llama_decode returns before what it started is computed."""
        ids = SequenceIds.of(settings)
        self.vocab = Vocab(self.model, settings.tokenizer_cache)
        self.grammars = GrammarCompiler(partial(llguidance_tokenizer, self.model), self.model.eos)
        copied = settings.mtp_depth if self._head is not None and self._on_gpu else 0
        self.states = StateStore(self.context, settings.parallel, ids.rollback, device_copies=copied)
        self.speculator = build_speculator(
            settings,
            self.context,
            self._head,
            self.states,
            slots=len(ids.rollback),
            most_rows=verified_rows(settings),
        )
        self.states.followers += self.speculator.followers
        self.cache = PrefixCache(
            self.states,
            ids=ids.checkpoints,
            max_cells=settings.prefix_cells,
            shrinks=settings.prefix_shrinks,
            interval=settings.prefix_interval,
            host_bytes=settings.prefix_host_mib * 1024**2,
            turn_ids=self.vocab.turn_ids,
            cell_bytes=spec.cell(settings),
            state_bytes=spec.state,
        )
        self.runner = Runner(self.context, profile, device_runs_alone=self.device_runs_alone)
        self.scheduler = Scheduler(
            slots=settings.parallel,
            batch_size=self.context.n_batch,
            ubatch_size=self.context.n_ubatch,
            prefill_budget=settings.prefill_budget or PREFILL_CPU,
            states=self.states,
            cache=self.cache,
            ends=self.vocab.eog_ids,
            draft_rows=verified_rows(settings),
            place=self.runner.place,
        )

    @property
    def _on_gpu(self) -> bool:
        return len(self._plan.usages) > 1

    def warm_up(self) -> None:
        """Touch every shape that the first requests need, and measure what is chosen by measurement."""
        started, settings, context, on_gpu = perf_counter(), self._plan.settings, self.context, self._on_gpu
        # on a GPU, kernels for up to 8 columns differ, and each is loaded when it is first used
        few = range(1, min(settings.parallel, 8) + 1) if on_gpu else (1,)
        many = [n for n in (16, 32, 64, 128) if on_gpu and n < settings.parallel]
        prefill = min(settings.ubatch_size if on_gpu else WARM_UP_TOKENS_CPU, context.n_batch, context.n_ctx)
        counts = sorted({*few, *many, settings.parallel})
        warmup.warm_up(context, counts, prefill, choose=settings.sampling == "auto")
        drafts = settings.speculation != "off"
        seconds = warmup.time_prompt(context, prefill) if drafts or not settings.prefill_budget else 0.0
        if not settings.prefill_budget:
            most = context.n_batch if on_gpu else min(PREFILL_CPU, context.n_batch)
            budget = warmup.prefill_budget(
                settings.prefill_seconds, seconds / prefill, context.n_ubatch, most
            )
            self.scheduler.prefill_budget = budget
            log.info("a step reads up to %d prompt tokens: %d took %.1f ms", budget, prefill, 1000 * seconds)
        if drafts:
            spare = MEASURING_GPU if on_gpu else MEASURING_CPU
            self.speculator.measure(self._rehearse, spare, prompt=(prefill, seconds))
        log.info("warm after %.1f s", perf_counter() - started)

    def _rehearse(self, n: int, rows: int) -> None:
        """Verify `rows` - 1 made-up draft tokens for each of `n` sequences, and forget it all."""
        sampler = Sampler(SamplingParams(), self.vocab, [])
        batch = Batch()
        for slot in range(n):
            sequence = Sequence([0], rows, sampler)
            sequence.slot, sequence.begun = slot, True
            batch.add(sequence, 1)
            batch.add_draft(batch.chunks[-1], [0] * (rows - 1), "")
        started = perf_counter()
        self.runner.launch(batch)
        sampled = sample(batch, self.runner.collect(batch), self.vocab.eog_ids)
        self.speculator.verify(batch, sampled, perf_counter() - started)
        for slot in range(n):
            self.context.remove(slot)

    def close(self) -> None:
        """Free the contexts and the model. Idempotent."""
        self.grammars.close()
        if self._head is not None:
            self._head.close()
        self.context.close()
        self.model.close()


def _contexts(model: Model, plan: MemoryPlan) -> tuple[Context, MtpContext | None]:
    """The trunk's context, and that of the MTP head if it drafts; where that fails, the model is freed."""
    settings = plan.settings
    context: Context | None = None
    try:
        context = Context(model, context_options(settings))
        head = MtpContext(model, head_options(settings)) if uses_mtp(settings, plan.spec) else None
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
    if refused := context.samplers.refused:
        log.warning("nothing is sampled on the device: %s", refused)
        context.set_samplers(None)
    return context, head
