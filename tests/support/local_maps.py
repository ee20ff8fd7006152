"""Functions that run on the pieces of each rank, inside of models, and their comparison on a rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import autopar
from autopar import Mesh

# how one axis may split the product of x [a, b] and w [b, c]: x, w, the product, and the sums of the rows of x
PRODUCT: dict[str, tuple[Any, Any, Any, Any]] = {
    "none": (Replicate(), Replicate(), Replicate(), Replicate()),
    "a": (Shard(0), Replicate(), Shard(0), Shard(0)),
    "b": (Shard(1), Shard(0), Partial(), Partial()),
    "c": (Replicate(), Shard(1), Shard(1), Replicate()),
    "x": (Partial(), Replicate(), Partial(), Partial()),
}


def product(x: torch.Tensor, w: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (x @ w) * scale, x.sum(1)


class Product(nn.Module):
    """A product and sums on pieces, between ops that autopar splits."""

    def __init__(self, splits: dict[str, str], mapped: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.w, self.last = nn.Linear(6, 7), nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 3)
        of = [{axis: PRODUCT[split][k] for axis, split in splits.items()} for k in range(4)]
        self.run = autopar.local_map(product, (of[2], of[3]), (of[0], of[1], None)) if mapped else product
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, sums = self.run(torch.tanh(self.first(x)), self.w, 0.5)
        return self.last(torch.tanh(y)) * sums.sin()[:, None]


X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compared(splits: dict[str, str], run: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Values and gradients of a call, by name: those of ``run(model, x)`` and of the plain function."""
    model, plain = Product(splits), Product(splits, mapped=False)
    ours, theirs = run(model, X), plain(X)
    weights = torch.linspace(0.5, 1.5, theirs.numel(), dtype=torch.float64).reshape(theirs.shape)
    for y in (ours, theirs):
        (y.square() * weights).sum().backward()
    own = getattr(run, "module", model)
    pairs = zip(own.named_parameters(), plain.parameters(), strict=True)
    gradients: Any = {name: (p.grad, q.grad) for (name, p), q in pairs}
    return {"y": (ours, theirs), **gradients}


def equals_the_function_on_processes() -> None:
    """On a rank: the numbers of a region whose results are partial, and of one whose results are split."""
    for splits in ({"dp": "a"}, {"dp": "b"}, {"dp": "c"}):
        plain = Product(splits, mapped=False)
        parallel = autopar.parallelize(
            copy.deepcopy(Product(splits)), Mesh(dp=2), {"x": ("dp", None)}, outputs="global"
        )
        ours, theirs = parallel(X), plain(X)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        for (name, p), q in zip(parallel.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12, msg=name)
        parallel.close()
