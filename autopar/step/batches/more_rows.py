"""Tell a number that follows from the number of rows from one that is the same for any.

    loss.sum() / x.shape[0]        8 rows: 8      16 rows: 16
    loss.sum() / 8.0               8 rows: 8      16 rows: 8

In a captured program both are ``div.Tensor(sum, 8)``. So the program is looked at with twice the rows: a capture with
symbols gives it, any other call is captured once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.capture import Captured, capture_call
from autopar.capture.arguments import Arguments
from autopar.capture.symbolic.validity import Misfit
from autopar.ir.at_values import at_values
from autopar.ir.ops.seeded_random import Random
from autopar.ir.program import Program


class MoreRows:
    """The numbers of a call's program at twice the rows. It is made when the first of them is asked for."""

    def __init__(
        self,
        captured: Captured,
        model: torch.nn.Module,
        arguments: Arguments,
        cut: Collection[str],
        random: Random,
        keep: bool,
    ) -> None:
        """``captured``: the call. ``cut``: the names of the inputs that are cut into micro-batches along dim 0."""
        self._call, self._model, self._arguments, self._cut = captured, model, arguments, cut
        self._options = random, keep
        self._numbers: Mapping[str, Any] | None = None

    def has_same(self, node: fx.Node) -> bool | None:
        """Return whether an op's second operand is the same number there; ``None`` if it cannot be
        captured, or has no such op there."""
        if self._numbers is None:
            program = self._program()
            nodes = () if program is None else program.nodes
            self._numbers = {n.name: (n.target, n.args[1]) for n in nodes if len(n.args) > 1}
        there = self._numbers.get(node.name, (None, None))
        return None if there[0] is not node.target else bool(there[1] == node.args[1])

    def _program(self) -> Program | None:
        names = iter(self._arguments.names)
        leaves = [
            self._twice(leaf, next(names)) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._arguments.flat
        ]
        arguments = self._arguments.with_leaves(leaves)
        if (symbolic := self._call.symbolic) is not None:
            shapes = {name: tuple(t.shape) for name, t in zip(arguments.names, arguments.tensors, strict=True)}
            values = symbolic.validity.fits(shapes)
            if not isinstance(values, Misfit):
                return at_values(symbolic.captured.program, values)
        random, keep = self._options
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the capture itself has given them
                return capture_call(self._model, arguments, random, keep=keep).program
        except Exception:  # whatever a model raises that is made for one size
            return None

    def _twice(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self._cut:
            return tensor
        return torch.cat([tensor, tensor]).detach().requires_grad_(tensor.requires_grad)
