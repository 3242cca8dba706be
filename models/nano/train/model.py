"""Qwen3.5's text trunk in plain torch, for training: whole sequences, no cache, the checkpoint's names.

Mathematically transformers' `modeling_qwen3_5`; tests of the checkpoint run that one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from models.nano.train.delta import gated_delta_rule
from models.nano.train.fusion import fusible

if TYPE_CHECKING:
    from models.nano.train.shape import Shape


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


normalise_rows = fusible(normalise)


@fusible
def normalise_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (wide * F.silu(gate.float())).to(x.dtype)


@fusible
def short_convolution(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal depthwise convolution and silu; x: (batch, time, channels), kernel: (channels, taps)."""
    time, taps = x.shape[1], kernel.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return F.silu(sum(padded[:, i : i + time] * kernel[:, i].to(x.dtype) for i in range(taps)))


@fusible
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class RMSNorm(nn.Module):
    """Zero-centred: the weight is what is added to one."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        # only hidden rows are worth compiling for: heads come in many strides, and in few layers
        function = normalise_rows if x.ndim == 3 else normalise
        return function(x, self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """RMS norm times silu(gate); this weight is centred on one, unlike RMSNorm's."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return normalise_gated(x, gate, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotation of the first `rotary_dim` dimensions of a head, by the token's position (text has one)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        exponent = torch.arange(0, shape.rotary_dim, 2, dtype=torch.float32) / shape.rotary_dim
        self.register_buffer("frequency", shape.rope_theta**-exponent, persistent=False)

    def forward(self, time: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (time, rotary_dim / 2)."""
        angle = torch.outer(torch.arange(time, device=self.frequency.device).float(), self.frequency)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (batch, heads, time, dim); the pairs are (i, i + rotary_dim / 2)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys and a sigmoid gate on the output."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dim = self.shape.head_dim
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * dim)).chunk(2, -1)
        query = rotate(self.q_norm(query).transpose(1, 2), cos, sin)
        key = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, dim))).transpose(1, 2), cos, sin)
        value = self.v_proj(x).unflatten(-1, (-1, dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


class GatedDeltaNet(nn.Module):
    """Linear attention with a fixed-size state; value heads share key heads in groups of neighbours."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        mixed = 2 * shape.key_dim + shape.value_dim
        self.in_proj_qkv = nn.Linear(shape.hidden, mixed, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, shape.value_dim, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.linear_value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.linear_value_heads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, shape.conv_kernel, groups=mixed, bias=False)
        self.A_log = nn.Parameter(torch.empty(shape.linear_value_heads).uniform_(1, 16).log())
        step = torch.empty(shape.linear_value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives `step` back
        self.norm = GatedRMSNorm(shape.linear_head_dim, shape.norm_eps)
        self.out_proj = nn.Linear(shape.value_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        mixed = short_convolution(self.in_proj_qkv(x), self.conv1d.weight.squeeze(1))
        query, key, value = mixed.split([s.key_dim, s.key_dim, s.value_dim], -1)
        query, key, value = (t.unflatten(-1, (-1, s.linear_head_dim)) for t in (query, key, value))
        group = s.linear_value_heads // s.linear_key_heads
        query, key = query.repeat_interleave(group, 2), key.repeat_interleave(group, 2)
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out = gated_delta_rule(query, key, value, decay, self.in_proj_b(x).float().sigmoid())
        gate = self.in_proj_z(x).unflatten(-1, (-1, s.linear_head_dim))
        return self.out_proj(self.norm(out, gate).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer, of either kind."""

    def __init__(self, shape: Shape, full_attention: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)
        self.full_attention = full_attention
        if full_attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        x = x + (self.self_attn(h, cos, sin) if self.full_attention else self.linear_attn(h))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Token ids (batch, time) to hidden rows after the output norm (batch, time, hidden)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, shape.is_full_attention(i)) for i in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.rotary = Rotary(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.rotary(tokens.shape[1])
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied head: (..., hidden) to (..., vocabulary)."""
        return F.linear(hidden, self.embed_tokens.weight)


def initialise(module: nn.Module, layers: int) -> None:
    """Normal weights of 0.02; what writes to the residual stream is scaled by the depth (GPT-2's rule)."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            writes = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes else 0.02)
