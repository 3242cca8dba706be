"""Chooses the sizes that settings leave open (context, pass, step, states) to suit and fit the machine.

If nothing fits, the error names settings. Each of them would suffice alone, which a plan with it has shown.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from qwen_serve.llamacpp import (
    BATCH_INVARIANT_SNAPSHOTS,
    HAS_F16_COPIES,
    SHARES_SNAPSHOTS,
    Device,
    keeps_f16_copies,
)
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.file_checks import check_adapter, check_tower, check_types
from qwen_serve.llamacpp.gguf import Header, read_header
from qwen_serve.server.engine.errors import DoesNotFit
from qwen_serve.server.engine.settings import MAX_SEQUENCES, EngineSettings, Repack, Speculation
from qwen_serve.server.engine.ubatches import usual_pass

from .adapters import AdapterSpec
from .contexts import padded, uses_mtp
from .devices import devices_for
from .operands import with_operands
from .plan import MAX_CELLS, MemoryPlan, make_plan, place_layers
from .sequence_ids import SequenceIds
from .shortfalls import shortfalls
from .spec import DraftSpec, ModelSpec
from .vision import VisionSpec

log = logging.getLogger(__name__)

TOKENS_PER_SEQUENCE = 16_384
"""Default cells of the cache for each sequence."""

SMALLEST_CONTEXT = 2_048
"""Smallest context chosen automatically; a smaller one must be set."""

CHECKPOINTS = 32
"""Default number of states in the prefix cache, unless memory decides it."""

SLOWDOWN = 0.1
"""Default limit of how much longer the prefix cache's cells may make a step of one sequence, if every step
reads them. Such a step reads the weights and every occupied cell once, so this is the ratio of their
sizes."""

MIN_CELLS = 9_216
"""Minimum cells that the prefix cache may hold: a prompt of 8,192 tokens and its answer."""

MAX_HELD = 131_072
"""Default maximum of its cells if steps do not read them: the most whose cost was measured."""

SHARE, PARTS = 1 / 2, 16
"""The share of the memory left by everything else that the prefix cache may take in that case, and the number
of steps in which it grows to its maximum. If its size followed every byte, it would differ at each start, and
earlier measurements could not be used."""

SNAPSHOTS = 8
"""Default snapshots with the MTP head; with a draft model there are as many as a block has tokens."""

FEW_SNAPSHOTS, SNAPSHOT_SLOTS = 2, 8
"""Default snapshots without the patch shared-snapshots, and the maximum of slots for which there are any.
Each snapshot then takes a state for every sequence id, and without ssm-conv-ids every step copies a part of
each."""

STREAM_CHECKPOINTS = 8
"""Default states in the prefix cache if each has cells of its own."""

FEW_CHECKPOINTS = 16
"""If memory is short, snapshots displace checkpoints down to this number."""

UBATCH_GPU, UBATCH_CPU = 2_048 + 256, 512
"""Default maximum tokens in one pass over the weights. On a GPU long prompts are read in passes of 2,048, and
the last one has room for a rest (`usual_pass`)."""

PASSES, BATCH_CPU = 4, 2_048
"""Default `batch_size`: on a GPU in passes between two decode steps, without one in tokens."""


def plan_memory(wanted: EngineSettings, header: Header, places: Sequence[Device] | None = None) -> MemoryPlan:
    """Choose the sizes of context, pass and step that are left open, and check that everything fits.

    `places` are the GPU and the host of another machine; by default they are this one's.

    Raises DoesNotFit, with the shortfall and the settings that would help, or ModelLoadError if the model is
    not a Qwen3.5 or llama.cpp rejects the file or the settings.
    """
    spec = ModelSpec.from_header(header)
    if wanted.draft_model is not None:
        draft = read_header(wanted.draft_model, "draft_model")
        spec = replace(spec, draft=DraftSpec.from_header(draft, spec))
        check_types(draft)
    if wanted.mmproj is not None:
        tower = read_header(wanted.mmproj, "mmproj")
        spec = replace(spec, vision=VisionSpec.from_header(tower, spec.n_embd, wanted))
        check_tower(tower)
    adapters: list[AdapterSpec] = []
    for name, path in wanted.adapters.items():
        adapter = read_header(path, "lora")
        adapters.append(AdapterSpec.from_header(name, adapter, header, len(spec.layers)))
        check_adapter(adapter)
    spec = replace(spec, adapters=tuple(adapters))
    places = devices_for(wanted) if places is None else places
    if wanted.f16_copies == "on":
        _check_copies(places)
    on_gpu = places[0].is_gpu
    copies = "on" if wanted.f16_copies == "on" else "off"
    settings = wanted.replace(f16_copies=copies, repack=_order(wanted, places))
    settings = _with_prefix_cache(_with_what_can_draft(_with_shares(settings, places), spec), spec)
    settings = _with_passes(settings, wanted, UBATCH_GPU if on_gpu else UBATCH_CPU, on_gpu=on_gpu)
    settings = _with_snapshots(settings, spec)
    if wanted.ctx_size == 0:
        each = min(spec.n_ctx_train, TOKENS_PER_SEQUENCE)
        cells = min(settings.parallel * each, MAX_CELLS)
        settings = settings.replace(ctx_size=cells + (0 if settings.deterministic else settings.prefix_cells))
    settings = settings.replace(ctx_size=_in_streams(settings))
    plan = make_plan(settings, spec, places)
    if plan.fits:
        return _with_copies(_with_larger_prefix_cache(plan, wanted), wanted)
    while not plan.fits:
        smaller = _smaller(plan, wanted)
        if smaller == plan.settings:
            plan = plan.profiled(smaller)
            raise DoesNotFit("\n".join([*shortfalls(plan), "the plan was:", str(plan)]))
        plan = plan.rearranged(smaller)
        if place_layers(smaller, spec, places, [0] * len(places)).fits:  # else a profile run cannot help
            plan = plan.profiled(smaller)
    return plan


def _check_copies(places: Sequence[Device]) -> None:
    """Raises ModelLoadError if FP16 copies are asked for and cannot be kept."""
    if not HAS_F16_COPIES:
        raise ModelLoadError(
            "f16_copies is 'on', but this llama.cpp was built without the patch f16-copies; build it with "
            "(`make setup CUDA=1`), or set f16_copies to 'auto' or 'off'"
        )
    if not any(keeps_f16_copies(place.name) for place in places if place.is_gpu):
        names = ", ".join(place.description for place in places)
        raise ModelLoadError(
            f"f16_copies is 'on', but products are not faster with them on {names}: they are on NVIDIA's "
            "Hopper (H100, H200). Set f16_copies to 'auto' or 'off'"
        )


def _order(wanted: EngineSettings, places: Sequence[Device]) -> Repack:
    """Whether weights are repacked: "auto" does it where steps were measured to be faster, on Hopper."""
    if wanted.repack != "auto":
        return wanted.repack
    gpus = [place for place in places if place.is_gpu]
    return "on" if gpus and all(keeps_f16_copies(gpu.name) for gpu in gpus) else "off"


def _with_copies(plan: MemoryPlan, wanted: EngineSettings) -> MemoryPlan:
    """Add FP16 copies of the weights if the setting is "auto" and all of them fit into the remaining
    memory."""
    if wanted.f16_copies != "auto":
        return plan
    other = plan.rearranged(plan.settings.replace(f16_copies="on"))
    return other if other.copies and other.fits else plan


def _smaller(plan: MemoryPlan, wanted: EngineSettings) -> EngineSettings:
    """Reduce sizes that `wanted` leaves open; return the same settings if none can be reduced."""
    settings = plan.settings
    without_embedding = settings.replace(offload_embedding=False)
    if plan.rearranged(without_embedding).on_gpus < plan.on_gpus:
        return without_embedding
    if wanted.snapshots < 0 and settings.snapshots:
        return _with_fewer_snapshots(plan, checkpoints=not wanted.prefix_checkpoints)
    smaller = settings
    if not wanted.ctx_size:
        smaller = smaller.replace(ctx_size=padded(settings.ctx_size * 3 // 4))
    if wanted.prefix_cache and not wanted.prefix_checkpoints and settings.prefix_checkpoints > 1:
        smaller = smaller.replace(prefix_checkpoints=settings.prefix_checkpoints * 3 // 4)
    if settings.deterministic:
        each = settings.ctx_size // len(SequenceIds.of(settings))
        each = each if wanted.ctx_size else each * 3 // 4
        smaller = smaller.replace(ctx_size=padded(each) * len(SequenceIds.of(smaller)))
    smaller = _with_passes(smaller, wanted, UBATCH_CPU, on_gpu=plan.on_gpu)
    return settings if smaller.ctx_size < SMALLEST_CONTEXT else smaller


def _with_what_can_draft(settings: EngineSettings, spec: ModelSpec) -> EngineSettings:
    """Remove the multi-token-prediction head from `speculation` if the file has none."""
    if spec.mtp.weights or settings.speculation not in ("both", "mtp"):
        return settings
    left: Speculation = "draft" if spec.draft else "off"
    left = "ngram" if settings.speculation == "both" else left
    said = {"ngram": "text that repeats is drafted from", "draft": "the draft model drafts alone"}
    log.warning(
        "speculation is %r, but %s has no multi-token-prediction head: %s",
        settings.speculation,
        settings.model,
        said.get(left, "nothing is drafted"),
    )
    return settings.replace(speculation=left)


def _with_shares(settings: EngineSettings, places: Sequence[Device]) -> EngineSettings:
    """Choose each GPU's share of the layers, if left open, by free memory, as llama.cpp does."""
    gpus = [place for place in places if place.is_gpu]
    if settings.split_mode == "none" or settings.tensor_split or not gpus:
        return settings
    return settings.replace(tensor_split=",".join(f"{gpu.free / 2**30:.1f}" for gpu in gpus))


