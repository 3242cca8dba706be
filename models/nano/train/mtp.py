"""The multi-token-prediction head: one full-attention layer that drafts the token after next.

At position t it sees the trunk's hidden row h(t), after the output norm, and the embedding of token t+1; it
predicts token t+2. Its logits come from the trunk's tied head. This is the reference for the checkpoint's
`mtp.*` tensors, which transformers ignores; the graph is llama.cpp's, src/models/qwen35.cpp (graph_mtp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.nano.train.model import Layer, RMSNorm, Rotary

if TYPE_CHECKING:
    from models.nano.train.shape import Shape


class MTP(nn.Module):
    """The draft head, named as in the checkpoint under `mtp.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden, shape.norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden, shape.norm_eps)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, full_attention=True)])
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.rotary = Rotary(shape)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Rows for the head, (batch, time, hidden).

        hidden: (batch, time, hidden), h(t); embedding: (batch, time, hidden), that of token t+1.
        The result feeds the trunk's head, and, as the next draft step's `hidden`, this module again.
        """
        joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        x = self.fc(joined)
        cos, sin = self.rotary(x.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)
