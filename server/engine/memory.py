"""How large everything becomes: planned before loading, and refused with advice where it does not fit.

Weights come from the GGUF's tensor sizes, KV cells and recurrent states from its metadata, compute buffers
from a rehearsal, in which llama.cpp builds its graphs without allocating weights or cache.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .contexts import (
    CELL_PADDING,
    context_options,
    draft_cells,
    draft_context,
    draft_ring,
    head_options,
    load_draft,
    load_model,
    mtp_cells,
    padded,
    uses_mtp,
)
from .draft_spec import DraftSpec
from .errors import DoesNotFit, LlamaError, ModelLoadError
from .gguf import read_header
from .hardware import available_memory
from .llama import HAS_RING, READS_OWN_CELLS, SHARES_SNAPSHOTS, Context, Device, devices
from .llama.mtp import MtpContext
from .measured import Buffers, RecordFile
from .model_spec import ModelSpec
from .sequence_ids import SequenceIds
from .settings import MAX_SEQUENCES
from .speculation import dflash
from .speculation.mtp import host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .gguf import Header
    from .settings import EngineSettings, Speculation

log = logging.getLogger(__name__)

MIB = 1024**2

CELL_ENTRY = 48
"""Bytes of host memory that llama.cpp takes for what it knows of a cell: its position, what is to be added to
it, its place in an image, and the sequences that share it (llama-kv-cells.h)."""

TOKENS_PER_SEQUENCE = 16_384
"""What each sequence gets of the cache when nobody says how large it should be."""

MAX_CELLS = 262_144
"""What all of them together get at most, if nobody says: every copy and removal looks at each cell."""

SMALLEST_CONTEXT = 2_048
"""The least that is worth choosing on one's own; a smaller one has to be asked for."""

CHECKPOINTS = 32
"""States that the prefix cache may hold when nobody says how many, and memory does not decide."""

SLOWDOWN = 0.1
"""How much longer a step of one sequence may take because of what the prefix cache holds, when nobody says
and every step reads it: such a step reads the weights and every occupied cell once, so this is the ratio of
their sizes."""

MIN_CELLS = 9_216
"""What it may hold in any case: a prompt of 8,192 tokens and its answer."""

MAX_HELD = 131_072
"""Cells that it may hold where steps do not read them, when nobody says: the most whose cost was measured,
+0.2 ms of 3.1 for one sequence, +0.1 of 4.6 for eight and +0.6 of 12 for 64, of 512 tokens each, on one H200
(`patches/measure.sh ... held`, synthetic 4B Q4_K_M)."""

SHARE, PARTS = 1 / 2, 16
"""What it may take there of the memory that is left when everything else has its place; and the parts in
which it grows up to the most: sizes that followed every byte would be others at each start, and what earlier
ones have measured of no use."""

SNAPSHOTS = 8
"""Snapshots where drafts are made from hidden rows and nobody says how many; a draft model has as many as a
block has tokens. On an H200 8 beside 2 gave a lone sequence with the MTP head 427 tokens a second instead of
374, and 15 one with a draft model 598 instead of 360 (synthetic 4B, 80% and four of a block right)."""

FEW_SNAPSHOTS, SNAPSHOT_SLOTS = 2, 8
"""The same without patch 0019, and the most slots: each is another state for every sequence id then, and
without 0015 every step copies a part of each one, 0.4 ms of 3.1 for one sequence there, and of 4.3 for
eight."""

STREAM_CHECKPOINTS = 8
"""States that it may hold when each has cells of its own."""

FEW_CHECKPOINTS = 16
"""Checkpoints down to which these make room for snapshots."""

UBATCH_GPU, UBATCH_CPU = 2_048, 512
"""Tokens in one pass over the weights when nobody says how many. A pass reads all weights, however many it
has: 128 of a prompt took 19 ms on an H200, 512 took 44."""

