"""Random small models whose layers have names that presets know."""

from __future__ import annotations

import random

import torch
from torch import nn


class Pair(nn.Module):
    """A residual pair of matrix products."""

    def __init__(self, dim: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up_proj, self.down_proj = nn.Linear(dim, inner, bias=bias), nn.Linear(inner, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


class Fused(nn.Module):
    """Attention with one weight for query, key and value."""

    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1))
        y = torch.softmax(q @ k.mT, -1) @ v
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


class Parallel(nn.Module):
    """Two pairs that read one value, as in GPT-J."""

    def __init__(self, dim: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.one, self.other = Pair(dim, inner, bias), Pair(dim, inner, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.one(x) + self.other(x)


class Named(nn.Module):
    """A table, some of these, and a head."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        dim, heads = draw.choice([(4, 2), (6, 3), (8, 2)])
        words = draw.choice([5, 8])
        self.embed_tokens = nn.Embedding(words, dim)
        kinds = [Pair, Parallel, Fused]
        self.layers = nn.Sequential(*[
            kind(dim, heads if kind is Fused else draw.choice([3, 8, 16]), draw.random() < 0.5)
            for kind in draw.choices(kinds, k=draw.randint(1, 2))
        ])  # fmt: skip
        self.lm_head = nn.Linear(dim, words, bias=False)
        self.returns_loss = draw.random() < 0.5

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.layers(self.embed_tokens(ids)))
        return logits.square().mean() if self.returns_loss else logits


class OnePair(nn.Module):
    """Two matrix products."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        dim, inner = draw.choice([4, 6]), draw.choice([3, 8, 16])
        self.up_proj, self.down_proj = nn.Linear(dim, inner, bias=False), nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x)))


def random_named(draw: random.Random, small: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch, without values: of ids, unless ``small``."""
    with torch.device("meta"):
        if small:
            model = OnePair(draw)
            return model, torch.empty(draw.choice([2, 3, 4]), draw.choice([2, 5]), model.up_proj.in_features)
        return Named(draw), torch.empty(draw.choice([2, 3, 4]), draw.choice([2, 5]), dtype=torch.long)
