"""What a plan that does not fit lacks, and the settings each of which would suffice alone."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .contexts import CELL_PADDING
from .hardware import bounded_by
from .plan import MAX_CELLS, DeviceMemory, MemoryPlan, compute_buffers, on_the_line, place_layers, size_text
from .sequence_ids import SequenceIds

TRIALS = 5
"""Profile runs to find the largest context that fits."""

SMALLEST_UBATCH = 128
"""Smallest `ubatch_size` that an error recommends."""


def shortfalls(plan: MemoryPlan) -> list[str]:
    """For each device that is too small, the shortfall and each setting that would suffice alone."""
    return [
        f"{usage.device.name}: {size_text(usage.total)} are needed and "
        f"{size_text(usage.device.free)} are free{_within(usage)}; "
        f"{size_text(usage.short)} are missing (with a margin for the driver). "
        f"What would help: {', or '.join([*_higher(usage), *_helpful(plan, index)])}"
        for index, usage in enumerate(plan.usages)
        if usage.short
    ]


def _within(usage: DeviceMemory) -> str:
    """What bounds the memory of the host, if it is a limit of this process."""
    bound = "" if usage.device.is_gpu else bounded_by()
    return f" within {bound}" if bound else ""


def _higher(usage: DeviceMemory) -> list[str]:
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
    if ubatch >= SMALLEST_UBATCH and does(plan.profiled(settings.replace(ubatch_size=ubatch))):
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

    def profiled(cells: int) -> tuple[int, list[int]]:
        return cells, compute_buffers(settings.replace(ctx_size=cells), spec, places)

    def fits(cells: int, found: list[int]) -> bool:
        return does(place_layers(settings.replace(ctx_size=cells), spec, places, found))

    most = min(settings.ctx_size, MAX_CELLS)
    a, b = profiled(most // 2), profiled(most)
    for _ in range(TRIALS):
        cells = CELL_PADDING * _largest(
            0,
            settings.ctx_size // CELL_PADDING - 1,
            lambda n, a=a, b=b: fits(n * CELL_PADDING, on_the_line(a, b, n * CELL_PADDING)),  # type: ignore[misc]
        )
        if cells in (0, b[0]):
            return cells
        a, b = b, profiled(cells)
        if fits(*b):
            return cells
    return 0


def _largest(low: int, high: int, does: Callable[[int], bool]) -> int:
    """The largest number above `low`, up to `high`, for which `does` is true, else `low`. If it is true for a
    number, it must be for every smaller one."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda value: not does(value))
