"""Small modules whose dtypes under ``torch.autocast`` are those of their captured programs under a policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Function(nn.Module):
    """A function of inputs and parameters of given shapes."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(shape) / 3 for shape in shapes)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.weights)


class Attention(nn.Module):
    def __init__(self, dim: int = 8, heads: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2))


class ByHand(Attention):
    """Attention as products and a softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Transformer(nn.Module):
    """Embedding, norm, attention, gelu, residuals, cross-entropy."""

    def __init__(self, dim: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.first(x))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Gated(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, padding=1),
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.head(F.max_pool2d(x + self.second(x), 2).mean((2, 3)))


def residuals(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """A stream in float32, to which products in low precision are added: gradients of it add up in float32."""
    for w in weights:
        x = x + x @ w
    return x


def two_ways(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Gradients of ``p`` add up in low precision; one of them is a sum itself, in float32: that of the stream that it
    is added to."""
    p = x @ a
    stream = p.sub(x)
    return stream + stream @ b + p.sin() @ b


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def i(*shape: int, below: int = 5) -> torch.Tensor:
    return torch.randint(below, shape)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "linear": lambda: (nn.Linear(8, 4), (f(6, 8),)),
    "linear of three dims": lambda: (nn.Linear(8, 4, bias=False), (f(2, 3, 8),)),
    "products": lambda: (Function(lambda x, a, b: (x @ a).tanh() @ b, (8, 6), (6, 4)), (f(5, 8),)),
    "batched products": lambda: (Function(lambda x, a: torch.bmm(x, a) * 2 + x, (3, 5, 5)), (f(3, 5, 5),)),
    "residual": lambda: (Function(lambda x, a, b: x + (x @ a).relu() @ b, (8, 6), (6, 8)), (f(5, 8),)),
    "product, then a wide "
    "residual": lambda: (Function(lambda x, a, b: x * 2 + (x @ a) * (x @ b), (8, 8), (8, 8)), (f(5, 8),)),
    "residuals": lambda: (Function(residuals, (8, 8), (8, 8), (8, 8)), (f(5, 8),)),
    "a product that goes two ways": lambda: (Function(two_ways, (8, 8), (8, 8)), (f(5, 8),)),
    "one value, three "
    "products": lambda: (Function(lambda x, a, b, c: torch.exp(x) @ a + torch.exp(x).mul(2) @ b + (x @ c), (8, 8),
                                  (8, 8), (8, 8)), (f(5, 8),)),
    "vectors": lambda: (Function(lambda x, a: (a @ x) * (x @ x), (8, 8)), (f(8).requires_grad_(),)),
    "convolution": lambda: (nn.Conv2d(3, 4, 3), (f(2, 3, 6, 6),)),
    "layer norm": lambda: (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)), (f(5, 8),)),
    "softmax": lambda: (Function(lambda x, a: (x @ a).softmax(-1) @ a, (8, 8)), (f(5, 8),)),
    "attention": lambda: (Attention(), (f(2, 4, 8),)),
    "attention by hand": lambda: (ByHand(), (f(2, 4, 8),)),
    "cross-entropy": lambda: (Function(lambda x, y, a: F.cross_entropy(x @ a, y), (8, 5)), (f(6, 8), i(6))),
    "squared error": lambda: (Function(lambda x, y, a: F.mse_loss(x @ a, y), (8, 5)), (f(6, 8), f(6, 5))),
    "smooth error": lambda: (Function(lambda x, y, a: F.smooth_l1_loss((x @ a).tanh(), y), (8, 5)), (f(6, 8), f(6, 5))),
    "logits": lambda: (Function(lambda x, y, a: F.binary_cross_entropy_with_logits(x @ a, y.sigmoid()), (8, 5)),
                       (f(6, 8), f(6, 5))),
    "embedding": lambda: (nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 4)), (i(3, 4),)),
    "joined": lambda: (Function(lambda x, a: torch.cat([x, x @ a], 1) @ torch.cat([a, a]), (8, 8)), (f(5, 8),)),
    "stacked": lambda: (Function(lambda x, a: torch.stack([x, (x @ a).relu()]).sum(0) @ a, (8, 8)), (f(5, 8),)),
    "batch norm": lambda: (ConvNet(), (f(4, 3, 4, 4),)),
    "gelu and silu": lambda: (Function(lambda x, a: F.silu(F.gelu(x @ a) @ a) @ a, (8, 8)), (f(5, 8),)),
    "powers": lambda: (Function(lambda x, a: ((x @ a).pow(3) * (x @ a)).exp().clamp(max=2) @ a, (8, 8)), (f(5, 8),)),
    "quotients": lambda: (Function(lambda x, a: ((x @ a) / (1 + (x @ a).square()) + x.sigmoid()) @ a, (8, 8)),
                          (f(5, 8),)),
    "gated": lambda: (Gated(), (f(5, 8),)),
    "split and "
    "rolled": lambda: (Function(lambda x, a: torch.cat([-(x @ a).chunk(2, -1)[1], (x @ a).chunk(2, -1)[0]], -1) * x,
                                (8, 8)), (f(5, 8),)),
    "transformer": lambda: (Transformer(), (i(2, 4, below=11),)),
}  # fmt: skip
CASES = {name: functools.cache(make) for name, make in CASES.items()}  # a model is captured once for all tests
