"""Converts a checkpoint's vision tower, `model.visual.*`, to the GGUF that llama.cpp calls an mmproj.

Names and keys are those of llama.cpp's converter with --mmproj (conversion/qwen3vl.py, Qwen3VLVisionModel)
and of its reader (tools/mtmd/clip.cpp, models/qwen3vl.cpp). Dense models and those with experts have the same
towers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any, Literal

import gguf

from qwen_serve.convert.checkpoint import PREPROCESSOR_FILES, Checkpoint, read_json
from qwen_serve.convert.config import checked_integer, is_positive
from qwen_serve.convert.errors import CheckpointError
from qwen_serve.convert.floats import Q8_0_BLOCK
from qwen_serve.convert.gguf_file import write_file
from qwen_serve.convert.metadata import FILE_TYPES, add_general
from qwen_serve.convert.safetensors import Joined, Piece, TensorSource
from qwen_serve.convert.source import Source
from qwen_serve.convert.tensors import VISION_PREFIX, PlannedTensor, Shape, TensorPlan, check_weight_type

VisionType = Literal["F16", "BF16", "F32", "Q8_0"]
VISION_TYPES: tuple[VisionType, ...] = ("F16", "BF16", "F32", "Q8_0")

ARCH = "clip"
"""`general.architecture` of every mmproj."""
PATCHES = "patch_embed.proj.weight"
MERGE = 2
"""Patches along each side of a token's square; llama.cpp supports no other number."""
FRAMES = 2
"""Frames that a patch spans; a still picture is repeated."""
CHANNELS = 3

WAY_OUT = "`qwen-convert --no-vision` converts the text model alone"

FIXED: dict[str, Any] = {
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": CHANNELS,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
"""Keys whose value llama.cpp does not read: it always computes this."""


@dataclass(frozen=True)
class VisionConfig:
    """A tower's shapes. Counts are in heads, layers, elements or pixels, as the names say."""

    hidden_size: int
    intermediate_size: int
    depth: int
    n_heads: int
    patch_size: int
    positions: int
    """Number of learned positions, a square grid of patches."""
    out_hidden_size: int
    """The text model's width, which is also that of the tower's rows."""
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @property
    def image_size(self) -> int:
        """The side, in pixels, of a picture with one learned position for each patch."""
        return isqrt(self.positions) * self.patch_size

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], preprocessor: Mapping[str, Any], text_hidden_size: int
    ) -> VisionConfig:
        """Reads the `vision_config` of a `config.json`, and the checkpoint's preprocessor configuration.

        Raises: CheckpointError: a field is missing or wrong, or has a value that llama.cpp would ignore.
        """

        def whole(name: str) -> int:
            return checked_integer(f"vision_config.{name}", config.get(name))

        for name, computed in FIXED.items():
            if (value := config.get(name, computed)) != computed:
                raise CheckpointError(
                    f"config.json: vision_config.{name} is {value!r}; llama.cpp computes the tower with "
                    f"{computed!r} ({WAY_OUT})"
                )
        if config.get("deepstack_visual_indexes"):
            raise CheckpointError(
                "config.json: vision_config.deepstack_visual_indexes names layers; Qwen3.5 takes the rows of "
                f"the tower's last layer alone ({WAY_OUT})"
            )
        hidden, heads, positions = whole("hidden_size"), whole("num_heads"), whole("num_position_embeddings")
        # a head's elements rotate by row and by column, in pairs
        if hidden % (4 * heads):
            raise CheckpointError(
                f"config.json: vision_config.hidden_size ({hidden}) must be a multiple of 4 times num_heads "
                f"({heads})"
            )
        if isqrt(positions) ** 2 != positions:
            raise CheckpointError(
                f"config.json: vision_config.num_position_embeddings ({positions}) must be a square"
            )
        if (out := whole("out_hidden_size")) != text_hidden_size:
            raise CheckpointError(
                f"config.json: vision_config.out_hidden_size is {out}, the text model's hidden_size "
                f"{text_hidden_size}"
            )
        return cls(
            hidden_size=hidden,
            intermediate_size=whole("intermediate_size"),
            depth=whole("depth"),
            n_heads=heads,
            patch_size=whole("patch_size"),
            positions=positions,
            out_hidden_size=out,
            image_mean=_channels(preprocessor, "image_mean"),
            image_std=_channels(preprocessor, "image_std", positive=True),
        )


