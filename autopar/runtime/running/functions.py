"""Give the parts of a program as functions: of this rank of real processes, or of a simulated rank.

A part is a phase, all of the program, or a part of a rotated program (``scheduling.programs.run_parts``). Its function
takes a list of values that it empties, and returns a list. It is a generator: a simulated rank stops at each collective
until the others have arrived, a real one never stops.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import fx

from autopar.ir.nodes import name_of, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import Groups
from autopar.pipeline import Task
from autopar.runtime import anomaly, current_op
from autopar.runtime.anomaly import Hunt, Watched
from autopar.runtime.lowering.lower import Lowered, lower, lower_whole
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.recording import recorder
from autopar.runtime.simulation.simulate import Instruction, Values, run_rank
from autopar.runtime.wire.pacing import pacing_of
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.functions import Function, runs, stages_in
from autopar.scheduling.programs.run_parts import PIECES, RunPart, selected

Running = Generator[Any, Any, list[torch.Tensor]]
Where = Task | str  # a pass of a slot, or what runs outside of slots, in words


class PartFunction(Protocol):
    """One part of a program, as a function."""

    @property
    def takes(self) -> tuple[str, ...]: ...

    @property
    def gives(self) -> tuple[str, ...]: ...

    def __call__(self, boxed: list[Any], where: Where) -> Running:
        """Run on the values of ``takes``, which are emptied; the result has those of ``gives``.

        Args:
            where: the pass that it is, in errors.
        """
        ...


class Functions(Protocol):
    """The functions of one program on one rank."""

    @property
    def local(self) -> Program: ...

    def part(self, part: str, zeros: bool = False) -> PartFunction | None:
        """Return the function of a part; ``None`` if the program has no such phase.

        Args:
            zeros: whether the sums begin in this call, as zeros. Those that it does not take are not passed.
        """
        ...


@dataclass(frozen=True)
class Lowering:
    """How a rank lowers a program.

    Attributes:
        groups: the names of the process groups.
        device: the device of its values.
        gate: called before the first collective of each function.
        regions: compiles its functions.
        donated: placeholders that it may overwrite.
        sums: those of them that begin as zeros.
        scaled: whether gradients are multiplied by a scale, with which they may overflow.
        offloaded: whether the optimizer's state is in host memory.
        handed_sums: placeholder of a sum → the value that it becomes, in the first part of a rotated program.
        of_stage: whether it is the program of one stage, whose slots have times of their own.
        stage: the stage whose functions are meant, of a program with several.
    """

    groups: Groups
    device: torch.device
    gate: Callable[[], None] | None = None
    regions: Regions | None = None
    donated: Collection[str] = ()
    sums: Collection[str] = ()
    scaled: bool = False
    offloaded: bool = False
    handed_sums: Mapping[str, str] = field(default_factory=dict)
    of_stage: bool = False
    stage: str = ""


@dataclass(frozen=True)
class _LoweredPart:
    """A generated function of a local program; ``hunt``: what looks for NaN in it."""

    local: Program
    lowered: Lowered
    hunt: Hunt | None
    how: Lowering

    @property
    def takes(self) -> tuple[str, ...]:
        return self.lowered.takes

    @property
    def gives(self) -> tuple[str, ...]:
        return self.lowered.gives

    def __call__(self, boxed: list[Any], where: Where) -> Running:
        current_op.tick()
        if self.hunt is not None:
            _enter(self.hunt, where)
        record = recorder()
        if record is None or (self.how.of_stage and not record.in_slots):
            results = self.lowered.run(boxed)
        else:
            results = record.run(self.local, self.lowered, boxed)
        if self.how.gate is not None:
            self.how.gate()  # also where it has no collective
        return results
        yield  # it is a generator that does not stop


class LoweredFunctions:
    """The functions of a scheduled program on this rank.

    Args:
        explicit: the program with Layouts.
        local: the scheduled program of this rank.
        how: how it is lowered.
    """

    def __init__(self, explicit: Program, local: Program, how: Lowering) -> None:
        self.local = local
        self._explicit, self._how = explicit, how
        self._phases: dict[tuple[bool, bool], dict[str, Lowered]] = {}
        self._made: dict[tuple[str, bool, bool], _LoweredPart | None] = {}

    @cached_property
    def _hunt(self) -> Hunt:
        return Hunt(self.local, scaled=self._how.scaled)

    def part(self, part: str, zeros: bool = False) -> PartFunction | None:
        key = (part, zeros, anomaly.is_on())
        if key not in self._made:
            lowered = self.lowered(part, zeros)
            hunt = self._hunt if anomaly.is_on() else None
            self._made[key] = None if lowered is None else _LoweredPart(self.local, lowered, hunt, self._how)
        return self._made[key]

    def lowered(self, part: str, zeros: bool) -> Lowered | None:
        """Return the generated function of a part."""
        how, is_hunted = self._how, anomaly.is_on()
        if part not in PIECES and (zeros, is_hunted) in self._phases:
            return self._phases[zeros, is_hunted].get(part)
        hunt, empty = self._hunt if is_hunted else None, how.sums if zeros else ()
        donated = Donated.of(self.local, how.donated, empty, how.offloaded)
        names = [name_of(node) for node in self.local.placeholders if node.name in empty]
        pacing = pacing_of(self._explicit, names)
        if part in PIECES:
            return lower_whole(self.local, how.groups, how.gate, how.device, donated, hunt, pacing,
                               cast(RunPart, part), how.handed_sums, how.regions)  # fmt: skip
        stages = stages_in(self._explicit, self.local) if how.stage else None
        self._phases[zeros, is_hunted] = lower(
            self.local, how.groups, how.gate, how.device, hunt, pacing, donated, how.regions, stages, how.stage
        )
        return self._phases[zeros, is_hunted].get(part)


@dataclass(frozen=True)
class _SimulatedPart:
    """The instructions of a part; ``replaced``: next value of a state that another part computes → the state."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]
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
        yield from run_rank(self.code, values, self.functions.local.meshes, self.functions.rank, during)
        return [values[name] for name in self.gives]


