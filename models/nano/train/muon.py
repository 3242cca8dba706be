"""Muon (Jordan et al. 2024): momentum, made orthogonal by a Newton-Schulz iteration, for weight matrices.

Matrices of one shape are stacked and iterated together: a step is a few dozen launches at any depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

# Jordan's quintic, tuned for a fast start rather than convergence to exactly one
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """(count, rows, columns) matrices with singular values moved close to one."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return (y.mT if tall else y).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Every singular value of an update is about `lr`, times the root of rows / columns for tall matrices."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                gradients = torch.stack([p.grad for p in parameters])
                key = parameters[0]
                buffer = self.state[key].setdefault("momentum", torch.zeros_like(gradients))
                buffer.lerp_(gradients, 1 - group["momentum"])
                update = orthogonal(gradients.lerp(buffer, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, change in zip(parameters, update.unbind(), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change * scale)
