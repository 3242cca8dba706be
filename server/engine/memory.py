"""How large everything becomes: planned before the model is loaded, and refused if it does not fit.

Weights come from the GGUF's tensor sizes, KV cells and recurrent states from its shape, compute buffers from
a rehearsal, in which llama.cpp builds its graphs without allocating weights or cache.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from .contexts import (
    ALONE,
    context_options,
    drafts_by_head,
    head_options,
    n_holders,
    n_sequences,
    with_passes,
)
from .errors import LlamaError, ModelLoadError
from .hardware import available_memory
from .llama import Context, Device, Model, devices
from .llama.mtp import MtpContext
from .memory_plan import CELL_PADDING, MIB, MemoryPlan, Usage, first_on_gpu, head_kv
from .settings import MAX_SEQUENCES
from .shape import Shape, shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .gguf import Header
    from .settings import EngineSettings, Speculation

log = logging.getLogger(__name__)

TOKENS_PER_SEQUENCE = 16_384
"""What each sequence gets of the cache when nobody says how large it should be."""

MOST_CELLS = 262_144
"""What all of them together get at most, if nobody says: every copy and removal looks at each cell."""

SMALLEST_CONTEXT = 2_048
"""The least that is worth choosing on one's own; a smaller one has to be asked for."""

CHECKPOINTS = 32
"""States that the prefix cache may hold when nobody says how many."""

SLOWDOWN = 0.1
"""How much longer a step of one sequence may take because of what the prefix cache holds, when nobody says:
such a step reads the weights and every occupied cell once, so this is the ratio of their sizes."""

LEAST_CELLS = 9_216
"""What it may hold in any case: a prompt of 8,192 tokens and its answer."""

SNAPSHOTS, SNAPSHOT_SLOTS = 2, 8
"""Snapshots of each recurrent state where the MTP head drafts, there are at most so many slots, and nobody
says how many. More let deeper drafts of a lone sequence be taken back for nothing, but every step copies the
convolutions' part of each one, drafts or not: 0.03 ms of 3.6 on an H200, at 64 sequences 0.8 of 26."""

FEW_CHECKPOINTS = 16
"""Checkpoints down to which these make room for snapshots."""

UBATCH_GPU, UBATCH_CPU = 2_048, 512
"""Tokens in one pass over the weights when nobody says how many. A pass reads all weights, however many it
has: 128 of a prompt took 19 ms on an H200, 512 took 44 (bench/results/2026-11-21-h200/prefix-cost.json)."""