class SimulatedFunctions:
    """The functions of a local or scheduled program on a simulated rank.

    Args:
        local: the program.
        rank: the rank.
        code: the instructions of all of it, which ranks of one class share.
        phases: phase → the part of the program that it is.
        scaled, handed_sums: as of ``Lowering``.
    """

    def __init__(self, local: Program, rank: int, code: Sequence[Instruction], phases: Mapping[str, Function],
                 scaled: bool = False, handed_sums: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.local, self.rank, self._scaled, self._handed_sums = local, rank, scaled, handed_sums or {}
        self._code, self._phases = code, phases
        self._parts: dict[str, PartFunction | None] = {}

    @cached_property
    def hunt(self) -> Hunt:
        return Hunt(self.local, scaled=self._scaled)

    def part(self, part: str, zeros: bool = False) -> PartFunction | None:
        if part not in self._parts:
            self._parts[part] = self._made(part)
        return self._parts[part]

    def _made(self, part: str) -> PartFunction | None:
        if part in PIECES:
            function, replaced = self._whole(cast(RunPart, part))
        elif part in self._phases:
            function, replaced = self._phases[part], {}
        else:
            return None
        nodes = set(function.nodes)
        takes, gives = (tuple(node.name for node in values) for values in (function.takes, function.gives))
        constants = {node.name for node in nodes if node.op == "get_attr"}
        code = [step for step in self._code if step.node in nodes]
        taken = tuple(name for name in takes if name not in constants)
        return _SimulatedPart(taken, gives, code, replaced, self)

    def _whole(self, part: RunPart) -> tuple[Function, dict[str, str]]:
        """Return all of the program, or a part of it. Each member of a message that crosses the end of a run is passed:
        simulated, each has a ticket of its own."""
        chosen = selected(self.local, part, self._handed_sums)
        nodes = [node for node in self.local.nodes if node in chosen.nodes and runs(node)]
        function = Function.of(nodes, [*(value for value, _ in chosen.results), *chosen.sums.values()])
        replaced = {value.name: home.name for value, home in chosen.replaced.items()}
        homes: dict[fx.Node, None] = dict.fromkeys(chosen.replaced.get(value, value) for value in function.takes)
        return Function(function.phases, function.nodes, tuple(homes), function.gives), replaced


def slot_of(task: Task) -> str:
    """Return what errors call the slot of a pass: ``BW03 of stage 1 (micro-batch 3)``."""
    return f"{task.where} (micro-batch {task.batch})"


def _enter(hunt: Hunt, where: Where) -> None:
    if isinstance(where, Task):
        hunt.enter(slot_of(where), where.batch)
    else:
        hunt.during = where
        hunt.enter("", -1)


def zeros_of(local: Program, name: str, device: torch.device) -> torch.Tensor:
    """Return the zeros that a sum begins with on this rank. ``name``: its placeholder."""
    type = next(record_of(node).type for node in local.placeholders if node.name == name)
    assert isinstance(type, TensorType)
    return torch.zeros(type.shape, dtype=type.dtype, device=device)
