"""Write the price of a plan as an expression in the batch, the sequence and the machine's bandwidths.

The layouts and transfers of the plan are held fixed. Each op is its roofline, a latency and a maximum of work and
bytes; each transfer is the minimum of its algorithms' closed forms. So the expression is piecewise rational: affine in
the batch for most models, and quadratic in the sequence where an attention is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from autopar.costs.machine import Machine
from autopar.costs.symbolic import NoExpression, bandwidths, op_seconds, transfer_seconds
from autopar.errors import PlanError
from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.rules.strategies import Bound
from autopar.search.symbols.sizes import Captures, Marks, ProgramSizes, Shapes, captures

BATCH, SEQUENCE = "batch", "sequence"


@dataclass(frozen=True)
class Priced:
    """What the price of a plan was computed from, and how to capture its call at other sizes.

    Attributes:
        programs: the explicit programs, each with the number of times that it runs.
        machine: the machine.
        shapes: the shapes of the inputs of the captured call: of one micro-batch in a step.
        integers: the inputs with integers, which have a sequence in dim 1 by default.
        capture: returns the traced program of the call with inputs of other shapes.
        microbatches: the number of micro-batches.
    """

    programs: tuple[tuple[int, Program], ...]
    machine: Machine
    shapes: Shapes
    integers: frozenset[str]
    capture: Callable[[Shapes], Program]
    microbatches: int = 1


@dataclass(frozen=True)
class Expression:
    """The price of a plan for any sizes that its mesh divides as it does those of the capture.

    Attributes:
        seconds: a sympy expression. It differs from the price of the plan by less than a nanosecond for each op and
            transfer, because prices are whole nanoseconds.
        values: symbol → its value in the capture, and on the machine.
        terms: the number of ops and transfers, those of all micro-batches counted.
    """

    seconds: sympy.Expr
    values: Mapping[sympy.Symbol, float]
    terms: int

    def at(self, **values: float) -> float:
        """Return the seconds at these values of symbols, as ``at(batch=64)``; others are those of the capture.

        Raises:
            PlanError: there is no such symbol.
        """
        return float(self.seconds.subs({**self.values, **{self.symbol(name): v for name, v in values.items()}}))

    def symbol(self, name: str) -> sympy.Symbol:
        """Return the symbol of this name; ``PlanError`` if there is none."""
        for symbol in self.values:
            if symbol.name == name:
                return symbol
        raise PlanError(f"there is no symbol {name!r}; there are {', '.join(each.name for each in self.values)}")

    def __str__(self) -> str:
        return str(self.seconds)


def marks_of(shapes: Shapes, integers: frozenset[str]) -> dict[str, list[str | None]]:
    """Return the symbols of dims by default.

    The batch is dim 0 of each input whose dim 0 is that of the first. The sequence is dim 1 of each whose dim 1 is that
    of the first, if the first one has integers, as ids of tokens.
    """
    marks: dict[str, list[str | None]] = {}
    first = next((name for name, shape in shapes.items() if shape), None)
    for name, shape in shapes.items():
        marks[name] = [None] * len(shape)
        if first is None or not shape or shape[0] != shapes[first][0]:
            continue
        marks[name][0] = BATCH
        if first in integers and len(shape) > 1 and len(shapes[first]) > 1 and shape[1] == shapes[first][1]:
            marks[name][1] = SEQUENCE
    return marks


def expression_of(priced: Priced, marks: Marks | None = None) -> Expression:
    """Return the price of a plan as an expression.

    Args:
        marks: input → the symbol of each dim, ``{"x": ("batch", None)}``; inputs that it does not name are fixed.

    Raises:
        PlanError: a mark is wrong, or the size of a value is not certain; the error has the line.
    """
    chosen = _checked(priced, marks)
    try:
        found = captures(priced.shapes, chosen, priced.capture)
        terms: dict[sympy.Expr, int] = {}
        for repeats, program in priced.programs:
            _add(terms, repeats, ProgramSizes(program, found), priced.machine)
    except NoExpression as error:
        raise PlanError(
            f"the price of the plan is no expression in {' and '.join(_symbols(chosen)) or BATCH}: {error}; name the "
            f'dims that change, as in expression({{"x": ("batch", None)}}), or leave out those that cannot'
        ) from None
    values: dict[sympy.Symbol, float] = {}
    seconds = sympy.Add(*(count * term for term, count in terms.items()))
    for name, symbol in found.symbols.items():
        values[symbol] = found.base[name] * (priced.microbatches if name == BATCH else 1)
    if priced.microbatches > 1 and BATCH in found.symbols:
        seconds = seconds.subs(found.symbols[BATCH], found.symbols[BATCH] / priced.microbatches)
    return Expression(seconds, {**values, **bandwidths(priced.machine)}, sum(terms.values()))


def _add(terms: dict[sympy.Expr, int], repeats: int, sizes: ProgramSizes, machine: Machine) -> None:
    """Add the ops and transfers of a program; equal ones are priced once."""
    known: dict[Any, sympy.Expr] = {}
    for node, bound, size in sizes:
        record = record_of(node)
        if bound is None:
            source, result = record_of(operands(node)[0]).type, record.type
            assert isinstance(source, TensorType) and isinstance(result, TensorType)
            arguments = transfers.arguments(node.target, node.args, node.kwargs)
            key: Any = (node.target, source, result, str(arguments.get("axis")), arguments.get("op"), tuple(size))
            if key not in known:
                known[key] = transfer_seconds(node.target, source, arguments, result, size, machine)
        else:
            needs = tuple(need for need in record.uses if need is not None)
            types = record.type if isinstance(record.type, tuple) else (record.type,)
            key = (bound, needs, types, tuple(size.factors.items()), tuple(map(tuple, size.operands)))
            if key not in known:
                known[key] = _op(bound, needs, types, size, machine)
        term = known[key]
        if term != 0:
            terms[term] = terms.get(term, 0) + repeats


def _op(bound: Bound, needs: Sequence[Any], types: Sequence[Any], sizes: Any, machine: Machine) -> sympy.Expr:
    meshes = [need.placed.mesh for need in needs]
    meshes += [type.layout.mesh for type in types if type is not None and type.layout is not None]
    mesh = next(iter(meshes), None)
    gives = [None if type is None else type.attr for type in types]
    split = {} if mesh is None else bound.splits([need.placed.attr for need in needs], gives, mesh)
    writes = [None if type is None else type.dtype for type in types]
    return op_seconds(bound, sizes, split, mesh, [need.dtype for need in needs], writes, machine)


def _checked(priced: Priced, marks: Marks | None) -> dict[str, Sequence[str | None]]:
    if marks is None:
        return dict(marks_of(priced.shapes, priced.integers))
    for name, dims in marks.items():
        shape = priced.shapes.get(name)
        if shape is None:
            raise PlanError(f"there is no input {name!r}; there are {', '.join(priced.shapes)}")
        if isinstance(dims, str) or not isinstance(dims, Sequence) or len(dims) != len(shape):
            raise PlanError(f"the marks {dims!r} of {name} are not one for each of its dims, {list(shape)}")
        if any(symbol is not None and not (isinstance(symbol, str) and symbol.isidentifier()) for symbol in dims):
            raise PlanError(f"the marks {dims!r} of {name} have something that is no name of a symbol")
    return dict(marks)


def _symbols(marks: Marks) -> list[str]:
    return [*dict.fromkeys(symbol for dims in marks.values() for symbol in dims if symbol is not None)]


__all__ = ["BATCH", "SEQUENCE", "Captures", "Expression", "Priced", "expression_of", "marks_of"]
