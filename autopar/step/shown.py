"""Decide of which batch a step shows its programs: of the usual one, and not of the shorter last batch of an epoch."""

from __future__ import annotations

from collections import Counter

from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.step.choices import Chosen
from autopar.step.compiled import AnyStep
from autopar.step.compiling.compiled_step import CompiledMicro

Batch = tuple[tuple[str, tuple[int, ...]], ...]


class Shown:
    """What reports, page and figures of a step are about: the latest programs of the batch with which most steps ran.

    Of equals it is the latest. Since the last ``capture(batch)`` only later steps count, so that what was captured is
    shown until steps of another batch have run.

    Attributes:
        way: how the step runs.
        programs: ``None`` before a capture.
    """

    def __init__(self, way: Chosen) -> None:
        self.way = way
        self.programs: AnyStep | None = None
        self._steps: Counter[Batch] = Counter()
        self._shown: Batch = ()
        self._ran: tuple[CompiledMicro | None, Batch] = None, ()  # the latest micro-batch, and its sizes

    def captured(self, way: Chosen, programs: AnyStep) -> None:
        """Show what was captured."""
        self._steps.clear()
        self.way, self.programs, self._shown = way, programs, _batch_of(programs.micro.captured.program)

    def ran(self, way: Chosen, programs: AnyStep) -> None:
        """Count a step."""
        if self._ran[0] is not programs.micro:
            self._ran = programs.micro, _batch_of(programs.micro.captured.program)
        batch = self._ran[1]
        self._steps[batch] += 1
        if self.programs is None or self._steps[batch] >= self._steps[self._shown]:
            self.way, self.programs, self._shown = way, programs, batch

    def clear(self) -> None:
        """Forget what was captured."""
        self.programs, self._ran = None, (None, ())
        self._steps.clear()


def _batch_of(program: Program) -> Batch:
    """Return the shapes of what the user passes to a program. Names of what calls compute begin with a dot."""
    inputs = [n for n in program.placeholders if record_of(n).role == "input" and not name_of(n).startswith(".")]
    return tuple((node.name, tuple(tensor_type(node).shape)) for node in inputs)
