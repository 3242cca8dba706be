"""Chooses the trunk layers that stay when a recipe drops some: whole groups only.

A group is `full_attention_interval` consecutive layers: linear ones, then one full-attention layer. Dropping
whole groups keeps that pattern, on which llama.cpp's defaults and the published results on depth pruning
rest.
"""

from collections.abc import Collection

from qwen_serve.convert.config import ModelConfig
from qwen_serve.convert.errors import ConvertError


def kept_layers(config: ModelConfig, dropped: Collection[int]) -> tuple[int, ...]:
    """The remaining trunk layers, in order.

    Raises:
        ConvertError: a layer that does not exist, part of a group, or no layer left.
    """
    size, n_layers = config.attention_interval, config.n_layers
    if unknown := sorted(set(dropped) - set(range(n_layers))):
        raise ConvertError(
            f"layers to drop: {unknown} are not among this model's {n_layers} (0 to {n_layers - 1})"
        )
    groups = [range(start, min(start + size, n_layers)) for start in range(0, n_layers, size)]
    for group in groups:
        inside = [layer for layer in group if layer in dropped]
        if inside and len(inside) < len(group):
            raise ConvertError(
                f"layers to drop: {inside} is part of a group; layers go in whole groups of {size}, "
                f"here {group[0]} to {group[-1]}"
            )
    kept = tuple(layer for layer in range(n_layers) if layer not in dropped)
    if not kept:
        raise ConvertError(
            f"layers to drop: all {n_layers} are named; at least one group of {size} must stay"
        )
    return kept


def label(dropped: Collection[int]) -> str:
    """A short name for file names: drop4-7, drop4-7_12-15; empty when nothing is dropped."""
    if not dropped:
        return ""
    runs: list[list[int]] = []
    for layer in sorted(dropped):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return "drop" + "_".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
