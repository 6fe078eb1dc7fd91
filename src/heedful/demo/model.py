"""A small GPT whose attention is given from outside, so that nothing but the kernel differs.

Dimension key: B batch, S characters, H heads, D head dim, C model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# attend(layer, q, k, v): causal attention of one layer, rotary embedding included, on q
# (B, S, H, D) and k, v of as many heads or fewer, giving (B, S, H, D).
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ModelSize:
    """heads_k: heads of keys and values, each shared by a group of query heads; 0 is `heads`."""

    layers: int
    heads: int
    head_dim: int
    context: int
    heads_k: int = 0

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and added to its input."""

    def __init__(self, size: ModelSize, layer: int):
        super().__init__()
        self.layer = layer
        self.head_counts = (size.heads, *(size.heads_k or size.heads,) * 2)
        self.head_dim = size.head_dim
        width = size.width
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.head_counts) * size.head_dim, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BSC: torch.Tensor, attend: Attend) -> torch.Tensor:
        qkv = self.qkv(self.norm_attention(x_BSC)).unflatten(-1, (-1, self.head_dim))
        out_BSHD = attend(self.layer, *qkv.split(self.head_counts, 2))
        x_BSC = x_BSC + self.project(out_BSHD.flatten(2))
        hidden = F.gelu(self.widen(self.norm_mlp(x_BSC)), approximate="tanh")
        return x_BSC + self.narrow(hidden)


class GPT(nn.Module):
    """Characters (B, S) in, logits (B, S, V) out; tied embedding. Where a character stands is the
    attention's business (rotary embedding), so that a cache may hold any number of them."""

    def __init__(self, size: ModelSize, vocabulary: int):
        super().__init__()
        self.size = size
        self.characters = nn.Embedding(vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, layer) for layer in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Weights whose products are added to the residual stream start smaller, the more
                # layers add.
                adds = name.endswith(("project.weight", "narrow.weight"))
                shrink = (2 * size.layers) ** -0.5 if adds else 1.0
                nn.init.normal_(weight, std=shrink * size.width**-0.5)

    def forward(self, tokens_BS: torch.Tensor, attend: Attend) -> torch.Tensor:
        x_BSC = self.characters(tokens_BS)
        for block in self.blocks:
            x_BSC = block(x_BSC, attend)
        return F.linear(self.norm(x_BSC), self.characters.weight)

    def losses(
        self, tokens_BS: torch.Tensor, next_BS: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Cross entropy of every character in nats, (B * S,)."""
        logits = self(tokens_BS, attend).float()
        return F.cross_entropy(logits.flatten(0, 1), next_BS.flatten(), reduction="none")
