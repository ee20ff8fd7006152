"""Run the parts of a rotated program, which completes the run before and leaves collectives for the next run.

The started collectives, and the values that the next run reads, are states of the scheduled program. A run takes them
by placeholder, and returns them with the other states. ``scheduling.programs.run_parts`` lists the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.states import next_values
from autopar.runtime import anomaly
from autopar.runtime.anomaly import Hunt, Watched
from autopar.runtime.modes import as_captured
from autopar.runtime.simulation.simulate import Instruction, Values, compile_whole, run_ranks
from autopar.runtime.whole import Pieces, ProcessRun, SimulatedRun
from autopar.scheduling.programs.run_parts import PIECES, RunPart, handed_over, selected


def taken_by_finish(local: Program) -> frozenset[str]:
    """Return the user's names of the inputs that the phase ``finish`` reads, such as the learning rate of the step
    before."""
    return frozenset(
        name_of(node)
        for node in local.placeholders
        if record_of(node).role == "input" and any(record_of(user).phase == "finish" for user in node.users)
    )


class ProcessTurn(ProcessRun):
    """A part of a rotated program on this rank. Its arguments are those of ``ProcessRun``."""

    @cached_property
    def handed(self) -> frozenset[str]:
        """The states that one run hands to the next."""
        return handed_over(self._local)

    def of(self, values: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], Pieces]:
        """Return the returned values, and the next values of the states that the part replaces."""
        nexts = {state: value.name for state, value in next_values(self._local).items()}
        if "end" not in PIECES[self._part]:
            nexts = {state: name for state, name in nexts.items() if state not in self.handed}
        states = {state: values[name] for state, name in nexts.items() if name in values}
        states |= {of: values[name] for of, name in self._handed_sums.items() if name in values and self._hands_sums}
        return [values[name] for name in self.returned if name in values and self._part != "finish"], states

    @property
    def _hands_sums(self) -> bool:
        return self._part in ("first", "first alone")


class SimulatedTurn(SimulatedRun):
    """The parts of a rotated program on all ranks, simulated in this process.

    Args:
        handed_sums: placeholder of a sum → the value that it becomes.
    """

    def __init__(self, explicit: Program, local: Mapping[int, Program], scaled: bool = False,
                 handed_sums: Mapping[str, str] | None = None) -> None:  # fmt: skip
        super().__init__(explicit, local, scaled)
        self._handed_sums = handed_sums or {}
        self._parts: dict[RunPart, dict[int, _SimulatedPart]] = {}

    @cached_property
    def handed(self) -> frozenset[str]:
        return frozenset(name for local in self._local.values() for name in handed_over(local))

    def run(
        self, part: RunPart, values: dict[int, Values], during: str = ""
    ) -> dict[int, tuple[list[torch.Tensor], Pieces]]:
        """Run a part on the pieces of each rank, by placeholder; ``during`` as of ``ProcessRun``."""
        parts = self._part(part)
        for rank, pieces in values.items():
            pieces |= {value: pieces[home] for value, home in parts[rank].replaced.items() if home in pieces}
        if anomaly.is_on():
            values = {
                rank: Watched(pieces, Hunt(self._local[rank], scaled=self._scaled, during=during))
                for rank, pieces in values.items()
            }
        with as_captured():
            run_ranks(self._meshes, {rank: parts[rank].code for rank in values}, values)
        return {
            rank: (
                [pieces[name] for name in parts[rank].returned],
                {state: pieces[name] for state, name in parts[rank].states.items()},
            )
            for rank, pieces in values.items()
        }

    def _part(self, part: RunPart) -> dict[int, _SimulatedPart]:
        """Return rank → a part of its program; ranks of one class share it."""
        if part not in self._parts:
            made = {
                id(program.graph): _SimulatedPart.of(
                    program, self._compiled[id(program.graph)], part, self._handed_sums
                )
                for program in self._local.values()
            }
            self._parts[part] = {rank: made[id(program.graph)] for rank, program in self._local.items()}
        return self._parts[part]

    @cached_property
    def _compiled(self) -> dict[int, list[Instruction]]:
        return {id(program.graph): compile_whole(program) for program in self._local.values()}


@dataclass(frozen=True)
class _SimulatedPart:
    """A part of the program of a rank.

    Attributes:
        code: its instructions.
        returned: the values that it returns.
        states: state → its next value, if the part computes it.
        replaced: next value of a state that another part computes → the state.
    """

    code: list[Instruction]
    returned: list[str]
    states: dict[str, str]
    replaced: dict[str, str]

    @staticmethod
    def of(program: Program, code: Sequence[Instruction], part: RunPart, sums: Mapping[str, str]) -> _SimulatedPart:
        chosen = selected(program, part, sums)
        states = {result.of: value.name for value, result in chosen.results if result.kind == "state"}
        return _SimulatedPart(
            [step for step in code if step.node in chosen.nodes],
            [value.name for value, result in chosen.results if result.kind != "state"],
            states | {home.name: value.name for home, value in chosen.sums.items()},
            {value.name: home.name for value, home in chosen.replaced.items()},
        )