def _with_passes(
    settings: EngineSettings, wanted: EngineSettings, usual: int, *, on_gpu: bool
) -> EngineSettings:
    """Choose the tokens of a pass (default `usual`) and of a step, if `wanted` leaves them open."""
    ubatch = wanted.ubatch_size or usual
    batch = max(PASSES * usual_pass(ubatch) if on_gpu else BATCH_CPU, ubatch, settings.parallel)
    return settings.replace(ubatch_size=ubatch, batch_size=wanted.batch_size or batch)


def _with_snapshots(settings: EngineSettings, spec: ModelSpec) -> EngineSettings:
    """Choose how many tokens a sequence can roll back, if left open; whether they fit is checked later.
    Raises ModelLoadError if the set number is useless or impossible."""
    wanted = settings.snapshots
    if settings.operands:
        return with_operands(settings, spec)
    if wanted < 0:
        wanted = min(settings.mtp_depth, SNAPSHOTS) if uses_mtp(settings, spec) else 0
        if spec.draft is not None:
            wanted = max(wanted, spec.draft.block - 1)
        if not SHARES_SNAPSHOTS:
            wanted = min(wanted, FEW_SNAPSHOTS) if settings.parallel <= SNAPSHOT_SLOTS else 0
    if not SequenceIds.of(settings).drafting:
        if settings.snapshots > 0:
            raise ModelLoadError(
                f"snapshots is {wanted}, but with speculation={settings.speculation} nothing is drafted that "
                "could be taken back; set another speculation, or leave snapshots out"
            )
        wanted = 0
    if not spec.state:  # keys and values need no snapshots
        wanted = 0
    # llama.cpp keeps a verification in one pass (`split_equal`), which must have room for one more token
    most = max(0, min(settings.ubatch_size, settings.batch_size) - 2)
    limits = f"ubatch_size {settings.ubatch_size} and batch_size {settings.batch_size}"
    if settings.deterministic:
        most = min(most, BATCH_INVARIANT_SNAPSHOTS)
        limits = f"deterministic, {limits}"
    if spec.state and settings.snapshots > most:
        raise ModelLoadError(f"snapshots is {wanted}; with {limits} it can be at most {most}")
    return settings.replace(snapshots=min(wanted, most))


