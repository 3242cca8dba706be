"""llama.cpp's models and contexts for resolved settings: the trunk's, the MTP head's, and a draft model's."""

import logging
from dataclasses import replace

from qwen_serve.llamacpp import (
    BATCH_INVARIANT_TOKENS,
    HAS_RING,
    HAS_STATE_F16,
    Context,
    ContextOptions,
    Device,
    LoraAdapter,
    Model,
    Ring,
)
from qwen_serve.llamacpp.draft import DraftContext
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.row_sampler import Place
from qwen_serve.server.engine.model_file import ModelFile
from qwen_serve.server.engine.settings import EngineSettings
from qwen_serve.server.engine.speculation import dflash
from qwen_serve.server.engine.speculation.mtp import WIDEST

from .sequence_ids import SequenceIds
from .spec import DraftSpec, ModelSpec

log = logging.getLogger(__name__)

CELL_PADDING = 256
"""llama.cpp rounds the cache up to a multiple of this (`GGML_PAD` in llama-context.cpp)."""

SCORED_ROWS = 64
"""Maximum rows of a step for log-probabilities of prompts. It bounds the host's work between two steps, and
the memory for the rows."""

MTP_SPAN, MTP_MIN_CELLS = 2048, 16_384
"""How many last tokens of a sequence the MTP head sees, and the minimum cells of its cache, all sequences
together."""


MANY, FEW = 16, 5
"""Up to MANY sequences verify drafts of any depth at once, and more at least FEW rows each."""


