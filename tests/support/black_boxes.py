"""Define ops of which autopar is told nothing, types of their operands, and a model that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.ir.record import TensorType
from autopar.torch_private import OpOverload

LIBRARY = torch.library.Library("unknown_ops", "DEF")
INDEX = torch.int64


def define(schema: str, compute: Callable[..., Any]) -> OpOverload:
    """A black box: one kernel for all devices."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0]
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    return getattr(torch.ops.unknown_ops, name).default


def T(*shape: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType(shape, dtype)


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        return self.function(x, *others)
