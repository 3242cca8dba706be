"""A vision tower of random weights for a synthetic model: exact shapes, for speed only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from qwen_serve.bench.models.weights import POOL_STEP, MadeTensor, Noise, Pool, Rows
from qwen_serve.common.files import replacing
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.tensors import PlannedTensor, TensorPlan
from qwen_serve.convert.vision import ARCH, add_hyperparameters, expected_tensors, planned_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from qwen_serve.convert.config import ModelConfig
    from qwen_serve.convert.tensors import FloatType
    from qwen_serve.convert.vision import VisionConfig

NORMS = ("norm1.weight", "norm2.weight", "norm.weight")


def plan_tower(tower: VisionConfig, seed: int, outtype: FloatType) -> TensorPlan:
    """All tensors; matrices are noise, scaled to keep activations near one."""
    pool = Pool(np.random.default_rng([seed, 1]))
    planned: list[PlannedTensor] = []
    for number, (source, (target, shape)) in enumerate(expected_tensors(tower)):
        fan_in = int(np.prod(shape[1:], dtype=int))
        values = pool.scaled(float(fan_in**-0.5), "F32")
        noise = Noise(values, number * POOL_STEP, shape[-1] if len(shape) > 1 else 1)
        made = MadeTensor(source, shape, "F32", _rows(source, shape, noise))
        planned += planned_tensors(target, made, outtype)
    return TensorPlan(tuple(planned), n_blocks=tower.depth, n_mtp_layers=0)


def write_tower(
    path: Path, tower: VisionConfig, config: ModelConfig, *, seed: int, threads: int, outtype: FloatType
) -> None:
    """Writes the mmproj for a model with `config`, first under a temporary name."""
    plan = plan_tower(tower, seed, outtype)
    writer = gguf.GGUFWriter(path=None, arch=ARCH)
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_name(f"Synthetic Qwen3.5 vision tower, {plan.n_elements / 1e9:.3g}B weights, seed {seed}")
    add_hyperparameters(writer, tower, config.rms_norm_eps, outtype)
    with replacing(path) as part:
        write_file(part, writer, plan, config, threads)


def _rows(source: str, shape: tuple[int, ...], noise: Noise) -> Rows:
    if len(shape) > 1:
        return noise.rows
    value = 1.0 if source.endswith(NORMS) else 0.0
    return lambda first, last: np.full(last - first, value, np.float32)