def _channels(preprocessor: Mapping[str, Any], name: str, *, positive: bool = False) -> tuple[float, ...]:
    values = preprocessor.get(name)
    if (
        not isinstance(values, list)
        or len(values) != CHANNELS
        or not all(is_positive(value) or (value == 0 and not positive) for value in values)
    ):
        kind = "positive numbers" if positive else "numbers, none negative"
        raise CheckpointError(
            f"{PREPROCESSOR_FILES[0]}: {name} must be {CHANNELS} {kind}, for red, green, blue; got {values!r}"
        )
    return tuple(float(value) for value in values)


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """The preprocessing in the checkpoint's files; None if there is none.

    Raises: CheckpointError: a file is not a JSON object.
    """
    found: dict[str, Any] = {}
    for path in (folder / name for name in PREPROCESSOR_FILES):
        if path.is_file():
            values = read_json(path)
            nested = values.get("image_processor")
            found |= values | (nested if isinstance(nested, dict) else {})
    return found or None


@dataclass(frozen=True)
class VisionTower:
    """The tower of an opened checkpoint; no weight is read."""

    checkpoint: Checkpoint
    config: VisionConfig
    rms_norm_eps: float
    """The text model's epsilon, which llama.cpp's converter writes for the tower's norms. In Qwen3.5 both are
    equal."""

    @classmethod
    def open(cls, checkpoint: Checkpoint, preprocessor: Mapping[str, Any]) -> VisionTower:
        """The tower of a checkpoint that has one; `preprocessor` is from `read_preprocessor`.

        Raises: CheckpointError: as `VisionConfig.from_json`.
        """
        config = read_json(checkpoint.folder / "config.json").get("vision_config")
        if not isinstance(config, dict):
            raise CheckpointError(
                f"{checkpoint.folder}: there are tensors {VISION_PREFIX}*, and config.json has no "
                f"vision_config object ({WAY_OUT})"
            )
        text = checkpoint.config
        return cls(
            checkpoint, VisionConfig.from_json(config, preprocessor, text.hidden_size), text.rms_norm_eps
        )

    def plan(self, outtype: VisionType) -> TensorPlan:
        """Every tensor of the GGUF, in the order of the checkpoint.

        Raises: CheckpointError: a tensor is missing, unknown, or not of the shape that config.json implies.
        """
        expected = dict(expected_tensors(self.config))
        planned: list[PlannedTensor] = []
        for name, stored in self.checkpoint.tensors.items():
            if not name.startswith(VISION_PREFIX):
                continue
            if (rule := expected.pop(name.removeprefix(VISION_PREFIX), None)) is None:
                raise CheckpointError(
                    f"{self.checkpoint.folder}: no rule for tensor {name}; not Qwen3.5's tower? ({WAY_OUT})"
                )
            target, shape = rule
            if stored.shape != shape:
                raise CheckpointError(
                    f"{stored.path}: tensor {name} has shape {list(stored.shape)}, config.json implies "
                    f"{list(shape)}"
                )
            check_weight_type(stored)
            planned += planned_tensors(target, stored, outtype)
        if expected:
            raise CheckpointError(
                f"{self.checkpoint.folder}: tensor {VISION_PREFIX}{next(iter(expected))} is missing"
            )
        return TensorPlan(tuple(planned), n_blocks=self.config.depth, n_mtp_layers=0)


