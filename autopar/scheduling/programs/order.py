"""Decide the order in which a program runs, on the explicit program, for the ranks of all classes alike.

The order is a function of the program, of its durations and of the policy, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.costs.durations import Durations
from autopar.ir.nodes import is_getitem, name_of
from autopar.ir.program import Program
from autopar.ir.value_names import sums_in
from autopar.scheduling.decide import judge, schedule
from autopar.scheduling.lines import Line, Part
from autopar.scheduling.op import Op
from autopar.scheduling.policies import ByteScheduler
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import Function, functions_of
from autopar.scheduling.programs.ops import program_ops
from autopar.scheduling.programs.today import today
from autopar.scheduling.scheduled import Schedule
from autopar.scheduling.simulation import Issue

TODAY = "today"


@dataclass(frozen=True)
class Execution:
    """How a program runs.

    Attributes:
        whole: whether it is one function, as the programs of a step are; else each phase is one.
        written: the states that it may write to in place, besides the sums of gradients, by the user's names.
    """

    whole: bool = False
    written: frozenset[str] = frozenset()

    def donated(self, program: Program) -> list[str]:
        """Return the placeholders that a program may write to: sums, and the states in ``written``."""
        return donated_names(program, self.written) if self.whole else []


OF_CALLS = Execution()
OF_STEPS = Execution(whole=True)


def donated_names(program: Program, written: Collection[str]) -> list[str]:
    """Return the placeholders of sums, and of the states in ``written``, which has the user's names."""
    names = sums_in(program) | frozenset(written)
    return [node.name for node in program.placeholders if name_of(node) in names]


@dataclass(frozen=True)
class Overlap:
    """What decides an order.

    Attributes:
        policy: a name in ``POLICIES``, or ``ByteScheduler(…)``.
        issue: how the device issues lines.
        priorities: glob over names of values → an integer; smaller goes first.
        memory: the most bytes of values that may be alive; ``None``: no limit.
    """

    policy: str | ByteScheduler = TODAY
    issue: Issue = "direct"
    priorities: Mapping[str, int] | None = None
    memory: int | None = None


@dataclass(frozen=True)
class Ordered:
    """The order of one function of a program, and what it takes."""

    lines: FunctionLines
    schedule: Schedule


def lines_of(program: Program, execution: Execution) -> tuple[FunctionLines, ...]:
    """Return the lines of the policy ``today``, for which nothing has a price."""
    donated = Donated.of(program, execution.donated(program))
    return today(program, functions_of(program, execution.whole), donated)


def decide(
    program: Program, execution: Execution, durations: Durations, overlap: Overlap | None = None
) -> tuple[Ordered, ...]:
    """Return the order of each function of an explicit program.

    Args:
        durations: the seconds of its ops and transfers.
        overlap: what decides; ``None``: the policy ``today``.

    Raises:
        ScheduleError: the policy, a priority or the limit of memory is wrong.
    """
    overlap = overlap or Overlap()
    functions = functions_of(program, execution.whole)
    fixed: Sequence[FunctionLines | None] = [None] * len(functions)
    if overlap.policy == TODAY:
        fixed = today(program, functions, Donated.of(program, execution.donated(program)))
    return tuple(
        _ordered(program, function, durations, overlap, lines) for function, lines in zip(functions, fixed, strict=True)
    )


def _ordered(
    program: Program, function: Function, durations: Durations, overlap: Overlap, lines: FunctionLines | None
) -> Ordered:
    ops = program_ops(program, function, durations.seconds)
    startup, interference = durations.startup, durations.interference
    if lines is not None:
        simulated = _simulated_lines(ops, lines.lines)
        return Ordered(lines, judge(ops, simulated, TODAY, overlap.issue, startup=startup, interference=interference))
    made = schedule(ops, overlap.policy, overlap.issue, startup=startup, priorities=overlap.priorities,
                    memory=overlap.memory, interference=interference)  # fmt: skip
    return Ordered(FunctionLines(function.phases, _with_elements(function, made.lines)), made)


def _simulated_lines(ops: Sequence[Op], lines: Sequence[Line]) -> list[Line]:
    """Return the lines of ops, with the bytes that the ops have; elements of results take no time."""
    whole = {op.name: Part(op.name, 0, 0 if op.computes else op.bytes) for op in ops}
    return [
        Line(line.kind, tuple(whole[part.op] for part in line.parts)) for line in lines if line.parts[0].op in whole
    ]


def _with_elements(function: Function, lines: Sequence[Line]) -> tuple[Line, ...]:
    """Add the elements of results with several values, each behind its op."""
    nodes: dict[str, fx.Node] = {node.name: node for node in function.nodes}
    complete: list[Line] = []
    for line in lines:
        complete.append(line)
        if line.kind == "compute":
            for element in nodes[line.parts[0].op].users:
                if is_getitem(element) and element.name in nodes:
                    complete.append(Line("compute", (Part(element.name, 0, 0),)))
    return tuple(complete)
