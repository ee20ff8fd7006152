"""Decide the order in which a program runs, on the explicit program, for the ranks of all classes alike."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autopar.ir.nodes import name_of
from autopar.ir.program import Program
from autopar.ir.value_names import sums_in
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.function_lines import FunctionLines
from autopar.scheduling.programs.functions import functions_of
from autopar.scheduling.programs.today import today


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


def decide(program: Program, execution: Execution) -> tuple[FunctionLines, ...]:
    """Return the lines of each function of an explicit program, in the order in which they are issued."""
    donated = Donated.of(program, execution.donated(program))
    return today(program, functions_of(program, execution.whole), donated)
