"""Tell how the numbers of a call grow with its rows.

    loss.sum() / x.shape[0]        8 rows: 8      16 rows: 16       grows as they do: 1
    loss.sum() * (1 / len(x))      8 rows: 1/8    16 rows: 1/16     as their inverse: -1
    loss.sum() / 8.0               8 rows: 8      16 rows: 8        not: 0
    loss.sum() / (len(x) - 1)      8 rows: 7      16 rows: 15       otherwise: None

In a captured program all of them are numbers. So it is compared with the program at twice the rows: a capture with
symbols gives it, any other call is captured once more.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture import Captured, capture_call
from autopar.capture.arguments import Arguments
from autopar.capture.symbolic.validity import Misfit
from autopar.ir.at_values import at_values
from autopar.ir.nodes import operands, record_of
from autopar.ir.ops.seeded_random import Random
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.torch_private import OpOverload, aten, number_arguments

POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default}
FACTORS = (2.0, 0.5)  # of the rows


class MoreRows:
    """The programs of a call at its rows, and at twice or half as many. They are compared when the first number is
    asked for."""

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

    def growth(self, node: fx.Node) -> int | None:
        """Return how the number of a node of the captured program grows: 0, 1 or -1; ``None`` if otherwise, or if the
        other program has no such node. A node that a pass has inserted has no number of the user's: 0."""
        here = self._here.get(node.name)
        if here is None or here.target is not node.target:
            return 0
        numbers = _numbers(here, self._call.program)
        if not numbers:
            return 0
        program, factor = self._there
        there = self._nodes_there.get(node.name)
        if program is None or there is None or there.target != here.target:
            return None
        return _growth(numbers, _numbers(there, program), factor)

    def has(self, node: fx.Node) -> bool:
        """Return whether a node is one of the captured program, with a number."""
        here = self._here.get(node.name)
        return here is not None and here.target is node.target and bool(_numbers(here, self._call.program))

    def is_reduced(self, node: fx.Node) -> bool:
        """Return whether a value keeps its size with more rows, and an operand does not: ``ones(len(x)).sum()``.

        It is for values that no input is in.
        """
        return self._resized(node) is False and any(map(self._resized, operands(node)))

    def _resized(self, node: fx.Node) -> bool | None:
        """``None`` for what is no tensor, or is not there."""
        here, there = self._here.get(node.name), self._nodes_there.get(node.name)
        shapes = [None if n is None else _shape(n) for n in (here, there)]
        return None if None in shapes else shapes[0] != shapes[1]

    @functools.cached_property
    def _here(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self._call.program.nodes}

    @functools.cached_property
    def _nodes_there(self) -> dict[str, fx.Node]:
        program = self._there[0]
        return {} if program is None else {node.name: node for node in program.nodes}

    @functools.cached_property
    def _there(self) -> tuple[Program | None, float]:
        """The program at more rows, and how many times as many they are."""
        for factor in FACTORS:
            if (program := self._program(factor)) is not None:
                return program, factor
        return None, 1.0

    def _program(self, factor: float) -> Program | None:
        names = iter(self._arguments.names)
        leaves = []
        for leaf in self._arguments.flat:
            if isinstance(leaf, torch.Tensor) and next(names) in self._cut and leaf.dim():
                if factor < 1 and len(leaf) % 2:
                    return None
                rows = leaf[: len(leaf) // 2] if factor < 1 else torch.cat([leaf, leaf])
                leaf = rows.detach().requires_grad_(leaf.requires_grad)
            leaves.append(leaf)
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


def _numbers(node: fx.Node, program: Program) -> list[Any]:
    """Return the numbers that a node computes with: no sizes, dims or flags. A constant is its content."""
    if node.op == "get_attr":
        constant = program.constants[str(node.target)]
        return [(constant.shape, constant.content)] if constant.shape else [constant.content]
    if not isinstance(node.target, OpOverload) or node.target in POSITIONS:
        return []
    arguments = [
        node.args[position] if position < len(node.args) else node.kwargs.get(name)
        for position, name in number_arguments(node.target)
    ]
    return [number for number in arguments if isinstance(number, (int, float)) and not isinstance(number, bool)]


def _growth(here: Sequence[Any], there: Sequence[Any], factor: float) -> int | None:
    if len(here) != len(there):
        return None
    changed = [(a, b) for a, b in zip(here, there, strict=True) if a != b and not (a != a and b != b)]
    if not changed:
        return 0
    (a, b), *more = changed
    if more or not isinstance(a, (int, float)) or not isinstance(b, (int, float)) or len(here) > 1:
        return None
    if math.isclose(b, factor * a, rel_tol=1e-9):
        return 1
    return -1 if math.isclose(a, factor * b, rel_tol=1e-9) else None


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    type = record_of(node).type
    return tuple(type.shape) if isinstance(type, TensorType) else None
