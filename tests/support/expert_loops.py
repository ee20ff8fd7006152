"""Mixtures of experts that loop over the experts that tokens choose, as people write them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN, EXPERTS, CHOICES = 6, 8, 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.dropped = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.gelu(self.up(x))), self.dropped, self.training)


class Mixture(nn.Module):
    """Tokens ``[batch sequence dim]`` choose two experts of four."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, choices = self.router(tokens).softmax(-1).topk(CHOICES, -1)
        return self.combine(tokens, weights, choices).view_as(x)

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class OverExperts(Mixture):
    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(choices == number)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, choice, None])
        return out


class Skipping(Mixture):
    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(choices == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(tokens[token]) * weights[token, choice, None])
        return out


class IfAny(Mixture):
    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = choices == number
            if chosen.any():
                token, choice = chosen.nonzero(as_tuple=True)
                out.index_add_(0, token, expert(tokens[token]) * weights[token, choice].unsqueeze(-1))
        return out


class OverHits(Mixture):
    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        mask = F.one_hot(choices, EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            choice, token = torch.where(mask[hit].squeeze(0))
            states = self.experts[hit[0]](tokens[None, token].reshape(-1, DIM)) * weights[token, choice, None]
            out.index_add_(0, token, states.to(out.dtype))
        return out


class Stacked(Mixture):
    """The weights of all experts are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / 3)

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(EXPERTS):
            token, choice = torch.where(choices == number)
            hidden = F.silu(F.linear(tokens[token], self.up[number]))
            out.index_add_(0, token, F.linear(hidden, self.down[number]) * weights[token, choice, None])
        return out


class Masked(Mixture):
    """One choice for a token, and rows by a mask."""

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mask = choices[:, 0] == number
            if mask.any():
                out[mask] = expert(tokens[mask]) * weights[mask, :1]
        return out


class Added(Mixture):
    """As in DeepSeek's first code: ``y[rows] += …``."""

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(EXPERTS):
            token, choice = torch.where(choices == number)
            out[token] += self.experts[number](tokens[token]) * weights[token, choice, None]
        return out


class Sorted(Mixture):
    """Tokens are sorted by their experts, and split by the numbers of tokens, as in JetMoE."""

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        sizes = F.one_hot(choices, EXPERTS).sum((0, 1)).tolist()
        order = choices.flatten().sort(stable=True).indices
        token = order // CHOICES
        pieces = tokens[token].split(sizes, dim=0)
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)], dim=0)
        out = torch.zeros_like(tokens)
        return out.index_add(0, token, done * weights.flatten()[order, None])


class Together(Mixture):
    """All weights are one matrix, of which a loop takes the experts that have tokens, as in DBRX."""

    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS * HIDDEN, DIM) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS * HIDDEN, DIM) / 3)

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        with torch.no_grad():
            mask = F.one_hot(choices, EXPERTS + 1).permute(2, 1, 0)  # one more, which no token has
            hits = torch.greater(mask.sum((-1, -2)), 0).nonzero()
        for hit in hits:
            hit = hit[0]
            choice, token = torch.where(mask[hit])
            up, down = (w.view(EXPERTS, HIDDEN, DIM)[hit] for w in (self.up, self.down))
            states = F.silu(tokens[token].matmul(up.T)).matmul(down)
            out.index_add_(0, token, states.view(-1, DIM) * weights[token, choice, None])
        return out


class Sized(Mixture):
    """As in DeepSeek's first code: sizes, and ``len``."""

    def combine(self, tokens: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(EXPERTS):
            token, choice = torch.where(choices == number)
            if len(token) > 0:
                states = self.experts[number](tokens[token].view(token.shape[0], -1))
                states *= weights[token, choice].reshape(-1, 1)
                out[token] += states
        return out


LOOPS = (OverExperts, Skipping, IfAny, OverHits, Stacked, Together, Masked, Added, Sized, Sorted)


def compare(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Compare with eager: the output, the gradients of the input and of all parameters.

    Eager gives an expert without tokens no gradient, where a captured step has zeros.
    """
    eager, own, theirs = copy.deepcopy(model), x.clone().requires_grad_(), x.clone().requires_grad_()
    for net in (model, eager):
        net.zero_grad()
    found, expected = call(own), eager(theirs)
    found.square().sum().backward()
    expected.square().sum().backward()
    pairs = [(found, expected), (own.grad, theirs.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True)]
    for ours, other in pairs:
        torch.testing.assert_close(ours, torch.zeros_like(ours) if other is None else other, rtol=1e-10, atol=1e-10)


def batch(which: str) -> torch.Tensor:
    """A batch ``[4 3 dim]``: any tokens, tokens that are all alike (so that all choose the same experts), others."""
    generator = torch.Generator().manual_seed({"any": 0, "alike": 1, "others": 2}[which])
    x = torch.randn(4, 3, DIM, dtype=torch.float64, generator=generator)
    return x[:1, :1].expand(4, 3, DIM).clone() if which == "alike" else x