def _with_fewer_snapshots(plan: MemoryPlan, *, checkpoints: bool) -> EngineSettings:
    """Reduce snapshots until the plan fits with its current buffers; drop all if it does not fit with one.

    With `checkpoints`, some of these may be given up too.
    """
    settings = before = plan.settings
    while settings.snapshots and not plan.fits:
        fewer = max(FEW_CHECKPOINTS, settings.prefix_checkpoints * 3 // 4)
        if checkpoints and fewer < settings.prefix_checkpoints:
            settings = settings.replace(prefix_checkpoints=fewer)
        else:
            settings = settings.replace(snapshots=settings.snapshots - 1)
        plan = plan.rearranged(settings)
    return settings if settings.snapshots else before.replace(snapshots=0)


def _with_prefix_cache(settings: EngineSettings, spec: ModelSpec) -> EngineSettings:
    """Choose what the prefix cache may hold, if left open."""
    if not settings.prefix_cache:
        return settings.replace(prefix_checkpoints=0, prefix_cells=0)
    room = MAX_SEQUENCES - SequenceIds.of(settings).rollback.stop
    usual = STREAM_CHECKPOINTS if settings.deterministic else CHECKPOINTS
    checkpoints = min(settings.prefix_checkpoints or usual, room)
    cells = settings.prefix_cells or max(
        MIN_CELLS, padded(int(SLOWDOWN * spec.weights / spec.cell(settings)))
    )
    return settings.replace(prefix_checkpoints=checkpoints, prefix_cells=cells)


def _with_larger_prefix_cache(plan: MemoryPlan, wanted: EngineSettings) -> MemoryPlan:
    """Give the prefix cache its share of the memory that is left, as far as `wanted` leaves that open.

    The cache may hold more cells than were added for it, since running sequences take back the cells that
    they need.
    """
    before = plan.settings
    if not before.prefix_cache or not plan.reads_own_cells:
        return plan
    ids = MAX_SEQUENCES - SequenceIds.of(before).checkpoints.stop
    states = 0 if wanted.prefix_checkpoints else ids
    cells = 0 if wanted.prefix_cells or wanted.ctx_size else max(0, MAX_HELD - before.prefix_cells)

    def larger(part: int) -> EngineSettings:
        pool = padded(before.ctx_size + cells * part // PARTS)
        return before.replace(
            prefix_checkpoints=before.prefix_checkpoints + states * part // PARTS,
            prefix_cells=wanted.prefix_cells or max(before.prefix_cells, min(MAX_HELD, pool)),
            ctx_size=pool,
        )

    def is_modest(other: MemoryPlan) -> bool:
        return all(
            after.total - now.total <= SHARE * now.left
            for after, now in zip(other.usages, plan.usages, strict=True)
        )

    part = bisect_left(
        range(1, PARTS + 1), True, key=lambda part: not is_modest(plan.rearranged(larger(part)))
    )
    while part:
        grown = plan.profiled(larger(part))
        if is_modest(grown):  # even with the buffers for more ids
            return grown
        part -= 1
    return plan.rearranged(larger(0))


def _in_streams(settings: EngineSettings) -> int:
    """Cells of the context: those set or, with `deterministic`, a running sequence's share of them for each
    sequence id."""
    if not settings.deterministic:
        return padded(settings.ctx_size)
    return padded(-(-settings.ctx_size // settings.parallel)) * len(SequenceIds.of(settings))
