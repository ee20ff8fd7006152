"""Tell a number that follows from the number of rows from one that is the same for any.

    loss.sum() / x.shape[0]        8 rows: 8      16 rows: 16
    loss.sum() / 8.0               8 rows: 8      16 rows: 8

In a captured program both are ``div.Tensor(sum, 8)``. So the call is captured once more, with twice the rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture import capture_call
from autopar.capture.arguments import Arguments
from autopar.ir.ops.seeded_random import Random


class MoreRows:
    """The numbers of a call's program at twice the rows. It is captured when the first of them is asked for."""

    def __init__(
        self, model: torch.nn.Module, arguments: Arguments, cut: Collection[str], random: Random, keep: bool
    ) -> None:
        """``cut``: the names of the inputs that are cut into micro-batches along dim 0."""
        self._model, self._arguments, self._cut, self._options = model, arguments, cut, (random, keep)
        self._numbers: Mapping[str, Any] | None = None

    def has_same(self, node: fx.Node) -> bool | None:
        """Return whether an op's second operand is the same number there; ``None`` if it cannot be captured."""
        if self._numbers is None:
            self._numbers = self._captured()
        there = self._numbers.get(node.name, (None, None))
        return None if there[0] is not node.target else bool(there[1] == node.args[1])

    def _captured(self) -> Mapping[str, Any]:
        names = iter(self._arguments.names)
        leaves = [
            self._twice(leaf, next(names)) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._arguments.flat
        ]
        random, keep = self._options
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the capture itself has given them
                program = capture_call(self._model, self._arguments.with_leaves(leaves), random, keep=keep).program
        except Exception:  # whatever a model raises that is made for one size
            return {}
        return {node.name: (node.target, node.args[1]) for node in program.nodes if len(node.args) > 1}

    def _twice(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self._cut:
            return tensor
        return torch.cat([tensor, tensor]).detach().requires_grad_(tensor.requires_grad)
