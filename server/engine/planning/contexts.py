"""The models and contexts of llama.cpp that settings describe whose sizes are decided: the trunk's, the MTP
head's, and those of a draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qwen_serve.llamacpp import (
    BATCH_INVARIANT_TOKENS,
    HAS_RING,
    Context,
    ContextOptions,
    DeviceSampler,
    LoraAdapter,
    Model,
    Ring,
)
from qwen_serve.llamacpp.draft import DraftContext
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.server.engine.speculation import dflash
from qwen_serve.server.engine.speculation.mtp import WIDEST

from .sequence_ids import SequenceIds

if TYPE_CHECKING:
    from qwen_serve.llamacpp import Device
    from qwen_serve.server.engine.model_file import ModelFile
    from qwen_serve.server.engine.settings import EngineSettings

    from .spec import DraftSpec, ModelSpec

CELL_PADDING = 256
"""llama.cpp rounds the cache up to a multiple of this (`GGML_PAD` in llama-context.cpp)."""

SCORED_ROWS = 64
"""Prompt tokens of a step whose rows come back where log-probabilities are asked for: they bound what the
host adds up between two steps, and the memory for the rows."""

MTP_SPAN, MTP_MIN_CELLS = 2048, 16_384
"""Tokens of a sequence that the MTP head looks back on, and those of all together at least."""


def padded(cells: int) -> int:
    """So many cells, as llama.cpp rounds them."""
    return -(-cells // CELL_PADDING) * CELL_PADDING


def uses_mtp(settings: EngineSettings, spec: ModelSpec) -> bool:
    """Whether the multi-token-prediction head is loaded."""
    return settings.speculation in ("both", "mtp") and spec.mtp.weights > 0


def mtp_cells(settings: EngineSettings) -> int:
    """Tokens that the head's own cache holds: every one there is looked at whenever drafts are taken back,
    and a draft needs no more than what came last."""
    each = max(MTP_SPAN, 2 * settings.draft_window)
    return min(settings.ctx_size, max(settings.parallel * each, MTP_MIN_CELLS))


def load_model(
    settings: EngineSettings, spec: ModelSpec, embedding_on: Device | None, *, rehearse: bool = False
) -> Model:
    """The model to serve, its token embedding on that device, or the host. Raises ModelLoadError."""
    model = Model(
        settings.model,
        n_gpu_layers=settings.n_gpu_layers,
        main_gpu=settings.main_gpu,
        shares=settings.shares,
        embedding_on=embedding_on.name if embedding_on else None,
        use_mmap=settings.use_mmap,
        mlock=settings.mlock,
        rehearse=rehearse,
        f16_copies=settings.f16_copies == "on" and not rehearse,
        load_mtp=uses_mtp(settings, spec),
    )
    return _confirmed(model, spec.file, settings)


def load_draft(settings: EngineSettings, spec: DraftSpec, *, rehearse: bool = False) -> Model:
    """The draft model, where the output of the model is. Raises ModelLoadError."""
    model = Model(
        spec.file.path,
        n_gpu_layers=0 if settings.n_gpu_layers == 0 else -1,
        main_gpu=len(settings.shares) - 1 if settings.shares else settings.main_gpu,
        use_mmap=settings.use_mmap,
        mlock=settings.mlock,
        rehearse=rehearse,
    )
    return _confirmed(model, spec.file, settings)


def load_adapters(model: Model, spec: ModelSpec) -> list[LoraAdapter]:
    """The model's LoRA adapters, by their numbers. Raises ModelLoadError."""
    return [LoraAdapter(model, adapter.path) for adapter in spec.adapters]


def _confirmed(model: Model, file: ModelFile, settings: EngineSettings) -> Model:
    """The model, if it is of the file whose header was read, where something is kept under its name."""
    if settings.remember or settings.prefix_file:
        try:
            file.confirm()
        except ModelLoadError:
            model.close()
            raise
    return model


def draft_context(settings: EngineSettings, spec: DraftSpec, model: Model, trunk: Context) -> DraftContext:
    """Its context beside the trunk's, which keeps rows for it. Raises LlamaError."""
    trunk.open_ring(spec.layers, draft_ring(settings))
    return DraftContext(model, draft_options(settings, spec), trunk, spec.n_features, causal=spec.causal)


