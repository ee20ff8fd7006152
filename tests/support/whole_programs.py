"""Run a whole program on all simulated ranks, from pieces by placeholder, without a timetable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.nodes import name_of
from autopar.ir.program import Program
from autopar.ir.value_names import sums_in
from autopar.runtime.interface import Interface
from autopar.runtime.modes import as_captured
from autopar.runtime.simulation.simulate import compile_whole, run_ranks

Pieces = dict[str, torch.Tensor]


class WholeProgram:
    """The programs of all ranks.

    Attributes:
        interface: the types of its placeholders, by their names in the program.
        named: the user's name of a placeholder → its name in the program.
        names: the name of a placeholder in the program → the user's name.
        sums: the user's names of the states that accumulate gradients and losses over micro-batches.
    """

    def __init__(self, explicit: Program, local: Mapping[int, Program]) -> None:
        self.interface = Interface.of(explicit)
        self.named = {name_of(node): node.name for node in explicit.placeholders}
        self.names = {of: name for name, of in self.named.items()}
        self.sums = sums_in(explicit)
        self._meshes, self._local = explicit.meshes, local

    def __call__(self, values: dict[int, dict[str, Any]]) -> dict[int, tuple[list[torch.Tensor], Pieces]]:
        """Run on the pieces of each rank, by placeholder. Returns what each returns, and the next states."""
        with as_captured():
            run_ranks(self._meshes, {rank: compile_whole(self._local[rank]) for rank in values}, values)
        returned = [name for name, _ in self.interface.returned]
        states = {state: name for state, (name, _) in self.interface.states.items()}
        return {
            rank: ([own[name] for name in returned], {state: own[name] for state, name in states.items()})
            for rank, own in values.items()
        }
