"""Run a program without tangents as one function, from pieces by name to pieces by name.

It runs on this rank or on all simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

import torch

from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import Groups
from autopar.ir.value_names import sums_in
from autopar.runtime import anomaly, current_op
from autopar.runtime.anomaly import Hunt, Watched
from autopar.runtime.interface import Interface
from autopar.runtime.lowering.lower import Lowered, lower_whole
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.modes import as_captured
from autopar.runtime.recording import recorder
from autopar.runtime.simulation.simulate import Instruction, Values, compile_whole, run_ranks
from autopar.runtime.spans import span
from autopar.runtime.wire.pacing import Pacing, pacing_of
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.run_parts import RunPart

Pieces = dict[str, torch.Tensor]


class Results:
    """The results of a program, by name.

    Attributes:
        interface: the types of its placeholders, by their names in the program.
        named: the user's name of a placeholder → its name in the program.
        names: the name of a placeholder in the program → the user's name.
        states: name of a state → the name of its next value.
        returned: the names of the returned values.
        sums: the user's names of the states that accumulate gradients and losses over micro-batches.
    """

    def __init__(self, explicit: Program) -> None:
        self.interface = Interface.of(explicit)
        self.named = {name_of(node): node.name for node in explicit.placeholders}
        self.names = {placeholder: name for name, placeholder in self.named.items()}
        self.states = {state: name for state, (name, _) in self.interface.states.items()}
        self.sums = sums_in(explicit)
        self.returned = [name for name, _ in self.interface.returned]

    def of(self, values: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], Pieces]:
        """Return the returned values, and the next values of the states."""
        return [values[name] for name in self.returned], {state: values[name] for state, name in self.states.items()}


class ProcessRun(Results):
    """The program of one rank, as one function.

    Args:
        explicit: the program with Layouts.
        local: the scheduled program of this rank.
        groups: the names of the process groups.
        gate: called before the first collective.
        donated: placeholders whose pieces are donated: results may use their memory.
        scaled: whether gradients are multiplied by a scale, with which they may overflow.
        offloaded: whether the optimizer's state is in host memory.
        part: what of the program runs.
        handed_sums: placeholder of a sum → the value that it becomes, if the part hands sums to another micro-batch.
        regions: compiles the function.
    """

    def __init__(self, explicit: Program, local: Program, groups: Groups,
                 gate: Callable[[], None] | None, device: torch.device, donated: Collection[str] = (),
                 scaled: bool = False, offloaded: bool = False, part: RunPart = "whole",
                 handed_sums: Mapping[str, str] | None = None, regions: Regions | None = None) -> None:  # fmt: skip
        super().__init__(explicit)
        self._part, self._handed_sums, self._regions = part, handed_sums or {}, regions
        self._explicit, self._local, self._groups, self._gate, self._device = explicit, local, groups, gate, device
        self._constants = {name: constant.tensor for name, constant in explicit.constants.items()}
        self._donated = frozenset(donated)
        self._types = {node.name: record_of(node).type for node in local.placeholders}
        self._lowered: dict[tuple[frozenset[str], Hunt | None], Lowered] = {}
        self._scaled, self._offloaded = scaled, offloaded

    @cached_property
    def hunt(self) -> Hunt:
        return Hunt(self._local, scaled=self._scaled)

    def lowered(self, zeros: frozenset[str] = frozenset(), hunt: Hunt | None = None) -> Lowered:
        """Return the function for a call in which the donated placeholders ``zeros`` are zero.

        They are not passed. With ``hunt``, it looks for NaN.
        """
        if (zeros, hunt) not in self._lowered:
            donated = Donated.of(self._local, self._donated, zeros, self._offloaded)
            self._lowered[zeros, hunt] = lower_whole(
                self._local, self._groups, self._gate, self._device, donated, hunt, self._pacing(zeros), self._part,
                self._handed_sums, self._regions,
            )  # fmt: skip
        return self._lowered[zeros, hunt]

    def _pacing(self, zeros: frozenset[str]) -> Pacing | None:
        return pacing_of(self._explicit, [self.names[of] for of in zeros])

    def _zero(self, name: str) -> torch.Tensor:
        type = self._types[name]
        assert isinstance(type, TensorType)
        return torch.zeros(type.shape, dtype=type.dtype, device=self._device)

    def __call__(
        self, values: Pieces, zeros: frozenset[str] = frozenset(), during: str = ""
    ) -> tuple[list[torch.Tensor], Pieces]:
        """Run on this rank's pieces, by placeholder.

        Args:
            values: the pieces of all placeholders but ``zeros``. The call empties it, to free each piece after its last
                reader.
            zeros: donated placeholders that are zero.
            during: the part of the step, for messages about NaN, and for profilers.
        """
        hunt = self.hunt if anomaly.is_on() else None
        if hunt is not None:
            hunt.during = during
        lowered = self.lowered(zeros, hunt)
        boxed: list[Any] = [
            self._constants[n] if n in self._constants else self._zero(n) if n in zeros else values[n]
            for n in lowered.takes
        ]
        values.clear()
        current_op.tick()
        with as_captured(), span(during):
            record = recorder()
            results = lowered.run(boxed) if record is None else record.run(self._local, lowered, boxed)
        if self._gate is not None:
            self._gate()
        return self.of(dict(zip(lowered.gives, results, strict=True)))


class SimulatedRun(Results):
    """The programs of all ranks, simulated in this process."""

    def __init__(self, explicit: Program, local: Mapping[int, Program], scaled: bool = False) -> None:
        super().__init__(explicit)
        self._meshes, self._local, self._scaled = explicit.meshes, local, scaled

    @cached_property
    def code(self) -> dict[int, list[Instruction]]:
        """Rank → its instructions; ranks of one class share them."""
        compiled: dict[int, list[Instruction]] = {}
        for program in self._local.values():
            if id(program.graph) not in compiled:
                compiled[id(program.graph)] = compile_whole(program)
        return {rank: compiled[id(program.graph)] for rank, program in self._local.items()}

    def __call__(self, values: dict[int, Values], during: str = "") -> dict[int, tuple[list[torch.Tensor], Pieces]]:
        """Run on the pieces of each rank, by placeholder. ``during`` as of ``ProcessRun``."""
        if anomaly.is_on():
            values = {
                rank: Watched(pieces, Hunt(self._local[rank], scaled=self._scaled, during=during))
                for rank, pieces in values.items()
            }
        with as_captured():
            run_ranks(self._meshes, self.code, values)
        return {rank: self.of(pieces) for rank, pieces in values.items()}