def draft_ring(settings: EngineSettings) -> Ring:
    """Rows of the trunk that wait for the draft model: a window of each sequence that drafts, and what a
    verification may put behind it that turns out wrong."""
    spare = settings.draft_max + 1
    return Ring(len(SequenceIds.of(settings).drafting), settings.draft_window + spare, spare)


def draft_cells(settings: EngineSettings, spec: DraftSpec) -> int:
    """Tokens that the draft model's own cache holds."""
    most = len(SequenceIds.of(settings).drafting)
    held = dflash.cells(
        settings.draft_window, settings.parallel, settings.prefix_checkpoints, most, spec.block
    )
    return padded(min(held, settings.ctx_size + most * spec.block))


def verified_rows(settings: EngineSettings) -> int:
    """Most rows of a verification: one long draft, or a shorter one of everybody who drafts."""
    if not (drafting := len(SequenceIds.of(settings).drafting)):
        return 0
    rows = max(settings.draft_max + 1, drafting * (settings.mtp_depth + 1))
    # one fewer: the delta net has another kernel for as many tokens of one sequence
    most = BATCH_INVARIANT_TOKENS - 1 if settings.deterministic else rows
    return min(settings.ubatch_size, settings.batch_size, rows, most)


def scored_rows(settings: EngineSettings) -> int:
    """Most tokens of prompts that leave their rows in one step, where log-probabilities are asked for."""
    return min(SCORED_ROWS, settings.ubatch_size, settings.batch_size)


def context_options(settings: EngineSettings) -> ContextOptions:
    """The llama.cpp context that these settings describe; sizes and threads must be decided."""
    n_seq, rows, scored = len(SequenceIds.of(settings)), verified_rows(settings), scored_rows(settings)
    return ContextOptions(
        n_ctx=settings.ctx_size,
        n_seq=n_seq,
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        # llama.cpp reserves a row for each id, whatever is asked for
        n_outputs=max(n_seq, rows, settings.parallel + scored),
        n_outputs_per_seq=max(1 + scored, min(settings.draft_max + 1, rows)),
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        flash_attn=settings.flash_attn,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        n_samplers=0 if settings.sampling == "host" else settings.parallel,
        n_snapshots=settings.snapshots,
        unified=not settings.deterministic,
        batch_invariant=settings.deterministic,
    )


def head_options(settings: EngineSettings) -> ContextOptions:
    """The context of the multi-token-prediction head beside it: the same sequence ids, a row for each.

    Its batches are short but for the first of a sequence, and its buffers grow with them.
    """
    options = context_options(settings)
    return replace(
        options,
        n_ctx=mtp_cells(settings),
        n_batch=max(options.n_seq, min(settings.batch_size, 512)),
        n_ubatch=min(settings.ubatch_size, 256),
        n_outputs=max(options.n_seq, WIDEST),
        n_outputs_per_seq=WIDEST,
        n_snapshots=0,
        sampler=DeviceSampler.GUESS,
        unified=True,
        batch_invariant=False,  # answers do not depend on drafts
    )


def draft_options(settings: EngineSettings, spec: DraftSpec) -> ContextOptions:
    """The context of the draft model beside it: the same sequence ids, a block for each that drafts.

    Who looks in both directions must do so in one pass. Every row of a block is an output. What a checkpoint
    is to share of a prompt, up to a window, is injected by one call.
    """
    options, most = context_options(settings), len(SequenceIds.of(settings).drafting)
    rows = max(options.n_seq, most * spec.block)
    batch = rows + most * spec.block if HAS_RING else rows  # as many are injected with blocks
    batch = max(batch, min(settings.draft_window, settings.ubatch_size))
    return replace(
        options,
        n_ctx=draft_cells(settings, spec),
        n_batch=batch,
        n_ubatch=batch,
        n_outputs=rows,
        n_outputs_per_seq=spec.block,
        n_samplers=min(options.n_samplers, most),
        n_snapshots=0,
        sampler=DeviceSampler.GUESS,
        unified=True,
        batch_invariant=False,  # answers do not depend on drafts
    )
