"""Make the explicit program of many sizes once, and that of a call's sizes from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.capture import Captured
from autopar.errors import AutoparError, VerifyError
from autopar.ir.at_values import at_values
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import alike, map_operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType, ValueType
from autopar.ir.sizes import values_text
from autopar.report.passes import PassReport
from autopar.search.solutions.solution import Solution
from autopar.verify.levels import verify


@dataclass(frozen=True, eq=False)
class Explicit:
    """What the passes made of a traced program.

    Attributes:
        program: the explicit program.
        reports: what each pass did.
        found: the plan, if it was searched.
        symbolic: the program with symbols that it was made of; ``None`` if it was placed itself.
        refused: why there is no such program; else "".
    """

    program: Program
    reports: list[PassReport]
    found: Solution | None = None
    symbolic: Program | None = None
    refused: str = ""


Passes = Callable[[Program, Captured], tuple[list[PassReport], Solution | None]]


def explicit_at_sizes(captured: Captured, key: Any, passes: Passes) -> Explicit:
    """Return the explicit program of a call, made from the one with symbols; where it is refused, a report says why.

    Args:
        captured: the call, captured with symbols.
        key: what decides the layouts; the passes run once for each.
        passes: runs the passes on a traced program.
    """
    symbolic, start = captured.symbolic, time.perf_counter()
    reports: list[PassReport] = []
    if key not in symbolic.placed:
        program = symbolic.captured.program.copy()
        try:
            reports, found = passes(program, symbolic.captured)
            symbolic.placed[key] = Explicit(program, reports, found)
        except (AutoparError, ValueError, ArithmeticError, AssertionError) as error:
            symbolic.placed[key] = Explicit(program, [], refused=_first_lines(error))
        start = time.perf_counter()
    made: Explicit = symbolic.placed[key]
    if made.refused:
        return _placed_anew(made.program, start, f"the program has no symbols, because {made.refused}")
    try:
        program = at_values(made.program, captured.values)
        _check_like(program, captured.program)
        verify(program, "sizes")
    except (VerifyError, ValueError) as error:
        return _placed_anew(
            made.program, start, f"the program with symbols is not one of these sizes: {_first_lines(error)}"
        )
    found, same = made.found, captured.values == symbolic.validity.values
    if found is not None and not same:
        reason = f"the plan was searched for {values_text(symbolic.validity.values)}, so nothing is proven"
        found = replace(found, least=0.0, reason=reason)
    report = PassReport("sizes", (time.perf_counter() - start) * 1e3)
    return Explicit(program, [*reports, report], found, made.program)


def placed_key(attrs: Mapping[str, DistAttr], *more: Any) -> Any:
    """Return what decides the layouts of a program: those that are given, and ``more``."""
    return tuple(sorted(attrs.items(), key=lambda row: row[0])), *more


def _placed_anew(program: Program, start: float, why: str) -> Explicit:
    note = f"placed anew, without a trace: {why}"
    report = PassReport("sizes", (time.perf_counter() - start) * 1e3, notes=(note,))
    return Explicit(program, [report], refused=why)


def _first_lines(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:4])


def _check_like(program: Program, traced: Program) -> None:
    """Check that the ops of an explicit program compute what those of the traced program do, at these sizes.

    Raises:
        ValueError: an op that both have has another shape or argument, as where a pass has lost a symbol.
    """
    ops = {node.name: node for node in traced.nodes if node.op == "call_function"}
    for node in program.nodes:
        other = ops.get(node.name)
        if other is None or node.target is not other.target:
            continue
        if _shapes(record_of(node).type) != _shapes(record_of(other).type) or not _same_arguments(node, other):
            raise ValueError(f"{node.name} has other sizes than in the capture")


def _shapes(type: ValueType) -> Any:
    if isinstance(type, tuple):
        return tuple(map(_shapes, type))
    return (type.shape, type.dtype) if isinstance(type, TensorType) else None


def _same_arguments(node: fx.Node, other: fx.Node) -> bool:
    """Return whether two ops have equal arguments besides their operands."""
    one, its = (map_operands((each.args, dict(each.kwargs)), lambda operand: None) for each in (node, other))
    return alike(one, its)