PASSES, BATCH_CPU = 4, 2_048
"""Passes in a step on a GPU, and tokens in one without, when nobody says how many. With several in a call,
llama.cpp writes the mask of the next while the device computes, and sequences start and end together: one,
two and four gave 1,207, 1,243 and 1,293 tok/s at 64 sequences on an H200."""

TRIALS = 5
"""Rehearsals to find out how large a context would fit."""


# --- the plan ----------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """What one device has to hold, in bytes."""

    device: Device
    compute: int
    weights: int = 0
    kv: int = 0
    states: int = 0
    settling: int = 0
    """Buffers for states of sequences that went back to a snapshot."""
    cells: int = 0
    """llama.cpp's table of cells."""
    hidden: int = 0
    """Hidden states that wait for the MTP head and for a draft model."""
    saved: int = 0
    """What the prefix cache may put aside in host memory."""

    @property
    def parts(self) -> dict[str, int]:
        """All of it, by the names that the table shows."""
        return {
            "weights": self.weights,
            "KV cache": self.kv,
            "table of KV cells": self.cells,
            "recurrent states": self.states + self.settling,
            "compute buffers": self.compute,
            "hidden states for drafters": self.hidden,
            "saved by the prefix cache": self.saved,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def left(self) -> int:
        """Bytes that stay free beside a margin for what drivers and libraries take on the side; negative
        where some are missing."""
        margin = max(256 * MIB, self.device.total // 64) if self.device.is_gpu else 64 * MIB
        return self.device.free - margin - self.total

    @property
    def short(self) -> int:
        """Bytes missing, that margin included; 0 if it fits."""
        return max(0, -self.left)


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything goes under `settings`, whose sizes are decided. `str()` is a table."""

    settings: EngineSettings
    spec: ModelSpec
    usages: tuple[Usage, ...]
    """Those of the GPUs in use and, last, the host's."""

    def __str__(self) -> str:
        columns = [f"{u.device.name} ({u.device.description})" for u in self.usages]
        rows = {name: [u.parts[name] for u in self.usages] for name in self.usages[0].parts}
        rows = {name: sizes for name, sizes in rows.items() if any(sizes)}
        rows["together"] = [u.total for u in self.usages]
        rows["free"] = [u.device.free for u in self.usages]
        width = max(map(len, rows))
        lines = [" " * width + "".join(f"  {column:>10}" for column in columns)]
        for name, sizes in rows.items():
            cells = zip(columns, sizes, strict=True)
            lines.append(
                f"{name:<{width}}"
                + "".join(f"  {_size(size) if size else '-':>{max(10, len(c))}}" for c, size in cells)
            )
        settings, spec = self.settings, self.spec
        types = "/".join(dict.fromkeys([settings.cache_type_k, settings.cache_type_v]))
        lines.append(
            f"{settings.ctx_size:,} KV cells for {self._sharers} "
            f"({types}, {_size(spec.cell(settings))} a token; "
            f"recurrent state: {_size(spec.state)} a sequence)"
        )
        if settings.prefix_cache:
            budget = "" if settings.deterministic else f" and {settings.prefix_cells:,} cells"
            lines.append(f"prefix cache: {settings.prefix_checkpoints} states{budget}")
        if rollback := len(SequenceIds.of(settings).rollback):
            head = ", the multi-token-prediction head" if uses_mtp(settings, spec) else ""
            draft = f", draft model {spec.draft.path}" if spec.draft else ""
            lines.append(f"speculation: {rollback} states to go back to{head}{draft}")
        if settings.snapshots:
            whose = "of one sequence" if SHARES_SNAPSHOTS else "more of every state"
            lines.append(f"snapshots: {settings.snapshots} {whose}")
        if spec.mtp_weights and not uses_mtp(settings, spec):
            lines.append(f"not loaded: multi-token-prediction head, {_size(spec.mtp_weights)}")
        return "\n".join(lines)

    @property
    def _sharers(self) -> str:
        n, ids = self.settings.parallel, len(SequenceIds.of(self.settings))
        if not self.settings.deterministic:
            return f"{n} sequences"
        return f"{n} sequences and {ids - n} states, {self.settings.ctx_size // ids:,} each,"

    @property
    def on_gpu(self) -> bool:
        """Whether layers may be on a GPU."""
        return len(self.usages) > 1

    @property
    def fully_offloaded(self) -> bool:
        """Whether every layer is on a GPU, so that the host only starts what that computes."""
        return all(usage.device.is_gpu or not (usage.kv or usage.states) for usage in self.usages)

    @property
    def reads_own_cells(self) -> bool:
        """Whether steps do not read the cells that others hold: there are kernels for that for NVIDIA's GPUs,
        and for F16 keys and values."""
        settings, gpus = self.settings, self.usages[:-1]
        return (
            READS_OWN_CELLS
            and self.fully_offloaded
            and all(usage.device.name.startswith("CUDA") for usage in gpus)
            and settings.flash_attn != "off"
            and settings.cache_type_k == settings.cache_type_v == "f16"
            and not settings.deterministic
        )

    @property
    def fits(self) -> bool:
        return not any(usage.short for usage in self.usages)


def plan_memory(wanted: EngineSettings, header: Header) -> MemoryPlan:
    """Decide the sizes of context, pass and step where they are left open, and check that everything fits.

    Raises DoesNotFit, with the shortfall and the settings that would help, or ModelLoadError when the model
    is no Qwen3.5 or llama.cpp does not take the file or the settings.
    """
    spec = ModelSpec.from_header(header)
    if wanted.draft_model is not None:
        draft = read_header(wanted.draft_model, "draft_model")
        spec = replace(spec, draft=DraftSpec.from_header(draft, spec))
    places = _places(wanted)
    on_gpu = places[0].is_gpu
    settings = _with_prefix_cache(_with_what_can_draft(_with_shares(wanted, places), spec), spec)
    settings = _with_passes(settings, wanted, UBATCH_GPU if on_gpu else UBATCH_CPU, on_gpu=on_gpu)
    settings = _with_snapshots(settings, spec)
    if wanted.ctx_size == 0:
        each = min(spec.n_ctx_train, TOKENS_PER_SEQUENCE)
        cells = min(settings.parallel * each, MAX_CELLS)
        settings = settings.replace(ctx_size=cells + (0 if settings.deterministic else settings.prefix_cells))
    settings = settings.replace(ctx_size=_in_streams(settings))
    plan = _rehearsed_plan(settings, spec, places)
    if plan.fits:
        return _with_larger_prefix_cache(plan, wanted)
    while not plan.fits:
        smaller = _smaller(plan, wanted)
        if smaller == plan.settings:
            plan = _rehearsed_plan(smaller, spec, places)
            raise DoesNotFit("\n".join([*_complaints(plan), "the plan was:", str(plan)]))
        plan = _rearranged(plan, smaller)
        if _arrange(smaller, spec, places, [0] * len(places)).fits:  # else a rehearsal would tell nothing new
            plan = _rehearsed_plan(smaller, spec, places)
    return plan


def _smaller(plan: MemoryPlan, wanted: EngineSettings) -> EngineSettings:
    """Less of what `wanted` leaves open; the same where nothing is left to give up."""
    settings = plan.settings
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
    """Without the multi-token-prediction head, if the file has none."""
    if spec.mtp_weights or settings.speculation not in ("both", "mtp"):
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
    """Decide which GPU gets how many layers, where that is left open: as llama.cpp does, by free memory."""
    gpus = [place for place in places if place.is_gpu]
    if settings.split_mode == "none" or settings.tensor_split or not gpus:
        return settings
    return settings.replace(tensor_split=",".join(f"{gpu.free / 2**30:.1f}" for gpu in gpus))


def _with_passes(
    settings: EngineSettings, wanted: EngineSettings, usual: int, *, on_gpu: bool
) -> EngineSettings:
    """Decide the tokens of a pass (`usual`) and of a step, where `wanted` leaves them open."""
    ubatch = wanted.ubatch_size or usual
    batch = max(PASSES * ubatch if on_gpu else BATCH_CPU, ubatch, settings.parallel)
    return settings.replace(ubatch_size=ubatch, batch_size=wanted.batch_size or batch)


def _with_snapshots(settings: EngineSettings, spec: ModelSpec) -> EngineSettings:
    """Decide how far a sequence can go back, where that is left open, before it is known what fits."""
    wanted = settings.snapshots
    if wanted < 0:
        wanted = min(settings.mtp_depth, SNAPSHOTS) if uses_mtp(settings, spec) else 0
        if spec.draft is not None:
            wanted = max(wanted, spec.draft.block - 1)
        if not SHARES_SNAPSHOTS:
            wanted = min(wanted, FEW_SNAPSHOTS) if settings.parallel <= SNAPSHOT_SLOTS else 0
    if not SequenceIds.of(settings).rollback or not spec.state:
        wanted = 0
    # llama.cpp keeps a verification in one pass (`split_equal`), which must have room for one more
    most = max(0, min(settings.ubatch_size, settings.batch_size) - 2)
    return settings.replace(snapshots=min(wanted, most))


def _with_fewer_snapshots(plan: MemoryPlan, *, checkpoints: bool) -> EngineSettings:
    """What fits, if buffers stay as they are; without any where even none are too many.

    With `checkpoints`, some of these may go, too.
    """
    settings = before = plan.settings
    while settings.snapshots and not plan.fits:
        fewer = max(FEW_CHECKPOINTS, settings.prefix_checkpoints * 3 // 4)
        if checkpoints and fewer < settings.prefix_checkpoints:
            settings = settings.replace(prefix_checkpoints=fewer)
        else:
            settings = settings.replace(snapshots=settings.snapshots - 1)
        plan = _rearranged(plan, settings)
    return settings if settings.snapshots else before.replace(snapshots=0)


def _with_prefix_cache(settings: EngineSettings, spec: ModelSpec) -> EngineSettings:
    """Decide what the prefix cache may hold, where that is left open."""
    if not settings.prefix_cache:
        return settings.replace(prefix_checkpoints=0, prefix_cells=0)
    room = MAX_SEQUENCES - SequenceIds.of(settings).rollback.stop
    usual = STREAM_CHECKPOINTS if settings.deterministic else CHECKPOINTS
    checkpoints = min(settings.prefix_checkpoints or usual, room)
    weights = sum(spec.layer_weights) + spec.output_weights
    cells = settings.prefix_cells or max(MIN_CELLS, padded(int(SLOWDOWN * weights / spec.cell(settings))))
    return settings.replace(prefix_checkpoints=checkpoints, prefix_cells=cells)


def _with_larger_prefix_cache(plan: MemoryPlan, wanted: EngineSettings) -> MemoryPlan:
    """Let the prefix cache have its share of the memory that is left, as far as `wanted` leaves that open.

    Running sequences take what they need of the pool, whoever holds it; so it may hold more cells than were
    added for its sake.
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

    part = _largest(0, PARTS, lambda part: is_modest(_rearranged(plan, larger(part))))
    while part:
        grown = _rehearsed_plan(larger(part), plan.spec, [usage.device for usage in plan.usages])
        if is_modest(grown):  # with the buffers that more ids bring
            return grown
        part -= 1
    return _rearranged(plan, larger(0))


def _places(settings: EngineSettings) -> list[Device]:
    """The GPUs that layers go to, if any, and the host."""
    found = devices()
    gpus = [device for device in found if device.is_gpu]
    host = next(device for device in found if not device.is_gpu)
    available = available_memory()
    if available is not None:
        host = replace(host, free=available)
    if not gpus or settings.n_gpu_layers == 0:
        return [host]
    if settings.split_mode == "layer":
        if settings.tensor_split and len(settings.shares) != len(gpus):
            raise ModelLoadError(f"tensor_split is {settings.tensor_split!r}; there are {len(gpus)} GPUs")
        return [*gpus, host]
    if settings.main_gpu >= len(gpus):
        raise ModelLoadError(f"main_gpu is {settings.main_gpu}; there are {len(gpus)} GPUs, numbered from 0")
    return [gpus[settings.main_gpu], host]


def _arrange(
    settings: EngineSettings, spec: ModelSpec, places: Sequence[Device], buffers: Sequence[int]
) -> MemoryPlan:
    """Put layers where llama.cpp puts them (`load_tensors` in llama-model.cpp): the last ones on GPUs.

    `buffers` are the bytes of compute buffers in each of `places`.
    """
    on_gpu, by_head, ids = len(places) > 1, uses_mtp(settings, spec), SequenceIds.of(settings)
    layers = spec.n_blocks + 1  # the output head counts as one more
    first = 0 if settings.n_gpu_layers < 0 else max(layers - settings.n_gpu_layers, 0)
    usages = [Usage(place, size) for place, size in zip(places, buffers, strict=True)]
    host = usages[-1]
    bounds = list(accumulate(settings.shares or [1.0]))

    def holder_of(layer: int) -> Usage:
        if not on_gpu or layer < first:
            return host
        return usages[bisect_right(bounds, (layer - first) / (layers - first) * bounds[-1])]

    last = holder_of(spec.n_blocks)
    n_states = len(ids) + settings.snapshots * (1 if SHARES_SNAPSHOTS else len(ids))
    drafts = by_head or spec.draft is not None
    n_settling = len(ids.lone) if settings.snapshots or drafts else 0
    for layer, size in enumerate(spec.layer_weights):
        holder = holder_of(layer)
        holder.weights += size
        holder.kv += spec.kv_cell(layer, settings) * settings.ctx_size
        holder.states += spec.layer_state[layer] * n_states
        holder.settling += spec.layer_state[layer] * n_settling
    host.weights += spec.input_weights if on_gpu or not spec.output_is_tied else 0
    last.weights += spec.output_weights
    host.cells = CELL_ENTRY * settings.ctx_size
    host.saved = settings.prefix_host_mib * MIB if settings.prefix_cache else 0
    if by_head:
        head, cells = holder_of(spec.n_blocks - 1), mtp_cells(settings)
        head.weights += spec.mtp_weights
        head.kv += spec.mtp_cell(settings) * cells
        host.cells += CELL_ENTRY * cells
        host.hidden += host_bytes(
            settings.parallel, settings.prefix_checkpoints, settings.mtp_window, spec.n_embd
        )
    if (draft := spec.draft) is not None:
        cells = draft_cells(settings, draft)
        last.weights += draft.weights
        last.kv += draft.cell(settings) * cells
        host.cells += CELL_ENTRY * cells
        if HAS_RING:
            last.hidden += 4 * draft.n_features * draft_ring(settings).n_rows
        else:  # llama.cpp has room for the rows of a whole step
            host.hidden += 4 * draft.n_features * settings.batch_size
            host.hidden += dflash.host_bytes(settings.parallel, settings.draft_window, draft.n_features)
    return MemoryPlan(settings, spec, tuple(usages))


def _rearranged(plan: MemoryPlan, settings: EngineSettings) -> MemoryPlan:
    """The same with other settings, which leave the compute buffers as they are."""
    places = [usage.device for usage in plan.usages]
    return _arrange(settings, plan.spec, places, [usage.compute for usage in plan.usages])


def _rehearsed_plan(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> MemoryPlan:
    return _arrange(settings, spec, places, _buffers(settings, spec, places))


def _buffers(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> list[int]:
    """Bytes of compute buffers in each of `places`.

    A rehearsal does allocate states and the table of cells: where the plan is too large without any buffers,
    it has fewer of both, and tells how these grow with the cells.
    """
    if _arrange(settings, spec, places, [0] * len(places)).fits:
        return _rehearsed(settings, spec, places)
    few = settings.replace(parallel=1, prefix_checkpoints=0, ctx_size=min(settings.ctx_size, MAX_CELLS))
    buffers = _rehearsed(few, spec, places)
    if settings.ctx_size == few.ctx_size:
        return buffers
    half = few.ctx_size // 2
    fewer = _rehearsed(few.replace(ctx_size=half), spec, places)
    return _on_the_line((half, fewer), (few.ctx_size, buffers), settings.ctx_size)


def _on_the_line(a: tuple[int, list[int]], b: tuple[int, list[int]], cells: int) -> list[int]:
    """Buffers that so many cells bring, as two numbers of cells tell: they grow nearly in proportion."""
    share = (cells - a[0]) / (b[0] - a[0])
    return [int(low + share * (high - low)) for low, high in zip(a[1], b[1], strict=True)]


def _rehearsed(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> list[int]:
    sizes = _rehearse(settings, spec, places)
    # on the host plain ones, or pinned for the GPU's sake (CUDA_Host)
    host = sum(size for name, size in sizes.items() if name.startswith("CPU") or "Host" in name)
    return [sizes.get(place.name, 0) if place.is_gpu else host for place in places]


_BUFFER = re.compile(r"(\S+)\s+(?:compute|output) buffer size =\s*([0-9.]+) MiB")


def _rehearse(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> dict[str, int]:
    """Bytes of compute and output buffers by ggml's name of the device, as llama.cpp itself reports them, now
    or at an earlier start."""
    file = RecordFile(Buffers, settings, places) if settings.remember else None
    if file is not None and (known := file.read()) is not None:
        return known.sizes
    model = load_model(settings, spec, rehearse=True)
    lines: list[str] = []
    try:
        context = Context(model, context_options(settings))
        lines += context.log
        if spec.draft is not None:
            lines += _rehearsed_draft(settings, spec.draft, context)
        context.close()
        if uses_mtp(settings, spec):
            head = MtpContext(model, head_options(settings))
            lines += head.log
            head.close()
    except LlamaError as error:
        raise ModelLoadError(f"llama.cpp refuses these settings for {settings.model}: {error}") from error
    finally:
        model.close()
    sizes: dict[str, int] = {}
    for line in lines:
        if match := _BUFFER.search(line):
            sizes[match[1]] = sizes.get(match[1], 0) + int(float(match[2]) * MIB)
    if file is not None:
        file.write(Buffers(sizes=sizes))
    return sizes


def _rehearsed_draft(settings: EngineSettings, spec: DraftSpec, trunk: Context) -> list[str]:
    model = load_draft(settings, spec, rehearse=True)
    try:
        context = draft_context(settings, spec, model, trunk)
        lines = context.log
        context.close()
    finally:
        model.close()
    return lines


def _in_streams(settings: EngineSettings) -> int:
    """Cells of the context: what is asked for or, with `deterministic`, a running sequence's share of that
    for every sequence id."""
    if not settings.deterministic:
        return padded(settings.ctx_size)
    return padded(-(-settings.ctx_size // settings.parallel)) * len(SequenceIds.of(settings))


def _size(size: int) -> str:
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "bytes" else f"{value:.1f} {units[0]}"


# --- what would help ---------------------------------------------------------------------------------------


def _complaints(plan: MemoryPlan) -> list[str]:
    """For each device that is too small, the shortfall and each setting that would do on its own."""
    return [
        f"{usage.device.name}: {_size(usage.total)} are needed and {_size(usage.device.free)} are free; "
        f"{_size(usage.short)} are missing (with a margin for the driver). "
        f"What would help: {', or '.join(_helpful(plan, index))}"
        for index, usage in enumerate(plan.usages)
        if usage.short
    ]


def _helpful(plan: MemoryPlan, index: int) -> list[str]:
    """Settings that make things fit on one device, and no worse on the other: each was planned with."""
    settings = plan.settings

    def does(other: MemoryPlan) -> bool:
        return not other.usages[index].short and all(
            after.short <= before.short for after, before in zip(other.usages, plan.usages, strict=True)
        )

    def does_with(**changes: Any) -> bool:
        return does(_rearranged(plan, settings.replace(**changes)))

    def most(name: str, least: int, below: int) -> int:
        """The largest value that does; one less than `least` if none does."""
        return _largest(least - 1, below - 1, lambda value: does_with(**{name: value}))

    found = []
    if cells := _most_cells(plan, does):
        if settings.deterministic:  # of the running sequences
            cells = cells // len(SequenceIds.of(settings)) * settings.parallel
        found.append(f"ctx_size={cells}")
    if settings.flash_attn != "off" and does_with(cache_type_k="q8_0", cache_type_v="q8_0"):
        found.append("cache_type_k=q8_0 with cache_type_v=q8_0")
    if settings.speculation != "off" and does_with(speculation="off", snapshots=0):
        found.append("speculation=off")
    if settings.snapshots and does_with(snapshots=0):
        found.append("snapshots=0")
    if window := most("mtp_window", 1, settings.mtp_window):
        found.append(f"mtp_window={window}")
    if checkpoints := most("prefix_checkpoints", 1, settings.prefix_checkpoints):
        found.append(f"prefix_checkpoints={checkpoints}")
    elif settings.prefix_cache and does_with(prefix_cache=False, prefix_checkpoints=0, prefix_cells=0):
        found.append("prefix_cache=false")
    if parallel := most("parallel", 1, settings.parallel):
        found.append(f"parallel={parallel}")
    if (host_mib := most("prefix_host_mib", 0, settings.prefix_host_mib)) >= 0:
        found.append(f"prefix_host_mib={host_mib}")
    places, ubatch = [usage.device for usage in plan.usages], settings.ubatch_size // 2
    if ubatch >= UBATCH_CPU // 4:
        passes = settings.replace(ubatch_size=ubatch)
        if does(_rehearsed_plan(passes, plan.spec, places)):
            found.append(f"ubatch_size={ubatch}")
    if places[index].is_gpu:
        all_layers = plan.spec.n_blocks + 1 if settings.n_gpu_layers < 0 else settings.n_gpu_layers
        if layers := most("n_gpu_layers", 1, all_layers):
            found.append(f"n_gpu_layers={layers} (the rest runs on the CPU, much slower)")
    return found or [
        "no single setting; use a smaller quantization of the model, or several of "
        "ctx_size, parallel, cache_type_k, cache_type_v, ubatch_size"
    ]


def _most_cells(plan: MemoryPlan, does: Callable[[MemoryPlan], bool]) -> int:
    """The largest `ctx_size` that does, with the compute buffers that it brings; 0 if none is found."""
    settings, spec, places = plan.settings, plan.spec, [usage.device for usage in plan.usages]

    def rehearsed(cells: int) -> tuple[int, list[int]]:
        return cells, _buffers(settings.replace(ctx_size=cells), spec, places)

    def fits(cells: int, buffers: list[int]) -> bool:
        return does(_arrange(settings.replace(ctx_size=cells), spec, places, buffers))

    most = min(settings.ctx_size, MAX_CELLS)
    a, b = rehearsed(most // 2), rehearsed(most)
    for _ in range(TRIALS):
        cells = CELL_PADDING * _largest(
            0,
            settings.ctx_size // CELL_PADDING - 1,
            lambda n, a=a, b=b: fits(n * CELL_PADDING, _on_the_line(a, b, n * CELL_PADDING)),  # type: ignore[misc]
        )
        if cells in (0, b[0]):
            return cells
        a, b = b, rehearsed(cells)
        if fits(*b):
            return cells
    return 0


def _largest(low: int, high: int, does: Callable[[int], bool]) -> int:
    """The largest number above `low`, up to `high`, that does, as every smaller one then does; else `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if does(middle) else (low, middle - 1)
    return low