def padded(cells: int) -> int:
    """Round cells up as llama.cpp does."""
    return -(-cells // CELL_PADDING) * CELL_PADDING


def uses_mtp(settings: EngineSettings, spec: ModelSpec) -> bool:
    """Whether the multi-token-prediction head is loaded."""
    return settings.speculation in ("both", "mtp") and spec.mtp.weights > 0


def mtp_cells(settings: EngineSettings) -> int:
    """Cells of the head's own cache. They are few, because removing drafts scans all of them, and a draft
    needs only recent tokens."""
    each = max(MTP_SPAN, 2 * settings.draft_window)
    return min(settings.ctx_size, max(settings.parallel * each, MTP_MIN_CELLS))


def load_model(
    settings: EngineSettings, spec: ModelSpec, embedding_on: Device | None, *, no_alloc: bool = False
) -> Model:
    """Load the model, its token embedding on `embedding_on` or the host. Raises ModelLoadError."""
    model = Model(
        settings.model,
        n_gpu_layers=settings.n_gpu_layers,
        main_gpu=settings.main_gpu,
        shares=settings.shares,
        embedding_on=embedding_on.name if embedding_on else None,
        use_mmap=settings.use_mmap,
        mlock=settings.mlock,
        no_alloc=no_alloc,
        f16_copies=settings.f16_copies == "on" and not no_alloc,
        repack=settings.repack == "on" and not no_alloc,
        load_mtp=uses_mtp(settings, spec),
        check=not _is_checked(spec.file, settings),
    )
    if settings.repack == "on" and not (no_alloc or model.repacked):
        log.warning(
            "repack is 'on', but no matrix was reordered: that needs an NVIDIA GPU from sm_80 on and the "
            "patch repacked-weights"
        )
    return _confirmed(model, spec.file, settings)


def load_draft(settings: EngineSettings, spec: DraftSpec, *, no_alloc: bool = False) -> Model:
    """Load the draft model on the device of the model's output. Raises ModelLoadError."""
    model = Model(
        spec.file.path,
        n_gpu_layers=0 if settings.n_gpu_layers == 0 else -1,
        main_gpu=len(settings.shares) - 1 if settings.shares else settings.main_gpu,
        use_mmap=settings.use_mmap,
        mlock=settings.mlock,
        no_alloc=no_alloc,
        check=not _is_checked(spec.file, settings),
    )
    return _confirmed(model, spec.file, settings)


def load_adapters(model: Model, spec: ModelSpec) -> list[LoraAdapter]:
    """Load the model's LoRA adapters, in order of their numbers. Raises ModelLoadError."""
    return [LoraAdapter(model, adapter.path) for adapter in spec.adapters]


def _is_checked(file: ModelFile, settings: EngineSettings) -> bool:
    """Whether an earlier start has found all weights of this file finite."""
    return settings.remember and file.is_checked


def _confirmed(model: Model, file: ModelFile, settings: EngineSettings) -> Model:
    """Return the model, whose weights are finite. If anything is stored for it, check that it came from the
    file whose header was read; raises ModelLoadError if not."""
    if settings.remember or settings.prefix_file:
        try:
            file.confirm()
        except ModelLoadError:
            model.close()
            raise
    if settings.remember and model.checked:
        file.note_checked()
    return model


def draft_context(settings: EngineSettings, spec: DraftSpec, model: Model, trunk: Context) -> DraftContext:
    """Create the draft model's context, and have the trunk's keep rows for it. Raises LlamaError."""
    trunk.open_ring(spec.layers, draft_ring(settings))
    return DraftContext(model, draft_options(settings, spec), trunk, spec.n_features, causal=spec.causal)


def draft_ring(settings: EngineSettings) -> Ring:
    """Ring of the trunk's rows that wait for the draft model. Each sequence that drafts has a window in it,
    and room for the rejected tokens of a verification."""
    spare = settings.draft_max + 1
    return Ring(len(SequenceIds.of(settings).drafting), settings.draft_window + spare, spare)


def draft_cells(settings: EngineSettings, spec: DraftSpec) -> int:
    """Cells of the draft model's own cache."""
    most = len(SequenceIds.of(settings).drafting)
    held = dflash.cells(
        settings.draft_window, settings.parallel, settings.prefix_checkpoints, most, spec.block
    )
    return padded(min(held, settings.ctx_size + most * spec.block))


def verified_rows(settings: EngineSettings) -> int:
    """Maximum rows of a verification: one long draft, or a shorter one for each sequence that drafts. Of more
    than MANY sequences each has fewer, since a row takes memory for its logits."""
    if not (drafting := len(SequenceIds.of(settings).drafting)):
        return 0
    rows = max(settings.draft_max + 1, min(drafting, MANY) * (settings.mtp_depth + 1), FEW * drafting)
    # one fewer, since for this many tokens of one sequence the delta net uses another kernel
    most = BATCH_INVARIANT_TOKENS - 1 if settings.deterministic else rows
    return min(settings.ubatch_size, settings.batch_size, rows, most)


def scored_rows(settings: EngineSettings) -> int:
    """Maximum rows of a step for log-probabilities of prompts."""
    return min(SCORED_ROWS, settings.ubatch_size, settings.batch_size)


def context_options(settings: EngineSettings) -> ContextOptions:
    """Options of the trunk's context; sizes and threads in `settings` must be resolved.

    Raises ModelLoadError for states in F16 if the build cannot keep them.
    """
    if settings.state_type == "f16" and not HAS_STATE_F16:
        raise ModelLoadError("state_type is 'f16', but this llama.cpp was built without state-f16; set 'f32'")
    n_seq, rows, scored = len(SequenceIds.of(settings)), verified_rows(settings), scored_rows(settings)
    return ContextOptions(
        n_ctx=settings.ctx_size,
        n_seq=n_seq,
        n_batch=settings.batch_size,
        n_ubatch=settings.ubatch_size,
        # llama.cpp reserves at least one row for each id
        n_outputs=max(n_seq, rows, settings.parallel + scored),
        threads=settings.threads,
        threads_batch=settings.threads_batch,
        flash_attn=settings.flash_attn,
        type_k=settings.cache_type_k,
        type_v=settings.cache_type_v,
        state_type=settings.state_type,
        row_sampling=Place.DEVICE if settings.sampling == "device" else Place.HOST,
        n_snapshots=settings.snapshots,
        n_operands=settings.operands + 1 if settings.operands else 0,
        operand_sequences=len(SequenceIds.of(settings).drafting),
        unified=not settings.deterministic,
        batch_invariant=settings.deterministic,
        ahead=settings.async_scheduling,
    )


def head_options(settings: EngineSettings) -> ContextOptions:
    """Options of the multi-token-prediction head's context: the same sequence ids, one row for each.

    Its buffers grow with its batches, which are short except for a sequence's first.
    """
    options = context_options(settings)
    return replace(
        options,
        n_ctx=mtp_cells(settings),
        n_batch=max(options.n_seq, min(settings.batch_size, 512)),
        n_ubatch=min(settings.ubatch_size, 256),
        n_outputs=max(options.n_seq, WIDEST),
        n_snapshots=0,
        n_operands=0,
        unified=True,
        batch_invariant=False,  # answers do not depend on drafts
        ahead=False,
    )


def draft_options(settings: EngineSettings, spec: DraftSpec) -> ContextOptions:
    """Options of the draft model's context: the same sequence ids, one block for each that drafts.

    Attention in both directions needs a whole block in one pass. Every row of a block is an output. The rows
    of a prompt that are shared with a checkpoint, at most a window, are injected in one call.
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
        n_snapshots=0,
        n_operands=0,
        unified=True,
        batch_invariant=False,  # answers do not depend on drafts
        ahead=False,
    )
