"""A language model with every kind of op that a search can open."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from autopar.costs.machine import Link, Machine

VOCABULARY, PADDING = 24, 3
# computing is dear beside communication, so that all is split
DEAR = Machine(
    "dear", "cpu", 64, Link(1e-9, 1e8), Link(1e-9, 1e8), Link(1e-10, 1e7), (("f32", 1e8), ("bf16", 1e8), ("f64", 1e8))
)


class Lookups(nn.Module):
    """An embedding, causal attention, softmax, gather, and a cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=PADDING)
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.embed(ids))
        heads = x.unsqueeze(1)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)
        x = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        logits = self.head(x)
        picked = logits.softmax(-1).gather(2, labels.clamp(min=0)[..., None]).mean()
        return picked + F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Language(nn.Module):
    """An embedding, a product, and a cross-entropy over all classes."""

    def __init__(self, vocabulary: int = 64, hidden: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(torch.tanh(self.embed_tokens(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids with paddings, and labels of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, vocabulary, (4, 8), generator=draw) for _ in range(2))
    ids[1, 2], labels[0, :3] = PADDING, -100
    return ids, labels
