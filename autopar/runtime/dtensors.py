"""Redistribute DTensors with autopar's gather, because DTensor uses the coalesced gather of gloo.

See ``start_gather``. Both functions are differentiable, as DTensor's methods are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.torch_private import FUNCTIONAL, TorchDispatchMode, start_gather


class _SingleGathers(TorchDispatchMode):
    """Replaces each functional gather by one that is not coalesced."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = start_gather if func is FUNCTIONAL.all_gather_into_tensor.default else func
        return replaced(*args, **(kwargs or {}))


def redistribute(tensor: Any, placements: Sequence[Any]) -> Any:
    """Return a DTensor with other placements on its mesh."""
    with _SingleGathers():
        return tensor.redistribute(placements=placements)


def full_tensor(tensor: Any) -> torch.Tensor:
    """Return a whole DTensor, as a plain tensor on each rank."""
    with _SingleGathers():
        return tensor.full_tensor()
