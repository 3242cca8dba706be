"""Builds the engine's components from settings: a model, its contexts, and everything that uses them."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time

from qwen_serve.llamacpp import (
    BATCH_INVARIANT_TOKENS,
    HAS_BATCH_INVARIANCE,
    Context,
    Model,
    patches,
    supports_gpu,
)
from qwen_serve.llamacpp.draft import DraftContext
from qwen_serve.llamacpp.errors import LlamaError, ModelLoadError
from qwen_serve.llamacpp.mtp import MtpContext
from qwen_serve.llamacpp.tokenizer import llguidance_tokenizer
from qwen_serve.llamacpp.vision import VisionTower

from . import warmup
from .encoder import PictureEncoder
from .errors import DoesNotFit
from .planning.contexts import (
    context_options,
    draft_context,
    head_options,
    load_adapters,
    load_draft,
    load_model,
    scored_rows,
    uses_mtp,
    verified_rows,
)
from .planning.hardware import nvidia_cards, physical_cores
from .planning.measured import Measured, RecordFile, build
from .planning.plan import MemoryPlan, size_text
from .planning.sequence_ids import SequenceIds
from .planning.vision import MOST_TOKENS, WITHOUT
from .prefill_budget import PrefillBudget
from .prefix_cache import Node, PrefixCache, PrefixFile, PrefixFileError
from .profile import StartProfile, StepProfile
from .reproducible import Reproducible, chunk_of, reproduced
from .runner import Runner
from .sampling import GrammarCompiler
from .scheduler import Scheduler
from .settings import EngineSettings
from .speculation import Speculator, build_speculator
from .states import StateStore
from .ubatches import usual_pass
from .vocab import Vocab

log = logging.getLogger(__name__)

PREFILL_CPU = 128
"""Without a GPU, the default maximum of prompt tokens in a step while answers are running."""

WARM_UP_TOKENS_CPU = 32
"""Prompt tokens that the warm-up reads without a GPU: enough to page the weights in."""

TOKENIZER_CACHE = 2**20
"""Tokens of long texts whose ids are cached: some 10 MiB."""

STATE_SETTINGS = ("cache_type_k", "cache_type_v", "state_type", "flash_attn", "n_gpu_layers", "snapshots")
"""Settings that determine the layout of a saved state."""

MEASURING_GPU, MEASURING_CPU = 4.0, 0.2
"""Seconds in which the warm-up times verifications and drafts."""


def resolve_settings(settings: EngineSettings) -> EngineSettings:
    """Resolve the settings that do not depend on the model, and warn about a GPU that would be idle."""
    on_gpu = supports_gpu() and settings.n_gpu_layers != 0
    if not supports_gpu() and settings.n_gpu_layers != 0 and (cards := nvidia_cards()):
        log.warning(
            "%s is present, but this build of llama-cpp-python can not use it (built without CUDA, or for "
            "a newer driver): everything will run on the CPU, many times slower. Run `make setup CUDA=1`, "
            "or set n_gpu_layers to 0 if the CPU is meant.",
            cards[0],
        )
    # ggml threads spin at barriers: one without its own core stalls the others. One core is left to clients.
    threads = settings.threads or max(1, physical_cores() - 1)
    speculation = settings.speculation
    draft_model = settings.draft_model
    if settings.deterministic and not HAS_BATCH_INVARIANCE:
        if speculation not in ("auto", "off") or draft_model:
            log.warning("nothing is drafted: with deterministic that needs the patch batch-invariant")
        speculation, draft_model = "off", None
    elif settings.deterministic and speculation == "auto" and on_gpu:
        speculation = "draft" if draft_model else "off"
    elif speculation == "auto":
        speculation = "both" if on_gpu else "ngram"
    flash_attn = settings.flash_attn
    if settings.deterministic and flash_attn == "auto" and not on_gpu:
        flash_attn = "off"  # on the CPU it splits a lone sequence's cells among threads
    return settings.replace(
        threads=threads,
        threads_batch=settings.threads_batch or threads,
        speculation=speculation,
        draft_model=draft_model,
        flash_attn=flash_attn,
        prefix_shrinks=settings.prefix_shrinks and not settings.deterministic,  # no step reads others' cells
        # without a GPU the logits are in host memory already
        sampling=settings.sampling if settings.sampling != "auto" else "device" if on_gpu else "host",
    )


@dataclass
class Components:
    """The engine's components. `build_engine` makes them; `close` frees llama.cpp's memory."""

    plan: MemoryPlan
    stages: StartProfile
    model: Model
    context: Context
    head: MtpContext | None
    draft: tuple[Model, DraftContext] | None
    encoder: PictureEncoder | None
    vocab: Vocab
    grammars: GrammarCompiler
    states: StateStore
    speculator: Speculator
    cache: PrefixCache
    runner: Runner
    scheduler: Scheduler
    clock: Callable[[], float]
    """Measures the time of steps."""
    device_runs_alone: bool
    """Whether llama_decode returns before its batch is computed."""
    _file: RecordFile[Measured] | None = None

    def warm_up(self) -> None:
        """Run every shape that the first requests need, and measure what the engine's choices depend on."""
        settings, context, on_gpu = self.plan.settings, self.context, self.plan.on_gpu
        self._file = self._measured_file() if settings.remember else None
        known = self._file.read() if self._file else None
        if known:
            log.debug("measured at an earlier start: %s", self._file.path if self._file else "")
        # on a GPU, kernels for up to 8 columns differ, and each is loaded when it is first used
        few = range(1, min(settings.parallel, 8) + 1) if on_gpu else (1,)
        many = [n for n in (16, 32, 64, 128) if on_gpu and n < settings.parallel]
        prefill = min(
            usual_pass(context.n_ubatch) if on_gpu else WARM_UP_TOKENS_CPU, context.n_batch, context.n_ctx_seq
        )
        counts = sorted({*few, *many, settings.parallel})
        for _ in self.runner.each_adapter():
            warmup.decode(context, 1)
        warmup.warm_up(context, counts, prefill, self.model.n_real)
        self.stages.done("first steps")
        if settings.deterministic:
            self._check_rows(counts)
        alone = self.scheduler.reproducible is not None and self.scheduler.reproducible.alone
        drafts = settings.speculation != "off" and not alone
        budget = self.scheduler.prefill_budget
        if known:
            budget.start(known.token_seconds)
        elif drafts or not settings.prefill_budget:
            budget.start(warmup.time_prompt(context, prefill, self.clock) / prefill)
        if not settings.prefill_budget:
            log.debug("a step reads up to %d prompt tokens, %.1f us each", budget.tokens, 1e6 * budget.each)
        if drafts:
            self.speculator.measure(
                partial(warmup.time_verification, context, self.runner, self.vocab, self.clock),
                MEASURING_GPU if on_gpu else MEASURING_CPU,
                prompt=(prefill, prefill * budget.each),
                known=known.step_times if known else None,
            )
        self.stages.done("measuring")
        self.remember()

    def remember(self) -> None:
        """Store the measurements so far for the next start."""
        if self._file is not None:
            each = self.scheduler.prefill_budget.each
            self._file.write(Measured(token_seconds=each, step_times=self.speculator.step_times()))

    def _measured_file(self) -> RecordFile[Measured]:
        places = [usage.device for usage in self.plan.usages]
        return RecordFile(
            Measured,
            self.plan.settings,
            self.plan.spec,
            places,
            cores=physical_cores(),
            clock=self.clock.__name__,
        )

    def read_prefixes(self) -> None:
        """Load the states that an earlier server left in `prefix_file`; log a file that cannot be used."""
        path = self.plan.settings.prefix_file
        if path is None or not path.exists():
            return
        started = perf_counter()
        taken: list[Node | None] = []
        try:
            for entry in self.prefix_file(path).read():
                taken += [self.cache.take_in(entry)]
        except PrefixFileError as error:
            log.warning("%s%s is not used: %s", "the rest of " if taken else "", path, error)
        self.cache.refresh(taken)
        n_taken = len(taken) - taken.count(None)
        log.info("prefix cache: %d states from %s in %.1f s", n_taken, path, perf_counter() - started)

    def write_prefixes(self) -> None:
        """Write the prefix cache's states to `prefix_file` for the next server; a failure is logged."""
        settings, started = self.plan.settings, perf_counter()
        path = settings.prefix_file
        if path is None:
            return
        if self.plan.spec.file.overwritten:
            log.error(
                "the prefix cache was not written to %s: %s was overwritten while it was served, "
                "and states may be of either model; put a new file in its place instead (mv)",
                path,
                settings.model,
            )
            return
        try:
            file = self.prefix_file(path)
            written = file.write(self.cache.entries(), settings.prefix_file_mib * 1024**2)
        except OSError as error:
            log.error("the prefix cache was not written to %s: %s", path, error)
            return
        mib, seconds = written.size / 1024**2, perf_counter() - started
        log.info("prefix cache: %d states, %.0f MiB, to %s in %.1f s", written.entries, mib, path, seconds)

    def prefix_file(self, path: Path) -> PrefixFile:
        """A file for states of this model, with this build, device and settings."""
        settings = self.plan.settings
        made_by = {
            "model": self.plan.spec.file.fingerprint(),
            "build": build(),
            "device": [usage.device.description for usage in self.plan.usages],
            **{name: getattr(settings, name) for name in STATE_SETTINGS},
            "deterministic": self.scheduler.reproducible and self.scheduler.reproducible.chunk,
            "f16_copies": settings.deterministic and settings.f16_copies,
            "repacked": settings.deterministic and self.model.repacked,
        }
        return PrefixFile(path, made_by)

    def _check_rows(self, counts: Sequence[int]) -> None:
        """Find the passes in which a row has the same bits. Only these are used."""
        settings = self.plan.settings
        check = partial(reproduced, self.context, settings, counts, on_gpu=self.plan.on_gpu)
        with self.context.whole_rows():
            each = (check() for _ in self.runner.each_adapter())
            found = max(each, key=lambda one: (one.alone, one.chunk, -one.abreast))
        self.scheduler.reproducible, self.cache.chunk = found, found.chunk
        drafts, experts = settings.speculation != "off", self.plan.spec.has_experts
        log.info("deterministic: %s", found.told(drafts=drafts, experts=experts))

    def close(self) -> None:
        """Free the contexts and the model. Idempotent."""
        self.grammars.close()
        if self.head is not None:
            self.head.close()
        if self.draft is not None:
            model, context = self.draft
            context.close()
            model.close()
        if self.encoder is not None:
            self.encoder.close()
        self.context.close()
        self.model.close()


