"""What a model will take and where, as a table; and what would help where it is too much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .contexts import drafts_by_head, head_cells, n_holders, n_sequences
from .errors import DoesNotFit
from .shape import Shape, kv_bytes

if TYPE_CHECKING:
    from .llama import Device
    from .settings import EngineSettings

CELL_PADDING = 256
"""llama.cpp rounds the cache up to a multiple of this (`GGML_PAD` in llama-context.cpp)."""

MIB = 1024**2


@dataclass(frozen=True)
class Usage:
    """What one device has to hold, in bytes."""

    device: Device
    weights: int
    kv: int
    states: int
    compute: int
    saved: int = 0
    """What the prefix cache may put aside in host memory."""
    settling: int = 0
    """Buffers for states of sequences that went back to a snapshot."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.states + self.compute + self.saved + self.settling

    @property
    def short(self) -> int:
        """Bytes missing, with a margin for what drivers and libraries take on the side; 0 if it fits."""
        margin = max(256 * MIB, self.device.total // 64) if self.device.is_gpu else 64 * MIB
        return max(0, self.total + margin - self.device.free)


@dataclass(frozen=True)
class MemoryPlan:
    """Where everything goes under `settings`, whose sizes are decided. `str()` is a table."""

    settings: EngineSettings
    shape: Shape
    usages: tuple[Usage, ...]

    def __str__(self) -> str:
        names = [f"{u.device.name} ({u.device.description})" for u in self.usages]
        width = max(len(name) for name in names)
        columns = ("weights", "KV cache", "states", "compute", "saved", "total", "free")
        lines = [" " * width + "".join(f"{column:>12}" for column in columns)]
        for name, u in zip(names, self.usages, strict=True):
            states = u.states + u.settling
            sizes = (u.weights, u.kv, states, u.compute, u.saved, u.total, u.device.free)
            lines.append(f"{name:<{width}}" + "".join(f"{_size(size):>12}" for size in sizes))
        settings, shape = self.settings, self.shape
        types = "/".join(dict.fromkeys([settings.cache_type_k, settings.cache_type_v]))
        lines.append(
            f"{settings.ctx_size:,} KV cells for {settings.parallel} sequences "
            f"({types}, {_size(shape.cell(settings))} a token; "
            f"recurrent state: {_size(sum(shape.layer_state))} a sequence)"
        )
        if settings.prefix_cache:
            lines.append(
                f"prefix cache: {settings.prefix_checkpoints} states and {settings.prefix_cells:,} cells"
            )
        if holders := n_holders(settings):
            head = " and the multi-token-prediction head" if drafts_by_head(settings, shape) else ""
            lines.append(f"speculation: {holders} states to go back to{head}")
        if settings.mtp_snapshots:
            lines.append(f"snapshots: every state has {settings.mtp_snapshots} more")
        if shape.mtp_weights and not drafts_by_head(settings, shape):
            lines.append(f"not loaded: multi-token-prediction head, {_size(shape.mtp_weights)}")
        return "\n".join(lines)

    @property
    def leaves_the_host_alone(self) -> bool:
        """Whether every layer is on a GPU, so that the host only starts what that computes."""
        return all(usage.device.is_gpu or not (usage.kv or usage.states) for usage in self.usages)

    def check(self) -> None:
        """Raise DoesNotFit, with the shortfall and the settings that would help, if a device is too small."""
        if problems := [_complaint(self, usage) for usage in self.usages if usage.short]:
            raise DoesNotFit("\n".join([*problems, "the plan was:", str(self)]))


def head_kv(settings: EngineSettings, shape: Shape) -> int:
    """Bytes of the cells of the multi-token-prediction head."""
    return kv_bytes(shape.mtp_kv_elements, settings) * head_cells(settings)


def first_on_gpu(settings: EngineSettings, shape: Shape) -> int:
    """The layer from which on everything is on the GPU; the output head counts as one more than there are."""
    return 0 if settings.n_gpu_layers < 0 else max(shape.n_blocks + 1 - settings.n_gpu_layers, 0)


def _complaint(plan: MemoryPlan, usage: Usage) -> str:
    """Name the shortfall of one device and each setting that would cover it on its own."""
    settings, shape, short = plan.settings, plan.shape, usage.short
    helps = []
    if usage.kv > short:
        cells = (settings.ctx_size - -(-short * settings.ctx_size // usage.kv)) // CELL_PADDING * CELL_PADDING
        if cells >= CELL_PADDING:
            helps.append(f"ctx_size={cells}")
        packed = settings.replace(cache_type_k="q8_0", cache_type_v="q8_0")
        saved = usage.kv * (1 - shape.cell(packed) / shape.cell(settings))
        if settings.flash_attn != "off" and saved >= short:
            helps.append("cache_type_k=q8_0 with cache_type_v=q8_0")
    n_seq = n_sequences(settings)
    surplus = -(-short * n_seq // usage.states) if usage.states else n_seq
    if holders := n_holders(settings):
        freed = usage.states * holders // n_seq
        if drafts_by_head(settings, shape):
            freed += shape.mtp_weights + head_kv(settings, shape)
        if freed >= short:
            helps.append("speculation=off")
    freed = usage.states - usage.states // (1 + settings.mtp_snapshots) + usage.settling
    if settings.mtp_snapshots and freed >= short:
        helps.append("mtp_snapshots=0")
    if surplus < settings.prefix_checkpoints:
        helps.append(f"prefix_checkpoints={settings.prefix_checkpoints - surplus}")
    elif surplus == settings.prefix_checkpoints:
        helps.append("prefix_cache=false")
    if surplus < settings.parallel:
        helps.append(f"parallel={settings.parallel - surplus}")
    if usage.saved > short:
        helps.append(f"prefix_host_mib={(usage.saved - short) // MIB}")
    if usage.compute > 2 * short and settings.ubatch_size > 128:
        helps.append(f"ubatch_size={settings.ubatch_size // 2}")
    if usage.device.is_gpu:
        freed = 0
        for layer in range(first_on_gpu(settings, shape), len(shape.layer_weights)):
            freed += shape.layer_weights[layer] + shape.kv_cell(layer, settings) * settings.ctx_size
            freed += shape.layer_state[layer] * n_sequences(settings) * (1 + settings.mtp_snapshots)
            if freed >= short:
                helps.append(f"n_gpu_layers={shape.n_blocks - layer} (the rest runs on the CPU, much slower)")
                break
    if not helps:
        helps.append(
            "no single setting; use a smaller quantization of the model, or several of "
            "ctx_size, parallel, cache_type_k, cache_type_v, ubatch_size"
        )
    return (
        f"{usage.device.name}: {_size(usage.total)} are needed and {_size(usage.device.free)} are free; "
        f"{_size(short)} are missing (with a margin for the driver). What would help: {', or '.join(helps)}"
    )


def _size(size: int) -> str:
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "bytes" else f"{value:.1f} {units[0]}"
