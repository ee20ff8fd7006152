"""Compare simulated ranks with the single device: outputs, gradients and buffers, in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import autopar
from autopar import Mesh
from autopar.ir.structure import flatten

TOLERANCE = 1e-10


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value; what is zero but for rounding has none."""
    assert a.shape == b.shape and a.dtype == b.dtype
    if not a.numel():
        return 0.0
    a, b = a.detach(), b.detach()
    if not a.dtype.is_floating_point:
        return float(not torch.equal(a, b))
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))


def loss_of(outputs: Any) -> torch.Tensor:
    """A scalar that every floating output takes part in, each element with its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in flatten(outputs)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).reshape(leaf.shape)
            total = total + (leaf.double() * weights).square().sum()
    return total


def check_equal(model: nn.Module, mesh: Mesh, plan: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None,
                tolerance: float = TOLERANCE) -> Any:  # fmt: skip
    """Simulate and compare with eager: outputs, every gradient, every buffer. Returns the Parallel.

    Without a plan there is no example either, which would search one.
    """
    kwargs = dict(kwargs or {})
    eager = copy.deepcopy(model)
    leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    expected = eager(*args, **kwargs)
    loss_of(expected).backward()
    wanted = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    parallel = autopar.parallelize(model, mesh, plan, example=None if plan is None else (args, kwargs))
    outputs = parallel.simulate(*args, **kwargs)
    loss_of(outputs).backward()
    assert flatten(outputs)[1] == flatten(expected)[1]
    for ours, theirs in zip(flatten(outputs)[0], flatten(expected)[0], strict=True):
        if isinstance(theirs, torch.Tensor):
            assert relative(ours, theirs) <= tolerance
            assert ours.requires_grad == theirs.requires_grad
        else:
            assert ours == theirs
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert ours.grad is not None and relative(ours.grad, theirs.grad) <= tolerance, name
    for (name, ours), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert relative(ours, theirs) <= tolerance, name
    for leaf, gradient in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None and relative(leaf.grad, gradient) <= tolerance
    return parallel
