"""Chooses the sizes that settings leave open (context, pass, step, states) to suit and fit the machine.

If nothing fits, the error names settings. Each of them would suffice alone, which a plan with it has shown.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qwen_serve.llamacpp import (
    BATCH_INVARIANT_SNAPSHOTS,
    HAS_F16_COPIES,
    SHARES_SNAPSHOTS,
    Device,
    keeps_f16_copies,
)
from qwen_serve.llamacpp.errors import ModelLoadError
from qwen_serve.llamacpp.file_checks import check_adapter, check_tower, check_types
from qwen_serve.llamacpp.gguf import read_header
from qwen_serve.server.engine.errors import DoesNotFit
from qwen_serve.server.engine.settings import MAX_SEQUENCES
from qwen_serve.server.engine.ubatches import usual_pass

from .adapters import AdapterSpec
from .contexts import CELL_PADDING, padded, uses_mtp
from .devices import devices_for
from .hardware import bounded_by
from .operands import with_operands
from .plan import MAX_CELLS, MemoryPlan, Usage, arrange, compute_buffers, make_plan, on_the_line, size_text
from .sequence_ids import SequenceIds
from .spec import DraftSpec, ModelSpec
from .vision import VisionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen_serve.llamacpp.gguf import Header
    from qwen_serve.server.engine.settings import EngineSettings, Repack, Speculation

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

TRIALS = 5
"""Rehearsals to find the largest context that fits."""

SMALLEST_UBATCH = 128
"""Smallest `ubatch_size` that an error recommends."""


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
            plan = plan.rehearsed(smaller)
            raise DoesNotFit("\n".join([*complaints(plan), "the plan was:", str(plan)]))
        plan = plan.rearranged(smaller)
        if arrange(smaller, spec, places, [0] * len(places)).fits:  # else a rehearsal cannot help
            plan = plan.rehearsed(smaller)
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
        grown = plan.rehearsed(larger(part))
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


def complaints(plan: MemoryPlan) -> list[str]:
    """For each device that is too small, the shortfall and each setting that would suffice alone."""
    return [
        f"{usage.device.name}: {size_text(usage.total)} are needed and "
        f"{size_text(usage.device.free)} are free{_within(usage)}; "
        f"{size_text(usage.short)} are missing (with a margin for the driver). "
        f"What would help: {', or '.join([*_higher(usage), *_helpful(plan, index)])}"
        for index, usage in enumerate(plan.usages)
        if usage.short
    ]


def _within(usage: Usage) -> str:
    """What bounds the memory of the host, if it is a limit of this process."""
    bound = "" if usage.device.is_gpu else bounded_by()
    return f" within {bound}" if bound else ""


def _higher(usage: Usage) -> list[str]:
    bound = _within(usage).removeprefix(" within ")
    return [f"to raise {bound}"] if bound else []


def _helpful(plan: MemoryPlan, index: int) -> list[str]:
    """Settings that make the plan fit on one device and no worse on the others, as a plan with each shows."""
    settings = plan.settings

    def does(other: MemoryPlan) -> bool:
        return not other.usages[index].short and all(
            after.short <= before.short for after, before in zip(other.usages, plan.usages, strict=True)
        )

    def does_with(**changes: Any) -> bool:
        return does(plan.rearranged(settings.replace(**changes)))

    def most(name: str, least: int, below: int) -> int:
        """The largest value with which the plan fits; one less than `least` if there is none."""
        return _largest(least - 1, below - 1, lambda value: does_with(**{name: value}))

    packed, q8 = "cache_type_k=q8_0 with cache_type_v=q8_0", {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    switches: list[tuple[bool, str, dict[str, Any]]] = [
        (settings.f16_copies == "on", "f16_copies=off", {"f16_copies": "off"}),
        (settings.flash_attn != "off", packed, q8),
        (settings.speculation != "off", "speculation=off", {"speculation": "off", "snapshots": 0}),
        (settings.snapshots > 0, "snapshots=0", {"snapshots": 0}),
        (
            plan.spec.vision is not None and settings.mmproj_offload,
            "mmproj_offload=false",
            {"mmproj_offload": False},
        ),
    ]
    found = [said for there, said, changes in switches if there and does_with(**changes)]
    blind = replace(plan.spec, vision=None)
    if plan.spec.vision and does(replace(plan, spec=blind).rearranged(settings)):
        found.append("mmproj=off")
    if cells := _most_cells(plan, does):
        if settings.deterministic:  # of the running sequences
            cells = cells // len(SequenceIds.of(settings)) * settings.parallel
        found.append(f"ctx_size={cells}")
    sizes = {"draft_window": 1, "prefix_checkpoints": 1, "parallel": 1, "prefix_host_mib": 0}
    for name, least in sizes.items():
        if (value := most(name, least, getattr(settings, name))) >= least:
            found.append(f"{name}={value}")
    without = {"prefix_cache": False, "prefix_checkpoints": 0, "prefix_cells": 0}
    if settings.prefix_cache and not any("checkpoints" in said for said in found) and does_with(**without):
        found.append("prefix_cache=false")
    ubatch = settings.ubatch_size // 2
    if ubatch >= SMALLEST_UBATCH and does(plan.rehearsed(settings.replace(ubatch_size=ubatch))):
        found.append(f"ubatch_size={ubatch}")
    if plan.places[index].is_gpu:
        all_layers = plan.spec.n_blocks + 1 if settings.n_gpu_layers < 0 else settings.n_gpu_layers
        if layers := most("n_gpu_layers", 1, all_layers):
            found.append(f"n_gpu_layers={layers} (the rest runs on the CPU, much slower)")
    return found or [
        "no single setting; use a smaller quantization of the model, or several of "
        "ctx_size, parallel, cache_type_k, cache_type_v, ubatch_size"
    ]


def _most_cells(plan: MemoryPlan, does: Callable[[MemoryPlan], bool]) -> int:
    """The largest `ctx_size` that fits with its own compute buffers; 0 if none is found."""
    settings, spec, places = plan.settings, plan.spec, plan.places

    def rehearsed(cells: int) -> tuple[int, list[int]]:
        return cells, compute_buffers(settings.replace(ctx_size=cells), spec, places)

    def fits(cells: int, found: list[int]) -> bool:
        return does(arrange(settings.replace(ctx_size=cells), spec, places, found))

    most = min(settings.ctx_size, MAX_CELLS)
    a, b = rehearsed(most // 2), rehearsed(most)
    for _ in range(TRIALS):
        cells = CELL_PADDING * _largest(
            0,
            settings.ctx_size // CELL_PADDING - 1,
            lambda n, a=a, b=b: fits(n * CELL_PADDING, on_the_line(a, b, n * CELL_PADDING)),  # type: ignore[misc]
        )
        if cells in (0, b[0]):
            return cells
        a, b = b, rehearsed(cells)
        if fits(*b):
            return cells
    return 0


def _largest(low: int, high: int, does: Callable[[int], bool]) -> int:
    """The largest number above `low`, up to `high`, for which `does` is true, else `low`. If it is true for a
    number, it must be for every smaller one."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda value: not does(value))
