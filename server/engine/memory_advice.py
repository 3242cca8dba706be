"""What would help where a plan does not fit: settings that would do on their own, each planned with."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from .contexts import CELL_PADDING
from .memory import MAX_CELLS, arrange, compute_buffers, on_the_line, size_text
from .sequence_ids import SequenceIds

if TYPE_CHECKING:
    from collections.abc import Callable

    from .memory import MemoryPlan

TRIALS = 5
"""Rehearsals to find out how large a context would fit."""

SMALLEST_UBATCH = 128
"""Tokens of a pass below which none is advised."""


def complaints(plan: MemoryPlan) -> list[str]:
    """For each device that is too small, the shortfall and each setting that would do on its own."""
    return [
        f"{usage.device.name}: {size_text(usage.total)} are needed and "
        f"{size_text(usage.device.free)} are free; "
        f"{size_text(usage.short)} are missing (with a margin for the driver). "
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
        return does(plan.rearranged(settings.replace(**changes)))

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
    ubatch = settings.ubatch_size // 2
    if ubatch >= SMALLEST_UBATCH:
        passes = settings.replace(ubatch_size=ubatch)
        if does(plan.rehearsed(passes)):
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
    """The largest `ctx_size` that does, with the compute buffers that it brings; 0 if none is found."""
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
    """The largest number above `low`, up to `high`, that does, as every smaller one then does; else `low`."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda value: not does(value))
