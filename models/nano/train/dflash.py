"""A block drafter for nano (DFlash, Chen et al. 2026): a whole block of tokens in one pass.

Its layers attend to what several of the trunk's layers made of the tokens before the block, fused into one
row a token, and to the block itself in both directions: the newest token, then masks. Embeddings and head are
the trunk's. Names are those of the published checkpoints (`DFlashDraftModel`), the arithmetic is that of
llama.cpp's src/models/dflash.cpp.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.nano.train.checkpoint import write_json
from models.nano.train.model import MLP, Rotary, rotate
from models.nano.train.shape import Shape

if TYPE_CHECKING:
    from pathlib import Path

    from models.nano.train.model import Trunk

FILE = "model.safetensors"


@dataclass(frozen=True)
class DraftShape:
    """Sizes of the drafter; its hidden rows are as wide as the trunk's, which lends embedding and head."""

    target: Shape = field(default_factory=Shape)
    layers: int = 3
    ffn: int = 256
    block: int = 16
    target_layers: tuple[int, ...] = (1, 3, 6)
    """Layers of the trunk whose outputs it reads."""
    mask: int = 3_610
    """Token that stands for one to be guessed: the special token that the published drafters take."""

    @property
    def layer(self) -> Shape:
        """The target's shape but for what is the drafter's own; heads are rotated whole."""
        return replace(self.target, ffn=self.ffn, partial_rotary=1.0)


def features(trunk: Trunk, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """What the trunk makes of tokens (batch, time): the outputs of some of its layers side by side,
    (batch, time, len(layers) * hidden), and its hidden rows after the output norm."""
    cos, sin = trunk.rotary(tokens.shape[1])
    x, kept = trunk.embed_tokens(tokens), []
    for index, layer in enumerate(trunk.layers):
        x = layer(x, cos, sin)
        if index in layers:
            kept.append(x)
    return torch.cat(kept, -1), trunk.norm(x)


class BlockAttention(nn.Module):
    """Grouped-query attention of a block's rows to the rows before the block, and to each other."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """x: (batch, rows, hidden), the blocks; context: (batch, time, hidden).

        `turns` are the cosines and sines of context and blocks, (batch, 1, time + rows, dim / 2); `seen`,
        (batch, 1, rows, time + rows), says who looks at whom.
        """
        time = context.shape[1]
        keys = torch.cat([context, x], 1)
        cos, sin = turns
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))).transpose(1, 2)
        key = self.k_norm(self.k_proj(keys).unflatten(-1, (-1, self.dim))).transpose(1, 2)
        value = self.v_proj(keys).unflatten(-1, (-1, self.dim)).transpose(1, 2)
        query = rotate(query, cos[:, :, time:], sin[:, :, time:])
        key = rotate(key, cos, sin)
        out = F.scaled_dot_product_attention(
            query, key.to(query.dtype), value, attn_mask=seen, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class BlockLayer(nn.Module):
    """One layer of the drafter."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = BlockAttention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps)

    def forward(self, x: Tensor, context: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, turns, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """The drafter, named as in its checkpoint."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape, hidden = shape, shape.target.hidden
        self.fc = nn.Linear(len(shape.target_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, shape.target.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape.layer) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(hidden, shape.target.norm_eps)
        self.rotary = Rotary(shape.layer)

    def forward(self, given: Tensor, newest: Tensor, at: Tensor, trunk: Trunk, block: int) -> Tensor:
        """Rows for the trunk's head, (batch, blocks, block, hidden); row i is to name the token at + i.

        given: (batch, time, layers * hidden), see `features`; newest: (batch, blocks), each block's first
        token, and `at` its position: a block sees the rows before that.
        """
        (batch, blocks), time = newest.shape, given.shape[1]
        context = self.hidden_norm(self.fc(given))
        tokens = torch.full((batch, blocks, block), self.shape.mask, device=newest.device)
        tokens[:, :, 0] = newest
        x = trunk.embed_tokens(tokens).flatten(1, 2)
        steps = torch.arange(block, device=at.device)
        positions = torch.cat(
            [torch.arange(time, device=at.device).expand(batch, -1), (at[..., None] + steps).flatten(1)], 1
        )
        cos, sin = (table[positions][:, None] for table in self.rotary(time + block))
        owner = torch.arange(blocks, device=at.device).repeat_interleave(block)
        before = torch.arange(time, device=at.device) < at.repeat_interleave(block, 1)[..., None]
        seen = torch.cat([before, (owner[:, None] == owner).expand(batch, -1, -1)], -1)[:, None]
        for layer in self.layers:
            x = layer(x, context, (cos, sin), seen)
        return self.norm(x).unflatten(1, (blocks, block))


def config(shape: DraftShape) -> dict[str, Any]:
    """config.json in the published layout."""
    target = shape.target
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": shape.block,
        "dflash_config": {"mask_token_id": shape.mask, "target_layer_ids": list(shape.target_layers)},
        "dtype": "bfloat16",
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden,
        "intermediate_size": shape.ffn,
        "layer_types": ["full_attention"] * shape.layers,
        "max_position_embeddings": target.context,
        "model_type": "qwen3",
        "num_attention_heads": target.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": target.kv_heads,
        "num_target_layers": target.layers,
        "rms_norm_eps": target.norm_eps,
        "rope_scaling": None,
        "rope_theta": int(target.rope_theta),
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }


def save(folder: Path, drafter: DFlash) -> None:
    """The drafter's checkpoint: one shard in bf16, and its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / (FILE + ".part")
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in drafter.state_dict().items()
    }
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(folder / FILE)
    write_json(folder / "config.json", config(drafter.shape))


def load(folder: Path) -> DFlash:
    """The drafter of a checkpoint that `save` wrote, in float32 on the CPU.

    Raises RuntimeError, as torch does, when a tensor is missing or has another shape.
    """
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = DraftShape(
        layers=given["num_hidden_layers"],
        ffn=given["intermediate_size"],
        block=given["block_size"],
        target_layers=tuple(given["dflash_config"]["target_layer_ids"]),
        mask=given["dflash_config"]["mask_token_id"],
    )
    drafter = DFlash(shape)
    drafter.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / FILE).items()})
    return drafter
