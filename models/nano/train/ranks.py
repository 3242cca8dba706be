"""Data-parallel training: one process a card under torchrun, or one process alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


class Ranks:
    """This process among its equals. Every rank draws its own documents and takes the same steps."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        self.device = (
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        )
        if cuda:
            torch.cuda.set_device(self.device)
        if self.count > 1:
            # the clock travels through gloo: asking the card for it would drain its queue
            dist.init_process_group("cuda:nccl,cpu:gloo" if cuda else "gloo")

    @property
    def leads(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def agree(self, seconds: float) -> float:
        """The leader's clock."""
        if self.count == 1:
            return seconds
        clock = torch.tensor([seconds], dtype=torch.float64)
        dist.broadcast(clock, 0)
        return float(clock)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the ranks, in one reduction."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.count
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def leave(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()
