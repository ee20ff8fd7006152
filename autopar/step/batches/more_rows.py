"""Tell how the numbers of a call grow with its rows.

    loss.sum() / x.shape[0]        8 rows: 8      16 rows: 16       grows as they do: 1
    loss.sum() * (1 / len(x))      8 rows: 1/8    16 rows: 1/16     as their inverse: -1
    loss.sum() / 8.0               8 rows: 8      16 rows: 8        not: 0
    loss.sum() / (len(x) - 1)      8 rows: 7      16 rows: 15       otherwise: None
    loss.sum() * (beta / len(x))   8 rows: β/8    16 rows: β/16     as their inverse: -1, whatever β is in later calls

In a captured program all of them are numbers. So it is compared with the program at twice the rows: a capture with
symbols gives it, any other call is captured once more.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Collection, Sequence

import torch
from torch import fx

from autopar.capture import Captured, capture_call
from autopar.capture.arguments import Arguments
from autopar.capture.guards.numbers import Number
from autopar.capture.guards.places import GuardedPlace
from autopar.capture.symbolic.validity import Misfit
from autopar.ir.at_values import at_values
from autopar.ir.nodes import operands, record_of
from autopar.ir.ops.seeded_random import Random
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.torch_private import OpOverload, aten, number_arguments

POSITIONS = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default}
FACTORS = (2.0, 0.5)  # of the rows
GENERIC = (0.7182818, 1.6180339)  # values at which no two expressions of people meet


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
        floats: Sequence[GuardedPlace],
        keep: bool,
    ) -> None:
        """``captured``: the call. ``cut``: the names of the inputs that are cut into micro-batches along dim 0.
        ``floats``: the places whose numbers are inputs."""
        self._call, self._model, self._arguments, self._cut = captured, model, arguments, cut
        self._options = random, floats, keep  # of a capture

    def growth(self, node: fx.Node) -> int | None:
        """Return how the number of a node of the captured program grows: 0, 1 or -1; ``None`` if otherwise, or if the
        other program has no such node. A node that a pass has inserted has no number of the user's: 0."""
        if not self.has(node):
            return 0
        there = self._there.nodes.get(node.name)
        if there is None or there.target != node.target:
            return None
        pairs = zip(self._here.numbers(self._here.nodes[node.name]), self._there.numbers(there), strict=False)
        growths = {_growth(numbers, others, self._there.factor) for numbers, others in pairs}
        return growths.pop() if len(growths) == 1 else None

    def has(self, node: fx.Node) -> bool:
        """Return whether a node is one of the captured program, with a number."""
        here = self._here.nodes.get(node.name)
        return here is not None and here.target == node.target and any(self._here.numbers(here))

    def is_reduced(self, node: fx.Node) -> bool:
        """Return whether a value keeps its size with more rows, and an operand does not: ``ones(len(x)).sum()``.

        It is for values that no input is in.
        """
        return self._resized(node) is False and any(map(self._resized, operands(node)))

    def _resized(self, node: fx.Node) -> bool | None:
        """``None`` for what is no tensor, or is not there."""
        here, there = self._here.nodes.get(node.name), self._there.nodes.get(node.name)
        shapes = [None if n is None else _shape(n) for n in (here, there)]
        return None if None in shapes else shapes[0] != shapes[1]

    @functools.cached_property
    def _here(self) -> _Rows:
        return _Rows(self._call.program, self._call.numbers)

    @functools.cached_property
    def _there(self) -> _Rows:
        """The program at more rows; one without nodes if there is none."""
        return next((rows for factor in FACTORS if (rows := self._rows(factor)) is not None), _Rows(None))

    def _rows(self, factor: float) -> _Rows | None:
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
                return _Rows(at_values(symbolic.captured.program, values), factor=factor)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the capture itself has given them
                captured = capture_call(self._model, arguments, *self._options)
        except Exception:  # whatever a model raises that is made for one size
            return None
        return _Rows(captured.program, captured.numbers, factor)


class _Rows:
    """A program at so many rows.

    Attributes:
        nodes: name → node.
        factor: how many times as many the rows are as those of the call.
    """

    def __init__(self, program: Program | None, inputs: Sequence[Number] = (), factor: float = 1.0) -> None:
        self.nodes = {} if program is None else {node.name: node for node in program.nodes}
        self.factor = factor
        self._constants = {} if program is None else program.constants
        self._inputs = {number.name: number for number in inputs}

    def numbers(self, node: fx.Node) -> list[list[object]]:
        """Return the numbers that a node computes with: no sizes, dims or flags. A constant is its content.

        An input that is computed from floats has the numbers of ``GENERIC`` floats, a list for each.
        """
        if node.op == "get_attr":
            constant = self._constants[str(node.target)]
            return [[(constant.shape, constant.content)] if constant.shape else [constant.content]]
        if node.op == "placeholder" and (number := self._inputs.get(record_of(node).name)) is not None:
            return [[number.where_all_are(value)] for value in GENERIC]
        if not isinstance(node.target, OpOverload) or node.target in POSITIONS:
            return [[]]
        arguments = [
            node.args[position] if position < len(node.args) else node.kwargs.get(name)
            for position, name in number_arguments(node.target)
        ]
        return [[number for number in arguments if isinstance(number, (int, float)) and not isinstance(number, bool)]]


def _growth(here: Sequence[object], there: Sequence[object], factor: float) -> int | None:
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
