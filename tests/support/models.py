"""Small models that the tests put on meshes."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A column-row pair."""

    def __init__(self, dim: int = 8, hidden: int = 12, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.act = nn.GELU()
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Residual(nn.Module):
    """Layer norm, a column-row pair and a residual, several times."""

    def __init__(self, dim: int = 8, hidden: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


class Language(nn.Module):
    """Embedding in, cross-entropy out; returns a dict."""

    def __init__(self, vocabulary: int = 11, dim: int = 8, hidden: int = 12, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.body = Residual(dim, hidden, layers)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


COLUMN_ROW = {"*.up.weight": ("tp", None), "*.up.bias": ("tp",), "*.down.weight": (None, "tp")}
