"""Give the parts of a program as functions: of this rank of real processes, or of a simulated rank.

A part is a phase, all of the program, or a part of a rotated program (``scheduling.programs.run_parts``). Its function
takes a list of values that it empties, and returns a list. It is a generator: a simulated rank stops at each collective
until the others have arrived, a real one never stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.streams import Groups
from autopar.ir.value_names import SCALE, sums_in
from autopar.pipeline import Task
from autopar.runtime import anomaly, current_op
from autopar.runtime.anomaly import Hunt, Watched
from autopar.runtime.lowering.lower import Lowered, lower_function
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.recording import recorder
from autopar.runtime.simulation.in_flight import InFlight, Instruction
from autopar.runtime.simulation.simulate import Values, run_rank
from autopar.runtime.wire.pacing import pacing_of
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.functions import Function, functions_of, stages_in
from autopar.scheduling.programs.run_parts import PIECES, RunPart, part_of

Running = Generator[Any, Any, list[torch.Tensor]]
Where = Task | str  # a pass of a slot, or what runs outside of slots, in words


@dataclass(frozen=True)
class PartFunction:
    """One part of a program, as a function: of the values that it takes to those that it gives."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def __call__(self, boxed: list[Any], where: Where) -> Running:
        """Run on the values of ``takes``, which are emptied; the result has those of ``gives``.

        Args:
            where: the pass that it is, in errors.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A program that a timetable names, for all ranks.

    Attributes:
        program: the explicit program.
        local: the scheduled program of each rank.
        returns: what the values are called that it returns, in its order; ``None``: ``output.0``, ….
        written: the states that it may overwrite besides sums, by the user's names.
        sent_back: the values that go to the stage before behind the backward.
        handed_sums: placeholder of a sum → the value that it becomes, in the first part of a rotated program.
        of_stage: whether it is the program of one stage, so that ranks of other stages run others meanwhile, and its
            slots have times of their own.
        stage: that stage, of a program with several; empty of a program that has no other.
    """

    program: Program
    local: Mapping[int, Program]
    returns: Sequence[str] | None = None
    written: Collection[str] = ()
    sent_back: Collection[str] = ()
    handed_sums: Mapping[str, str] = field(default_factory=dict)
    of_stage: bool = False
    stage: str = ""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks that run it."""
        mesh = self.program.stages.get(self.stage) or self.program.mesh
        assert mesh is not None
        return mesh

    @property
    def placeholders(self) -> list[fx.Node]:
        """Its placeholders, or those of the stage that is meant."""
        nodes = self.program.placeholders
        return [node for node in nodes if tensor_type(node).mesh.name == self.stage] if self.stage else list(nodes)

    @cached_property
    def donated(self) -> list[str]:
        """The placeholders that it may overwrite."""
        names = sums_in(self.program) | frozenset(self.written)
        return [node.name for node in self.placeholders if name_of(node) in names]

    @cached_property
    def sums(self) -> list[str]:
        """Those of them that may begin as zeros."""
        names = sums_in(self.program)
        return [node.name for node in self.placeholders if name_of(node) in names]

    @cached_property
    def is_scaled(self) -> bool:
        """Whether gradients are multiplied by a scale, with which they may overflow."""
        return SCALE in {name_of(node) for node in self.program.placeholders}


class Functions:
    """The functions of a program on one rank.

    Args:
        placed: the program.
        rank: the rank.
    """

    every_member = False  # of a message that crosses the end of a run; else the first is passed for all

    def __init__(self, placed: PlacedProgram, rank: int) -> None:
        self.placed, self.rank, self.local = placed, rank, placed.local[rank]
        self._made: dict[tuple[str, bool, bool], PartFunction | None] = {}

    def part(self, part: str, zeros: bool = False) -> PartFunction | None:
        """Return the function of a part; ``None`` if the program has no such phase.

        Args:
            zeros: whether the sums begin in this call, as zeros. Those that it does not take are not passed.
        """
        key = (part, zeros, anomaly.is_on())
        if key not in self._made:
            is_there = part in PIECES or part in self.phases
            self._made[key] = self._function(self.nodes_of(part), zeros) if is_there else None
        return self._made[key]

    def nodes_of(self, part: str) -> Function:
        """Return which nodes of the program a part has, and what these take and give."""
        if part not in PIECES:
            return self.phases[part]
        placed = self.placed
        return part_of(
            self.local, cast(RunPart, part), placed.handed_sums, placed.program, every_member=self.every_member
        )

    def _function(self, function: Function, zeros: bool) -> PartFunction:
        raise NotImplementedError

    @cached_property
    def stages(self) -> dict[str, str]:
        """Node → its stage, in a program that has several."""
        return stages_in(self.placed.program, self.local) if self.placed.stage else {}

    @cached_property
    def phases(self) -> dict[str, Function]:
        """Phase → the part of the program that it is. Linear in the graph."""
        functions = functions_of(self.local, False, self.stages)
        return {function.phases[0]: function for function in functions if function.stage == self.placed.stage}

    @cached_property
    def hunt(self) -> Hunt:
        """What looks for NaN in it."""
        return Hunt(self.local, scaled=self.placed.is_scaled)


@dataclass(frozen=True)
class Lowering:
    """How a rank lowers its programs.

    Attributes:
        groups: the names of the process groups.
        device: the device of its values.
        gate: called before the first collective of each function.
        regions: compiles its functions.
        offloaded: whether the optimizer's state is in host memory.
    """

    groups: Groups
    device: torch.device
    gate: Callable[[], None] | None = None
    regions: Regions | None = None
    offloaded: bool = False


@dataclass(frozen=True)
class _LoweredPart(PartFunction):
    """A generated function of a local program; ``hunt``: what looks for NaN in it."""

    local: Program
    lowered: Lowered
    hunt: Hunt | None
    gate: Callable[[], None] | None
    of_stage: bool

    def __call__(self, boxed: list[Any], where: Where) -> Running:
        current_op.tick()
        if self.hunt is not None:
            _enter(self.hunt, where)
        record = recorder()
        if record is None or (self.of_stage and not record.in_slots):
            results = self.lowered.run(boxed)
        else:
            results = record.run(self.local, self.lowered, boxed)
        if self.gate is not None:
            self.gate()  # also where it has no collective
        return results
        yield  # it is a generator that does not stop


class LoweredFunctions(Functions):
    """The functions of a scheduled program on this rank of real processes. ``how``: how it is lowered."""

    def __init__(self, placed: PlacedProgram, rank: int, how: Lowering) -> None:
        super().__init__(placed, rank)
        self._how = how

    def _function(self, function: Function, zeros: bool) -> PartFunction:
        hunt = self.hunt if anomaly.is_on() else None
        lowered, gate, of_stage = self.lowered(function, zeros, hunt), self._how.gate, self.placed.of_stage
        return _LoweredPart(lowered.takes, lowered.gives, self.local, lowered, hunt, gate, of_stage)

    def lowered(self, function: Function, zeros: bool, hunt: Hunt | None = None) -> Lowered:
        """Return the generated function of a part."""
        how, placed = self._how, self.placed
        empty = placed.sums if zeros else ()
        donated = Donated.of(self.local, placed.donated, empty, how.offloaded)
        pacing = pacing_of(placed.program, [name_of(node) for node in self.local.placeholders if node.name in empty])
        return lower_function(
            function, self.local, how.groups, how.device, donated, hunt, how.regions, how.gate, pacing
        )


@dataclass(frozen=True)
class _SimulatedPart(PartFunction):
    """The instructions of a part; ``replaced``: next value of a state that another part computes → the state."""

    code: list[Instruction]
    replaced: Mapping[str, str]
    functions: SimulatedFunctions

    def __call__(self, boxed: list[Any], where: Where) -> Running:
        values: Values = dict(zip(self.takes, boxed, strict=True))
        boxed.clear()
        values |= {value: values[home] for value, home in self.replaced.items() if home in values}
        if anomaly.is_on():
            hunt = self.functions.hunt
            _enter(hunt, where)
            values = Watched(values, hunt)
        during = slot_of(where) if isinstance(where, Task) else ""
        own = self.functions
        yield from run_rank(self.code, values, own.local.meshes, own.rank, own.in_flight, during)
        return [values[name] for name in self.gives]


class SimulatedFunctions(Functions):
    """The functions of a local or scheduled program on a simulated rank.

    Args:
        code: the instructions of all of it, which ranks of one class share.
        in_flight: what is under way between the ranks.
    """

    every_member = True  # each has a ticket of its own

    def __init__(self, placed: PlacedProgram, rank: int, code: Sequence[Instruction], in_flight: InFlight) -> None:
        super().__init__(placed, rank)
        self._code, self.in_flight = code, in_flight

    def _function(self, function: Function, zeros: bool) -> PartFunction:
        nodes = set(function.nodes)
        takes = tuple(node.name for node in function.takes if not (node.op == "get_attr" and node in nodes))
        code = [step for step in self._code if step.node in nodes]
        replaced = {value.name: home.name for value, home in function.replaced.items()}
        return _SimulatedPart(takes, tuple(node.name for node in function.gives), code, replaced, self)


def slot_of(task: Task) -> str:
    """Return what errors call the slot of a pass: ``BW03 of stage 1 (micro-batch 3)``."""
    return f"{task.where} (micro-batch {task.batch})"


def _enter(hunt: Hunt, where: Where) -> None:
    if isinstance(where, Task):
        hunt.enter(slot_of(where), where.batch)
    else:
        hunt.during = where
        hunt.enter("", -1)
