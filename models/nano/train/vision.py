"""Qwen3.5's vision tower in plain torch, for training: pictures of one size at once, the checkpoint's names.

Mathematically transformers' `Qwen3_5VisionModel`; a test compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from models.nano.train.model import rotate

if TYPE_CHECKING:
    from models.nano.train.shape import VisionShape

THETA = 10_000.0
EPS = 1e-6


class Patches(nn.Module):
    """Pixels to a row for each patch; a still picture is two frames that are alike."""

    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        size = (v.temporal_patch, v.patch, v.patch)
        self.proj = nn.Conv3d(3, v.hidden, size, stride=size)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, rows, columns, hidden)."""
        patch = self.proj.kernel_size[1]
        squares = pixels.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5)
        return F.linear(squares.flatten(3), self.proj.weight.sum(2).flatten(1), self.proj.bias)


class Attention(nn.Module):
    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.heads = v.heads
        self.qkv = nn.Linear(v.hidden, 3 * v.hidden)
        self.proj = nn.Linear(v.hidden, v.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value)
        return self.proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(v.hidden, v.ffn)
        self.linear_fc2 = nn.Linear(v.ffn, v.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, v: VisionShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(v.hidden, EPS)
        self.norm2 = nn.LayerNorm(v.hidden, EPS)
        self.attn = Attention(v)
        self.mlp = MLP(v)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Four patches to a row as wide as the text model's."""

    def __init__(self, v: VisionShape, out: int) -> None:
        super().__init__()
        self.wide = v.hidden * v.merge**2
        self.norm = nn.LayerNorm(v.hidden, EPS)
        self.linear_fc1 = nn.Linear(self.wide, self.wide)
        self.linear_fc2 = nn.Linear(self.wide, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).unflatten(1, (-1, 4)).flatten(2))))


class Tower(nn.Module):
    """Pictures (batch, 3, height, width), from -1 to 1, to rows (batch, tokens, out)."""

    def __init__(self, v: VisionShape, out: int) -> None:
        super().__init__()
        self.shape = v
        self.patch_embed = Patches(v)
        self.pos_embed = nn.Embedding(v.positions, v.hidden)
        self.blocks = nn.ModuleList(Block(v) for _ in range(v.depth))
        self.merger = Merger(v, out)

    def forward(self, pixels: Tensor, turned: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`turned`: what `turns` gives for a picture of that size, if it is known already."""
        x = self.patch_embed(pixels)
        rows, columns = x.shape[1:3]
        side = round(self.shape.positions**0.5)
        learned = self.pos_embed.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        learned = F.interpolate(learned, (rows, columns), mode="bilinear", align_corners=True)
        x = self.by_token(x + learned.permute(0, 2, 3, 1))
        cos, sin = turned or self.turns(rows, columns, x.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.merger(x)

    def by_token(self, x: Tensor) -> Tensor:
        """(batch, rows, columns, dim) to (batch, rows * columns, dim), a token's patches side by side."""
        merge = self.shape.merge
        return x.unflatten(2, (-1, merge)).unflatten(1, (-1, merge)).transpose(2, 3).flatten(1, 4)

    def turns(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each patch, (patches, head dim / 2): by its row, then by its column."""
        half = self.shape.hidden // self.shape.heads // 2
        frequency = THETA ** -(torch.arange(0, half, 2, dtype=torch.float32, device=device) / half)
        row, column = torch.meshgrid(
            torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
        )
        places = self.by_token(torch.stack([row, column], -1)[None])[0]
        angle = (places[..., None] * frequency).flatten(1)
        return angle.cos(), angle.sin()


def initialise_tower(tower: Tower, out_std: float) -> None:
    """Normal weights; the rows begin about as large as the text model's own."""
    for name, parameter in tower.named_parameters():
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel()
            nn.init.normal_(parameter, std=0.02 if "embed.weight" in name else fan_in**-0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    with torch.no_grad():
        tower.merger.linear_fc2.weight.mul_(2 * out_std)