def build_engine(plan: MemoryPlan, profile: StepProfile, stages: StartProfile) -> Components:
    """Build the components as planned. Raises ModelLoadError if the file cannot be loaded, DoesNotFit if
    memory is too small."""
    settings, spec = plan.settings, plan.spec
    log.debug("llama.cpp is %s", f"patched: {', '.join(patches())}" if patches() else "stock")
    with ExitStack() as unfinished:  # frees the components made so far if one cannot be made
        model = load_model(settings, spec, plan.embedding_on)
        unfinished.callback(model.close)
        if model.f16_copies < plan.copies:
            log.warning(
                "FP16 copies of weights got %s of the %s that they need; steps of many sequences are slower",
                size_text(model.f16_copies),
                size_text(plan.copies),
            )
        adapters = load_adapters(model, spec)
        stages.done("weights")
        context, head = _contexts(model, plan)
        unfinished.callback(context.close)
        if head is not None:
            unfinished.callback(head.close)
        draft = _draft(plan, context) if spec.draft else None
        for each in draft or ():
            unfinished.callback(each.close)
        encoder = _encoder(plan, model) if spec.vision else None
        unfinished.pop_all()
    stages.done("contexts")
    # without a GPU, this thread's CPU time: other programs delay long steps more often than short ones
    clock = perf_counter if plan.on_gpu else thread_time
    ids = SequenceIds.of(settings)
    vocab = Vocab(model, cached=TOKENIZER_CACHE)
    grammars = GrammarCompiler(partial(llguidance_tokenizer, model), model.eos, vocab.added_tokens)
    cut = chunk_of(settings, on_gpu=plan.on_gpu) if settings.deterministic else 1
    copied = _longest_draft(plan) if plan.on_gpu else 0
    states = StateStore(context, settings.parallel, ids.rollback, device_copies=copied)
    speculator = build_speculator(
        settings,
        context,
        head,
        states,
        slots=len(ids.drafting),
        most_rows=verified_rows(settings),
        clock=clock,
        draft=(draft[1], spec.draft) if draft and spec.draft else None,
    )
    states.hidden_drafters += speculator.hidden_drafters
    cache = PrefixCache(
        states,
        ids=ids.checkpoints,
        max_cells=context.n_ctx if settings.deterministic else settings.prefix_cells,
        shrinks=settings.prefix_shrinks,
        interval=settings.prefix_interval,
        chunk=cut,
        host_bytes=settings.prefix_host_mib * 1024**2,
        turn_ids=vocab.turn_ids,
        tool_ids=vocab.tool_ids,
        on_gpu=plan.on_gpu,
        min_tokens=settings.prefix_min_tokens,
        cell_bytes=spec.cell(settings),
        state_bytes=spec.state_in(settings),
    )
    runner = Runner(context, profile, adapters)
    scheduler = Scheduler(
        slots=settings.parallel,
        batch_size=context.n_batch,
        ubatch_size=context.n_ubatch,
        prefill_budget=PrefillBudget(
            settings.prefill_seconds,
            usual_pass(context.n_ubatch),
            context.n_batch if plan.on_gpu else min(PREFILL_CPU, context.n_batch),
            fixed=settings.prefill_budget,
        ),
        states=states,
        cache=cache,
        ends=vocab.eog_ids,
        draft_rows=verified_rows(settings),
        scored_rows=scored_rows(settings),
        reproducible=Reproducible(cut, BATCH_INVARIANT_TOKENS) if settings.deterministic else None,
        policy=settings.scheduling_policy,
    )
    made = (vocab, grammars, states, speculator, cache, runner, scheduler)
    return Components(plan, stages, model, context, head, draft, encoder, *made, clock, plan.fully_offloaded)


