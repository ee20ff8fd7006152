"""Run a program that completes the run before and leaves something under way: all of it, its begin, or its finish.

What is under way between two runs are states of the scheduled program: started collectives, and values that the next
run reads. A run takes them by placeholder, and returns them with the other states.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.value_names import ValueRole, roles_in
from autopar.runtime import anomaly
from autopar.runtime.anomaly import Hunt, Watched
from autopar.runtime.modes import as_captured
from autopar.runtime.simulation.simulate import Instruction, Values, compile_whole, run_ranks
from autopar.runtime.whole import Pieces, ProcessRun, SimulatedRun
from autopar.scheduling.programs.functions import RunPart


def handed_over(local: Program) -> frozenset[str]:
    """Return the states of a scheduled program that are under way between two runs."""
    before = {name for name, (role, _) in roles_in(local).items() if role is ValueRole.BEFORE}
    return frozenset(node.name for node in local.placeholders if record_of(node).started or name_of(node) in before)


def taken_by_finish(local: Program) -> frozenset[str]:
    """Return the user's names of the inputs that the phase ``finish`` reads: numbers of the step before."""
    return frozenset(
        name_of(node)
        for node in local.placeholders
        if record_of(node).role == "input" and any(record_of(user).phase == "finish" for user in node.users)
    )


class ProcessTurn(ProcessRun):
    """A part of such a program on this rank. Its arguments are those of ``ProcessRun``."""

    @cached_property
    def handed(self) -> frozenset[str]:
        return handed_over(self._local)

    def of(self, values: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], Pieces]:
        """Return the returned values, and the next values of the states that the part replaces."""
        returned = [] if self._part == "finish" else [values[name] for name in self.returned]
        return returned, {state: values[name] for state, name in next_names(self._local).items() if name in values}


class SimulatedTurn(SimulatedRun):
    """The parts of such a program on all ranks, simulated in this process."""

    @cached_property
    def handed(self) -> frozenset[str]:
        return frozenset(name for local in self._local.values() for name in handed_over(local))

    def run(
        self, part: RunPart, values: dict[int, Values], during: str = ""
    ) -> dict[int, tuple[list[torch.Tensor], Pieces]]:
        """Run a part on the pieces of each rank, by placeholder; ``during`` as of ``ProcessRun``."""
        for rank, pieces in values.items() if part == "begin" else ():
            pieces |= {value: pieces[state] for state, value in self._completed[rank].items() if state in pieces}
        if anomaly.is_on():
            values = {
                rank: Watched(pieces, Hunt(self._local[rank], scaled=self._scaled, during=during))
                for rank, pieces in values.items()
            }
        with as_captured():
            run_ranks(self._meshes, self._codes[part], values)
        results = {}
        for rank, pieces in values.items():
            completed = self._completed[rank]
            names = {
                state: name
                for state, name in next_names(self._local[rank]).items()
                if part == "whole" or (state in completed) == (part == "finish")
            }
            returned = [] if part == "finish" else [pieces[name] for name in self.returned]
            results[rank] = returned, {state: pieces[name] for state, name in names.items()}
        return results

    @cached_property
    def _completed(self) -> dict[int, dict[str, str]]:
        """Rank → state that the phase ``finish`` replaces → its next value."""
        completed = {}
        for rank, local in self._local.items():
            phases = {node.name: record_of(node).phase for node in local.nodes if node.op == "call_function"}
            completed[rank] = {s: name for s, name in next_names(local).items() if phases.get(name) == "finish"}
        return completed

    @cached_property
    def _codes(self) -> dict[RunPart, dict[int, list[Instruction]]]:
        """Part → rank → its instructions; ranks of one class share them."""
        compiled = {id(program.graph): compile_whole(program) for program in self._local.values()}
        parts: dict[RunPart, dict[int, list[Instruction]]] = {}
        wanted: dict[RunPart, tuple[bool, ...]] = {"whole": (True, False), "begin": (False,), "finish": (True,)}
        for part, finishes in wanted.items():
            code = {
                key: [step for step in steps if (record_of(step.node).phase == "finish") in finishes]
                for key, steps in compiled.items()
            }
            parts[part] = {rank: code[id(program.graph)] for rank, program in self._local.items()}
        return parts


def next_names(local: Program) -> dict[str, str]:
    """Map each state of a program to its next value, by name."""
    rows = zip(operands(local.output), record_of(local.output).results, strict=True)
    return {result.of: value.name for value, result in rows if result.kind == "state"}
