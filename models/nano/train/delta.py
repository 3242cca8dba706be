"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), one token's state update being

    S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q

computed in chunks: within a chunk the updates are solved at once as a triangular system (the WY form), across
chunks only the state is carried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.nano.train.fusion import fusible

CHUNK, SHORT = 64, 32
"""Tokens of a chunk; SHORT ones where a sequence has at most SHORTEST of them, so that less is padded."""
SHORTEST = 160


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs (batch, time, heads, dim) from an empty state, computed in at least float32.

    q, k, v: (batch, time, heads, dim), q and k not yet normalised; g (log decay), beta: (batch, time, heads).
    """
    with torch.autocast(q.device.type, enabled=False):
        time = q.shape[1]
        chunk = SHORT if time <= SHORTEST else CHUNK
        pad = -time % chunk
        if pad:
            q, k, v, g, beta = (
                torch.cat([x, x.new_zeros(x.shape[0], pad, *x.shape[2:])], 1) for x in (q, k, v, g, beta)
            )
        system, right, inner, reads, writes, decay = prepare(q, k, v, g, beta, chunk)
        out = scan(UnitInverse.apply(system) @ right, inner, reads, writes, decay)
        return out.flatten(2, 3)[:, :, :time].transpose(1, 2).to(v.dtype)


@fusible
def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that is known of each chunk without the state, (batch, heads, chunks, chunk, ...).

    The system (strictly lower part) and its right sides, the weights of a chunk's updates in its outputs,
    what reads from and writes to the state, and how much of the state a chunk keeps.
    """
    dim = q.shape[3]
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide).transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q, k, v, g, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    decay = g.cumsum(-1)
    row = torch.arange(chunk, device=q.device)
    upto = row[:, None] >= row[None, :]
    # masked before the exponential: what lies above the diagonal would overflow
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~upto, float("-inf")).exp()
    grown = decay.exp()[..., None]
    before = row[:, None] > row[None, :]
    system = ((k * beta[..., None]) @ k.mT * between).masked_fill(~before, 0.0)
    right = torch.cat([v, k * grown], -1) * beta[..., None]
    inner = q @ k.mT * between
    writes = k * (decay[..., -1:] - decay).exp()[..., None]
    return system, right, inner, q * grown, writes, grown[..., -1:, :]


class UnitInverse(torch.autograd.Function):
    """(1 + A)^-1 for strictly lower triangular A, (..., chunk, chunk), by blocks of doubling size."""

    @staticmethod
    def forward(ctx: Any, system: Tensor) -> Tensor:
        blocks = torch.ones_like(system.diagonal(dim1=-2, dim2=-1))[..., None, None]
        size = 1
        while size < system.shape[-1]:
            # the lower left quarter of each diagonal block of twice the size
            pairs = system.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size))
            corner = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
            upper, lower = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
            joined = torch.zeros(
                *upper.shape[:-2], 2 * size, 2 * size, dtype=system.dtype, device=system.device
            )
            joined[..., :size, :size] = upper
            joined[..., size:, size:] = lower
            joined[..., size:, :size] = -(lower @ corner @ upper)
            blocks, size = joined, 2 * size
        inverse = blocks.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT)


def scan(solved: Tensor, inner: Tensor, reads: Tensor, writes: Tensor, decay: Tensor) -> Tensor:
    """Carry the state over the chunks: (batch, heads, chunks, chunk, ...) to outputs of that shape.

    `solved` holds each chunk's updates from an empty state, and what they lose for the state that there is.
    """
    dim = reads.shape[-1]
    fresh, carried = solved.split(dim, -1)
    state = reads.new_zeros(*reads.shape[:2], dim, dim)
    outputs = []
    for chunk in zip(*(x.unbind(2) for x in (fresh, carried, inner, reads, writes, decay)), strict=True):
        new, lost, weights, read, write, kept = chunk
        update = new - lost @ state
        outputs.append(read @ state + weights @ update)
        state = state * kept + write.mT @ update
    return torch.stack(outputs, 2)