def _longest_draft(plan: MemoryPlan) -> int:
    """Tokens of the longest draft by the MTP head or a draft model; 0 if there is neither."""
    settings, spec = plan.settings, plan.spec
    by_head = settings.mtp_depth if uses_mtp(settings, spec) else 0
    return max(by_head, spec.draft.block - 1 if spec.draft else 0)


def _draft(plan: MemoryPlan, trunk: Context) -> tuple[Model, DraftContext]:
    """The draft model and its context. Raises ModelLoadError, and DoesNotFit if the context fails."""
    spec = plan.spec.draft
    assert spec is not None
    model = load_draft(plan.settings, spec)
    try:
        return model, draft_context(plan.settings, spec, model, trunk)
    except LlamaError as error:
        model.close()
        raise DoesNotFit(
            f"llama.cpp could not create the draft model's context: {error}. If memory is the reason, lower "
            f"draft_window ({plan.settings.draft_window}) or parallel ({plan.settings.parallel}).\n"
            f"The plan was:\n{plan}"
        ) from error


def _encoder(plan: MemoryPlan, model: Model) -> PictureEncoder:
    """The vision tower. Raises ModelLoadError."""
    spec, settings = plan.spec.vision, plan.settings
    assert spec is not None
    least, most = settings.image_min_tokens, settings.image_max_tokens
    use_gpu = settings.mmproj_offload and plan.on_gpu
    try:
        tower = VisionTower(
            spec.file.path,
            model,
            threads=settings.threads,
            use_gpu=use_gpu,
            min_tokens=least,
            max_tokens=most,
            warm_up=use_gpu,
        )
    except LlamaError as error:
        raise ModelLoadError(f"mmproj: {error} ({WITHOUT})") from error
    # everything that rows depend on; older prefix files have rows of pictures that were not stretched
    identity = f"{spec.file.fingerprint()} {least} {most} stretched"
    cache_bytes = settings.image_cache_mib * 1024**2
    return PictureEncoder(
        tower,
        side=spec.side,
        max_tokens=most or MOST_TOKENS,
        identity=identity,
        cache_bytes=cache_bytes,
        most_bytes=plan.usages[-1].pictures,
    )


def _contexts(model: Model, plan: MemoryPlan) -> tuple[Context, MtpContext | None]:
    """The trunk's context, and that of the MTP head if it drafts."""
    settings = plan.settings
    context: Context | None = None
    try:
        context = Context(model, context_options(settings))
        head = MtpContext(model, head_options(settings)) if uses_mtp(settings, plan.spec) else None
    except LlamaError as error:
        if context is not None:
            context.close()
        raise DoesNotFit(
            f"llama.cpp could not create the context: {error}. If memory is the reason, lower ctx_size "
            f"({settings.ctx_size}), parallel ({settings.parallel}) or ubatch_size "
            f"({settings.ubatch_size}), or set cache_type_k and cache_type_v to q8_0. "
            f"The plan was:\n{plan}"
        ) from error
    return context, head
