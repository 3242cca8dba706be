"""What llama.cpp takes for granted of a model's sizes: it divides by them, allocates by them, or aborts.

Each refusal names the key, its value and what would be right. Sources: `load_hparams` in llama-model.cpp,
models/qwen35.cpp, qwen35moe.cpp and dflash.cpp.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from qwen_serve.llamacpp.errors import ModelLoadError

if TYPE_CHECKING:
    from qwen_serve.llamacpp.gguf import Header, Metadata

MAX_LAYERS = 512
"""`LLAMA_MAX_LAYERS`."""

MAX_MTP = 1
"""Blocks to predict further tokens: `QWEN35 MTP currently only supports a single MTP block`."""

MAX_EXPERTS = 1024
"""`LLAMA_MAX_EXPERTS`."""

MAX_HEADS, MAX_HEAD_SIZE, MAX_WIDTH = 2**12, 2**13, 2**20
"""Far above every Qwen's; products of them fit 64 bits."""

MAX_KERNEL = 64
"""Tokens that the convolution before a recurrent layer looks at."""


def check_attention(metadata: Metadata) -> None:
    """Heads, their sizes, and how many elements of each are turned by their position."""
    n_embd = metadata.integer("embedding_length", least=1, most=MAX_WIDTH)
    if isinstance(metadata.get("feed_forward_length"), int):
        metadata.integer("feed_forward_length", least=1, most=MAX_WIDTH)
    heads = metadata.integers("attention.head_count")
    metadata.relate("attention.head_count", all(0 < n <= MAX_HEADS for n in heads), f"1 to {MAX_HEADS:,}")
    if metadata.get("attention.head_count_kv") is not None:
        heads_kv = metadata.integers("attention.head_count_kv")
        metadata.relate(
            "attention.head_count_kv",
            any(heads_kv) and all(not n or lcm(*heads) % n == 0 for n in heads_kv),
            f"a divisor of the number of heads, {heads[0]}",
        )
    size = n_embd // heads[0]
    key_length = metadata.integer("attention.key_length", size, least=1, most=MAX_HEAD_SIZE)
    metadata.integer("attention.value_length", size, least=1, most=MAX_HEAD_SIZE)
    turned = metadata.integer("rope.dimension_count", key_length, least=2, most=key_length)
    metadata.relate("rope.dimension_count", turned % 2 == 0, "even")
    if metadata.get("rope.dimension_sections") is not None:
        sections = metadata.integers("rope.dimension_sections")
        metadata.relate(
            "rope.dimension_sections",
            any(sections) and len(sections) <= 4 and sum(sections) <= turned // 2,
            f"up to 4 numbers that add up to 1 to {turned // 2}, half of rope.dimension_count",
        )


def check_recurrence(metadata: Metadata) -> None:
    """Sizes of linear attention; none where a model has no such layers."""
    keys = [f"ssm.{key}" for key in ("state_size", "inner_size", "group_count", "time_step_rank")]
    if all(metadata.get(key) is None for key in [*keys, "ssm.conv_kernel"]):
        return
    metadata.integer("ssm.conv_kernel", least=1, most=MAX_KERNEL)
    state = metadata.integer("ssm.state_size", least=1, most=MAX_HEAD_SIZE)
    groups = metadata.integer("ssm.group_count", least=1, most=MAX_HEADS)
    inner = metadata.integer("ssm.inner_size", least=1, most=MAX_WIDTH)
    rank = metadata.integer("ssm.time_step_rank", inner // state, least=1, most=MAX_HEADS)
    metadata.relate("ssm.inner_size", inner == rank * state, f"{rank * state}, time_step_rank x state_size")
    metadata.relate("ssm.group_count", rank % groups == 0, f"a divisor of ssm.time_step_rank, {rank}")


def check_experts(metadata: Metadata, header: Header) -> None:
    """How many there are, and how many of them a token goes to."""
    there = any("_exps." in name for name in header.tensors)
    count = metadata.integer("expert_count", 0, most=MAX_EXPERTS)
    metadata.relate("expert_count", bool(count) == there, "1 or more with tensors of experts, else 0")
    used = metadata.get("expert_used_count")
    if isinstance(used, int) or count:
        metadata.integer("expert_used_count", 0, least=min(1, count), most=count)
    elif used is not None:
        raise ModelLoadError(f"{header.name}: expert_used_count is {used!r:.60} in a model without experts")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if isinstance(metadata.get(key), int):
            metadata.integer(key, least=1, most=MAX_WIDTH)
    if metadata.get("expert_group_count"):
        raise metadata.unusable("expert_group_count", "0 or missing: Qwen's experts have no groups")