def plan_memory(wanted: EngineSettings, header: Header) -> MemoryPlan:
    """Decide the sizes of context, pass and step where they are left open, and check that everything fits.

    Raises DoesNotFit, or ModelLoadError when llama.cpp does not take the file or the settings.
    """
    shape = shape_of(header)
    places = _places(wanted)
    on_gpu = places[0].is_gpu
    settings = _with_prefix_cache(_with_what_can_draft(wanted, shape), shape)
    settings = with_passes(settings, wanted, UBATCH_GPU if on_gpu else UBATCH_CPU, on_gpu=on_gpu)
    settings = _with_snapshots(settings, shape)
    chosen = settings.ctx_size == 0
    if chosen:
        each = min(shape.n_ctx_train, TOKENS_PER_SEQUENCE)
        cells = min(settings.parallel * each, MOST_CELLS)
        settings = settings.replace(ctx_size=cells + settings.prefix_cells)
    settings = settings.replace(ctx_size=_padded(settings.ctx_size))
    while True:
        plan = _arrange(settings, shape, places, {})
        affordable = all(usage.states < usage.device.free for usage in plan.usages)
        # A rehearsal does allocate the states; the compute buffers hardly depend on their number.
        few = settings if affordable else settings.replace(parallel=1, prefix_checkpoints=0)
        compute = _rehearse(few, shape)
        plan = _arrange(settings, shape, places, compute)
        if not any(usage.short for usage in plan.usages):
            break
        if wanted.mtp_snapshots < 0 and settings.mtp_snapshots:
            settings = _with_fewer_snapshots(plan, places, compute, checkpoints=not wanted.prefix_checkpoints)
            continue
        smaller = settings.replace(ctx_size=_padded(settings.ctx_size * 3 // 4)) if chosen else settings
        if wanted.prefix_cache and not wanted.prefix_checkpoints and settings.prefix_checkpoints > 1:
            smaller = smaller.replace(prefix_checkpoints=settings.prefix_checkpoints * 3 // 4)
        smaller = with_passes(smaller, wanted, UBATCH_CPU, on_gpu=on_gpu)
        if smaller == settings or smaller.ctx_size < SMALLEST_CONTEXT:
            break
        settings = smaller
    plan.check()
    return plan


def _with_what_can_draft(settings: EngineSettings, shape: Shape) -> EngineSettings:
    """Without the multi-token-prediction head, if the file has none."""
    if shape.mtp_weights or settings.speculation not in ("both", "mtp"):
        return settings
    left: Speculation = "ngram" if settings.speculation == "both" else "off"
    log.warning(
        "speculation is %r, but %s has no multi-token-prediction head: %s",
        settings.speculation,
        settings.model,
        "only text that repeats is drafted from" if left == "ngram" else "nothing is drafted",
    )
    return settings.replace(speculation=left)


def _with_snapshots(settings: EngineSettings, shape: Shape) -> EngineSettings:
    """Decide how far a sequence can go back, where that is left open, before it is known what fits."""
    wanted = settings.mtp_snapshots
    if wanted < 0:
        pays = drafts_by_head(settings, shape) and settings.parallel <= SNAPSHOT_SLOTS
        wanted = min(settings.mtp_depth, SNAPSHOTS) if pays else 0
    if not n_holders(settings) or not sum(shape.layer_state):
        wanted = 0
    # llama.cpp keeps a verification in one pass (`split_equal`), which must have room for one more
    most = max(0, min(settings.ubatch_size, settings.batch_size) - 2)
    return settings.replace(mtp_snapshots=min(wanted, most))


def _with_fewer_snapshots(
    plan: MemoryPlan, places: Sequence[Device], compute: Mapping[str, int], *, checkpoints: bool
) -> EngineSettings:
    """What fits, if buffers stay as they are; without any where even none are too many.

    With `checkpoints`, some of these may go, too.
    """
    settings = before = plan.settings
    while settings.mtp_snapshots and any(usage.short for usage in plan.usages):
        fewer = max(FEW_CHECKPOINTS, settings.prefix_checkpoints * 3 // 4)
        if checkpoints and fewer < settings.prefix_checkpoints:
            settings = settings.replace(prefix_checkpoints=fewer)
        else:
            settings = settings.replace(mtp_snapshots=settings.mtp_snapshots - 1)
        plan = _arrange(settings, plan.shape, places, compute)
    return settings if settings.mtp_snapshots else before.replace(mtp_snapshots=0)


def _with_prefix_cache(settings: EngineSettings, shape: Shape) -> EngineSettings:
    """Decide what the prefix cache may hold, where that is left open."""
    if not settings.prefix_cache:
        return settings.replace(prefix_checkpoints=0, prefix_cells=0)
    checkpoints = min(
        settings.prefix_checkpoints or CHECKPOINTS, MAX_SEQUENCES - settings.parallel - n_holders(settings)
    )
    weights = sum(shape.layer_weights) + shape.output_weights
    cells = settings.prefix_cells or max(LEAST_CELLS, _padded(int(SLOWDOWN * weights / shape.cell(settings))))
    return settings.replace(prefix_checkpoints=checkpoints, prefix_cells=cells)


def _places(settings: EngineSettings) -> list[Device]:
    """The chosen GPU, if any layer goes there, and the host."""
    found = devices()
    gpus = [device for device in found if device.is_gpu]
    host = next(device for device in found if not device.is_gpu)
    available = available_memory()
    if available is not None:
        host = replace(host, free=available)
    if not gpus or settings.n_gpu_layers == 0:
        return [host]
    if settings.main_gpu >= len(gpus):
        raise ModelLoadError(f"main_gpu is {settings.main_gpu}; there are {len(gpus)} GPUs, numbered from 0")
    return [gpus[settings.main_gpu], host]


def _arrange(
    settings: EngineSettings, shape: Shape, places: Sequence[Device], compute: Mapping[str, int]
) -> MemoryPlan:
    """Put layers where llama.cpp puts them (`load_tensors` in llama-model.cpp): the last ones on the GPU."""
    n_gpu = 0 if len(places) == 1 else settings.n_gpu_layers
    first = first_on_gpu(settings, shape)
    weights, kv, states, settling = [0, 0], [0, 0], [0, 0], [0, 0]
    n_states = n_sequences(settings) * (1 + settings.mtp_snapshots)
    copies = settings.mtp_snapshots or drafts_by_head(settings, shape)
    n_settling = min(settings.parallel, ALONE) if copies else 0
    for layer, size in enumerate(shape.layer_weights):
        on_host = int(n_gpu == 0 or layer < first)
        weights[on_host] += size
        kv[on_host] += shape.kv_cell(layer, settings) * settings.ctx_size
        states[on_host] += shape.layer_state[layer] * n_states
        settling[on_host] += shape.layer_state[layer] * n_settling
    if drafts_by_head(settings, shape):
        weights[int(n_gpu == 0)] += shape.mtp_weights
        kv[int(n_gpu == 0)] += head_kv(settings, shape)
    weights[1] += shape.input_weights
    weights[int(n_gpu == 0)] += shape.output_weights
    if n_gpu == 0 and shape.output_is_tied:
        weights[1] -= shape.input_weights
    usages = []
    for device in places:
        i = int(not device.is_gpu)
        if device.is_gpu:
            buffers = compute.get(device.name, 0)
        else:  # plain, or pinned for the GPU's sake (CUDA_Host)
            buffers = sum(size for name, size in compute.items() if name.startswith("CPU") or "Host" in name)
        saved = 0 if device.is_gpu or not settings.prefix_cache else settings.prefix_host_mib * MIB
        usages.append(Usage(device, weights[i], kv[i], states[i], buffers, saved, settling[i]))
    return MemoryPlan(settings, shape, tuple(usages))


_BUFFER = re.compile(r"(\S+)\s+(?:compute|output) buffer size =\s*([0-9.]+) MiB")


def _rehearse(settings: EngineSettings, shape: Shape) -> dict[str, int]:
    """Bytes of compute and output buffers by ggml's name of the device, as llama.cpp itself reports them."""
    by_head = drafts_by_head(settings, shape)
    model = Model(
        settings.model,
        n_gpu_layers=settings.n_gpu_layers,
        main_gpu=settings.main_gpu,
        rehearse=True,
        load_mtp=by_head,
    )
    log: list[str] = []
    try:
        context = Context(model, context_options(settings))
        log += context.log
        context.close()
        if by_head:
            head = MtpContext(model, head_options(settings))
            log += head.log
            head.close()
    except LlamaError as error:
        raise ModelLoadError(f"llama.cpp refuses these settings for {settings.model}: {error}") from error
    finally:
        model.close()
    sizes: dict[str, int] = {}
    for line in log:
        if match := _BUFFER.search(line):
            sizes[match[1]] = sizes.get(match[1], 0) + int(float(match[2]) * MIB)
    return sizes


def _padded(cells: int) -> int:
    return -(-cells // CELL_PADDING) * CELL_PADDING
