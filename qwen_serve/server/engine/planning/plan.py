"""The memory that everything takes on each device, planned before anything is loaded.

The sizes of weights come from the GGUF's tensors, those of KV cells and recurrent states from its metadata,
and those of compute buffers from a profile run: llama.cpp builds its graphs without allocating weights or
cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from qwen_serve.llamacpp import (
    HAS_RING,
    READS_OWN_CELLS,
    SHARES_SNAPSHOTS,
    Device,
    keeps_f16_copies,
    takes_rows,
)
from qwen_serve.server.engine.settings import EngineSettings
from qwen_serve.server.engine.speculation import dflash
from qwen_serve.server.engine.speculation.mtp import host_bytes

from .contexts import draft_cells, draft_ring, mtp_cells, uses_mtp
from .measured import profile_run
from .sequence_ids import SequenceIds
from .spec import ModelSpec, Part
from .vision import IN_FLIGHT, IN_FLIGHT_SHARE

MIB = 1024**2

MAX_CELLS = 262_144
"""Default maximum cells of all sequences together, since every copy and removal looks at each cell."""

CELL_ENTRY = 48
"""Bytes of host memory for llama.cpp's record of a cell: its position, its shift, its place in an image, and
the sequences that share it (llama-kv-cells.h)."""


@dataclass
class DeviceMemory:
    """What one device must hold, in bytes."""

    device: Device
    compute: int
    weights: int = 0
    copies: int = 0
    """FP16 copies of quantized weights."""
    kv: int = 0
    states: int = 0
    materializing: int = 0
    """Buffers for states of sequences that were rolled back to a snapshot."""
    cells: int = 0
    """llama.cpp's table of cells."""
    vision: int = 0
    """Compute buffers of a vision tower."""
    adapters: int = 0
    """LoRA adapters, and a buffer for the largest product that one adds."""
    hidden: int = 0
    """Hidden states that wait for the MTP head and for a draft model."""
    pictures: int = 0
    """Rows of encoded pictures: those of requests, and cached ones."""
    saved: int = 0
    """States that the prefix cache may keep in host memory."""

    def add(
        self,
        part: Part,
        settings: EngineSettings,
        cells: int = 0,
        states: int = 0,
        materializing: int = 0,
        operands: int = 0,
    ) -> None:
        """Add a part of a model with its cells, states and tokens' operands."""
        self.weights += part.weights
        if settings.f16_copies == "on" and self.device.is_gpu and keeps_f16_copies(self.device.name):
            self.copies += part.copies
        self.kv += part.cell(settings) * cells
        self.states += part.state_in(settings) * states + part.operand * operands
        self.materializing += part.state_in(settings) * materializing

    @property
    def parts(self) -> dict[str, int]:
        """All sizes, by the names that the table shows."""
        return {
            "weights": self.weights,
            "FP16 copies of weights": self.copies,
            "LoRA adapters": self.adapters,
            "KV cache": self.kv,
            "table of KV cells": self.cells,
            "recurrent states": self.states + self.materializing,
            "compute buffers": self.compute + self.vision,
            "hidden states for drafters": self.hidden,
            "rows of pictures": self.pictures,
            "saved by the prefix cache": self.saved,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def left(self) -> int:
        """Bytes that stay free after a margin for drivers and libraries; negative if bytes are missing."""
        margin = max(256 * MIB, self.device.total // 64) if self.device.is_gpu else 64 * MIB
        return self.device.free - margin - self.total

    @property
    def short(self) -> int:
        """Bytes missing, that margin included; 0 if it fits."""
        return max(0, -self.left)


@dataclass(frozen=True)
class MemoryPlan:
    """What each device holds with `settings`, in which all sizes are chosen. `str()` gives a table."""

    settings: EngineSettings
    spec: ModelSpec
    usages: tuple[DeviceMemory, ...]
    """One for each GPU in use and, last, the host's."""

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
                + "".join(f"  {size_text(size) if size else '-':>{max(10, len(c))}}" for c, size in cells)
            )
        settings, spec = self.settings, self.spec
        types = "/".join(dict.fromkeys([settings.cache_type_k, settings.cache_type_v]))
        lines.append(
            f"{settings.ctx_size:,} KV cells for {self._sharers} "
            f"({types}, {size_text(spec.cell(settings))} a token; "
            f"recurrent state: {settings.state_type}, {size_text(spec.state_in(settings))} a sequence)"
        )
        if settings.prefix_cache:
            budget = "" if settings.deterministic else f" and {settings.prefix_cells:,} cells"
            lines.append(f"prefix cache: {settings.prefix_checkpoints} states{budget}")
        if drafting := len((ids := SequenceIds.of(settings)).drafting):
            rollback = drafting if settings.deterministic else len(ids.rollback)
            head = ", the multi-token-prediction head" if uses_mtp(settings, spec) else ""
            draft = f", draft model {spec.draft.file.path}" if spec.draft else ""
            lines.append(f"speculation: {rollback} states to go back to{head}{draft}")
        if spec.vision:
            lines.append(f"pictures: {spec.vision.file.path}, {size_text(spec.vision.weights)}")
        if settings.snapshots:
            whose = "of one sequence" if SHARES_SNAPSHOTS else "more of every state"
            lines.append(f"snapshots: {settings.snapshots} {whose}")
        if settings.operands:
            lines.append(f"operands: drafts of up to {settings.operands}, of each sequence that drafts")
        if spec.mtp.weights and not uses_mtp(settings, spec):
            lines.append(f"not loaded: multi-token-prediction head, {size_text(spec.mtp.weights)}")
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
        """Whether every layer is on a GPU, so that the host only launches its work."""
        return all(usage.device.is_gpu or not (usage.kv or usage.states) for usage in self.usages)

    @property
    def on_gpus(self) -> int:
        """Bytes that GPUs hold."""
        return sum(usage.total for usage in self.usages if usage.device.is_gpu)

    @property
    def copies(self) -> int:
        """Bytes of FP16 copies of weights."""
        return sum(usage.copies for usage in self.usages)

    @property
    def embedding_on(self) -> Device | None:
        """The GPU that holds the token embedding; None: the host does."""
        return embedding_place(self.settings, self.spec, self.places)

    @property
    def reads_own_cells(self) -> bool:
        """Whether steps read only their own sequences' cells: NVIDIA GPUs have kernels for that, with F16
        keys and values."""
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

    @property
    def places(self) -> list[Device]:
        """The GPUs in use and, last, the host."""
        return [usage.device for usage in self.usages]

    def rearranged(self, settings: EngineSettings) -> MemoryPlan:
        """The plan for other settings, with the same compute buffers."""
        return place_layers(settings, self.spec, self.places, [usage.compute for usage in self.usages])

    def profiled(self, settings: EngineSettings) -> MemoryPlan:
        """The plan for other settings, with their own compute buffers."""
        return make_plan(settings, self.spec, self.places)


def place_layers(
    settings: EngineSettings, spec: ModelSpec, places: Sequence[Device], buffers: Sequence[int]
) -> MemoryPlan:
    """Place layers as llama.cpp does (`load_tensors` in llama-model.cpp): the last ones on GPUs.

    `buffers` are the bytes of compute buffers in each of `places`.
    """
    by_head, ids = uses_mtp(settings, spec), SequenceIds.of(settings)
    usages = [DeviceMemory(place, size) for place, size in zip(places, buffers, strict=True)]
    host = usages[-1]

    def holder_of(layer: int) -> DeviceMemory:
        return usages[_place_of(layer, settings, spec, len(places))]

    last = holder_of(spec.n_blocks)
    n_states = len(ids) + settings.snapshots * (1 if SHARES_SNAPSHOTS else len(ids))
    n_operands = 0
    if settings.operands:
        n_states, n_operands = n_states + 1, (settings.operands + 1) * len(ids.drafting) + 1
    drafts = by_head or spec.draft is not None
    saved = ids.drafting if settings.deterministic else ids.lone
    n_materializing = len(saved) if settings.deterministic or settings.snapshots or drafts else 0
    for number, layer in enumerate(spec.layers):
        holder_of(number).add(layer, settings, settings.ctx_size, n_states, n_materializing, n_operands)
    last.add(spec.head, settings)
    embedding = host if embedding_place(settings, spec, places) is None else holder_of(0)
    if not (spec.output_is_tied and embedding is last):  # else they are one tensor
        embedding.weights += spec.input_weights
    for adapter in spec.adapters:
        for block, n_bytes in adapter.blocks.items():
            holder_of(spec.n_blocks if block < 0 else block).adapters += n_bytes
    if widest := max((adapter.widest for adapter in spec.adapters), default=0):
        for usage in {id(usage): usage for usage in map(holder_of, range(len(spec.layers)))}.values():
            usage.adapters += 4 * widest * settings.ubatch_size
    host.cells = CELL_ENTRY * settings.ctx_size
    host.saved = settings.prefix_host_mib * MIB if settings.prefix_cache else 0
    if by_head:
        cells = mtp_cells(settings)
        holder_of(spec.n_blocks - 1).add(spec.mtp, settings, cells)
        host.cells += CELL_ENTRY * cells
        host.hidden += host_bytes(
            settings.parallel, settings.prefix_checkpoints, settings.draft_window, spec.n_embd
        )
    if (tower := spec.vision) is not None:  # mtmd uses the first GPU
        holder = usages[0] if settings.mmproj_offload else host
        holder.weights += tower.weights
        holder.vision = tower.compute + (tower.products if holder.device.is_gpu else 0)
        host.pictures = settings.image_cache_mib * MIB
        host.pictures += min(IN_FLIGHT, host.device.free // IN_FLIGHT_SHARE)
    if (draft := spec.draft) is not None:
        cells = draft_cells(settings, draft)
        last.add(draft.part, settings, cells)
        host.cells += CELL_ENTRY * cells
        if HAS_RING:
            last.hidden += 4 * draft.n_features * draft_ring(settings).n_rows
        else:  # llama.cpp reserves rows for a whole step
            host.hidden += 4 * draft.n_features * settings.batch_size
            host.hidden += dflash.host_bytes(settings.parallel, settings.draft_window, draft.n_features)
    return MemoryPlan(settings, spec, tuple(usages))


def _place_of(layer: int, settings: EngineSettings, spec: ModelSpec, n_places: int) -> int:
    """Index of the place that holds a layer; the output head counts as one more. The last is the host."""
    layers = spec.n_blocks + 1
    first = 0 if settings.n_gpu_layers < 0 else max(layers - settings.n_gpu_layers, 0)
    if n_places == 1 or layer < first:
        return n_places - 1
    bounds = list(accumulate(settings.shares or [1.0]))
    return bisect_right(bounds, (layer - first) / (layers - first) * bounds[-1])


def embedding_place(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> Device | None:
    """The GPU for the token embedding: the first layer's, if every layer is on a GPU; else None.

    While the host looks up a prompt's tokens, the GPU is idle.
    """
    first = places[_place_of(0, settings, spec, len(places))]
    on_gpu = settings.offload_embedding and first.name.startswith("CUDA")
    return first if on_gpu and takes_rows(first.name, spec.embedding_type, spec.n_embd) else None


def make_plan(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> MemoryPlan:
    """The plan for these settings on `places`, the GPUs in use and, last, the host."""
    return place_layers(settings, spec, places, compute_buffers(settings, spec, places))


def compute_buffers(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> list[int]:
    """Bytes of compute buffers in each of `places`.

    A profile run allocates states and the table of cells. If these do not fit, runs with fewer of them
    show how the buffers grow with the number of cells.
    """
    if place_layers(settings, spec, places, [0] * len(places)).fits:
        return _profiled(settings, spec, places)
    few = settings.replace(parallel=1, prefix_checkpoints=0, ctx_size=min(settings.ctx_size, MAX_CELLS))
    found = _profiled(few, spec, places)
    if settings.ctx_size == few.ctx_size:
        return found
    half = few.ctx_size // 2
    fewer = _profiled(few.replace(ctx_size=half), spec, places)
    return on_the_line((half, fewer), (few.ctx_size, found), settings.ctx_size)


def on_the_line(a: tuple[int, list[int]], b: tuple[int, list[int]], cells: int) -> list[int]:
    """Buffers for a number of cells, on the line through two known points: they grow nearly linearly."""
    share = (cells - a[0]) / (b[0] - a[0])
    return [int(low + share * (high - low)) for low, high in zip(a[1], b[1], strict=True)]


def _profiled(settings: EngineSettings, spec: ModelSpec, places: Sequence[Device]) -> list[int]:
    sizes = profile_run(settings, spec, places, embedding_place(settings, spec, places))
    # buffers on the host: plain ones (CPU), and pinned ones for the GPU (CUDA_Host)
    host = sum(size for name, size in sizes.items() if name.startswith("CPU") or "Host" in name)
    return [sizes.get(place.name, 0) if place.is_gpu else host for place in places]


def size_text(size: int) -> str:
    """A size as text: 1.5 GiB."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "bytes" else f"{value:.1f} {units[0]}"