def expected_tensors(c: VisionConfig) -> Iterator[tuple[str, tuple[str, Shape]]]:
    """Checkpoint name after `model.visual.`, then GGUF name and the checkpoint's shape."""
    wide, merged = c.hidden_size, c.hidden_size * MERGE**2
    yield PATCHES, ("v.patch_embd.weight", (wide, CHANNELS, FRAMES, c.patch_size, c.patch_size))
    yield "patch_embed.proj.bias", ("v.patch_embd.bias", (wide,))
    yield "pos_embed.weight", ("v.position_embd.weight", (c.positions, wide))
    layers: list[tuple[str, str, Shape]] = [
        (f"blocks.{i}.{source}", f"v.blk.{i}.{target}", shape)
        for i in range(c.depth)
        for source, target, shape in (
            ("norm1", "ln1", (wide,)),
            ("attn.qkv", "attn_qkv", (3 * wide, wide)),
            ("attn.proj", "attn_out", (wide, wide)),
            ("norm2", "ln2", (wide,)),
            ("mlp.linear_fc1", "ffn_up", (c.intermediate_size, wide)),
            ("mlp.linear_fc2", "ffn_down", (wide, c.intermediate_size)),
        )
    ]
    layers += [
        ("merger.norm", "v.post_ln", (wide,)),
        ("merger.linear_fc1", "mm.0", (merged, merged)),
        ("merger.linear_fc2", "mm.2", (c.out_hidden_size, merged)),
    ]
    for source, target, shape in layers:
        yield f"{source}.weight", (f"{target}.weight", shape)
        yield f"{source}.bias", (f"{target}.bias", shape[:1])


def planned_tensors(target: str, stored: TensorSource, outtype: VisionType) -> Iterator[PlannedTensor]:
    """The GGUF tensors made from a tensor of `expected_tensors`."""
    for name, part in _parts(target, stored):
        yield PlannedTensor(name, part, part.shape, _type(name, part.shape, outtype), None, None)


def _parts(target: str, stored: TensorSource) -> Iterator[tuple[str, TensorSource]]:
    """GGUF names and their sources: a convolution over two frames becomes one for each frame."""
    if len(stored.shape) != 5:
        yield target, stored
        return
    wide, channels, frames, height, width = stored.shape
    pixels = height * width
    for frame in range(frames):
        starts = range(frame * pixels, wide * channels * frames * pixels, frames * pixels)
        pieces = [Piece(stored, start, pixels) for start in starts]
        name = target if frame == 0 else f"{target}.{frame}"
        yield name, Joined(f"{stored.name}, frame {frame}", (wide, channels, height, width), pieces)


def _type(name: str, shape: Shape, outtype: VisionType) -> VisionType:
    """The tensor's type, as llama.cpp's converter chooses it (conversion/base.py, prepare_tensors)."""
    if len(shape) == 1 or name.startswith("v.position_embd"):
        return "F32"
    if name.startswith("v.patch_embd"):
        return "F16" if outtype == "F16" else "F32"
    return "F16" if outtype == "Q8_0" and shape[-1] % Q8_0_BLOCK else outtype


def write_mmproj(path: Path, tower: VisionTower, source: Source, outtype: VisionType) -> None:
    """Writes the tower's GGUF.

    Raises: CheckpointError: as `VisionTower.plan`, or a weight is not finite or does not fit its type.
    """
    plan = tower.plan(outtype)
    writer = gguf.GGUFWriter(path=None, arch=ARCH)
    add_general(writer, tower.checkpoint.folder, source, plan, gguf.GGUFType.MMPROJ)
    add_hyperparameters(writer, tower.config, tower.rms_norm_eps, outtype)
    write_file(path, writer, plan, tower.checkpoint.config)


def add_hyperparameters(
    writer: gguf.GGUFWriter, config: VisionConfig, norm_eps: float, outtype: VisionType
) -> None:
    """Adds `clip.*`, and the file's type."""
    writer.add_file_type(FILE_TYPES[outtype])
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.out_hidden_size)
    writer.add_vision_image_size(config.image_size)
    writer.add_vision_patch_size(config.patch_size)
    writer.add_vision_embedding_length(config.hidden_size)
    writer.add_vision_feed_forward_length(config.intermediate_size)
    writer.add_vision_block_count(config.depth)
    writer.add_vision_head_count(config.n_heads)
    writer.add_vision_image_mean(config.image_mean)
    writer.add_vision_image_std(config.image_std)
    writer.add_clip_projector_type(gguf.VisionProjectorType.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(MERGE)
    writer.add_vision_attention_layernorm_eps(norm_eps)
    writer.add_vision_is_deepstack_layers([False] * config.depth)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
