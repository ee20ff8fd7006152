"""Compare what a captured step returns with what eager returns: classes, structure, numbers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import torch
from equality import TOLERANCE, relative
from torch import nn

import autopar

d = torch.float64


class Apply(nn.Module):
    """A linear layer and a function of its output and the arguments."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w, self.function = nn.Linear(4, 4, dtype=d), function

    def forward(self, x: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return self.function(self.w(x), *rest, **more)


def same(ours: Any, theirs: Any) -> None:
    """Equal in classes, structure, numbers and constants; by attributes, not by the flattening that is tested."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert relative(ours, theirs) <= TOLERANCE and ours.requires_grad == theirs.requires_grad
    elif isinstance(theirs, (list, tuple, collections.UserList)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            same(ours[key], theirs[key])
    elif dataclasses.is_dataclass(theirs) or "cache" in type(theirs).__module__:
        slots = {name for base in type(theirs).__mro__ for name in getattr(base, "__slots__", ())}
        for name in {*slots, *getattr(theirs, "__dict__", {})}:
            assert hasattr(ours, name) == hasattr(theirs, name), name
            if hasattr(theirs, name):
                same(getattr(ours, name), getattr(theirs, name))
        assert getattr(ours, "__dict__", {}).keys() == getattr(theirs, "__dict__", {}).keys()
    else:
        assert ours == theirs


def returned(parallel: autopar.Parallel) -> str:
    return next(line.strip() for line in str(parallel.program).splitlines() if line.startswith("  return "))
