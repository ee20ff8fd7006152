"""Give the passes of a stage as functions: on this rank of real processes, or on a simulated rank.

Each phase of a scheduled program is one function, which takes a list of values that it empties, and returns a list. It
is a generator: a simulated rank stops at each collective until the others have arrived, a real one never stops.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import Groups
from autopar.pipeline import Task
from autopar.runtime import anomaly, current_op
from autopar.runtime.anomaly import Hunt, Watched
from autopar.runtime.lowering.lower import Lowered, lower
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.recording import recorder
from autopar.runtime.simulation.simulate import Instruction, Run, Values, compile_phases, run_rank
from autopar.runtime.wire.pacing import pacing_of
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.functions import functions_of

Steps = Generator[Any, Any, list[torch.Tensor]]


class Function(Protocol):
    """One phase of a program, as a function."""

    @property
    def takes(self) -> tuple[str, ...]: ...

    @property
    def gives(self) -> tuple[str, ...]: ...

    def __call__(self, boxed: list[Any], task: Task | None = None) -> Steps:
        """Run on the values of ``takes``, which are emptied; the result has those of ``gives``.

        Args:
            task: the pass that it is, in errors; ``None`` outside of the slots.
        """
        ...


class Functions(Protocol):
    """The functions of one program on one rank."""

    @property
    def local(self) -> Program: ...

    def phase(self, phase: str, zeros: bool = False) -> Function | None:
        """Return the function of a phase; ``None`` if the program has no such phase.

        Args:
            zeros: whether the sums begin in this call, as zeros. Those that it does not take are not passed.
        """
        ...


@dataclass(frozen=True)
class _Lowered:
    """A generated function of a local program; ``hunt``: what looks for NaN in it."""

    local: Program
    lowered: Lowered
    hunt: Hunt | None

    @property
    def takes(self) -> tuple[str, ...]:
        return self.lowered.takes

    @property
    def gives(self) -> tuple[str, ...]:
        return self.lowered.gives

    def __call__(self, boxed: list[Any], task: Task | None = None) -> Steps:
        current_op.tick()
        if self.hunt is not None:
            _enter(self.hunt, task)
        record = recorder()
        if record is not None and record.in_slots:
            return record.run(self.local, self.lowered, boxed)
        return self.lowered.run(boxed)
        yield  # it is a generator that does not stop


class ProcessFunctions:
    """The functions of a scheduled program on this rank.

    Args:
        explicit: the program with Layouts.
        local: the scheduled program of this rank.
        groups: the names of the process groups.
        device: the device of its values.
        donated: placeholders that it may overwrite.
        sums: those of them that begin as zeros.
        scaled: whether gradients are multiplied by a scale, with which they may overflow.
        regions: compiles its functions.
    """

    def __init__(
        self, explicit: Program, local: Program, groups: Groups, device: torch.device, donated: Collection[str],
        sums: Collection[str] = (), scaled: bool = False, regions: Regions | None = None,
    ) -> None:  # fmt: skip
        self.local = local
        self._explicit, self._groups, self._device, self._scaled = explicit, groups, device, scaled
        self._regions = regions
        self._donated, self._sums = tuple(donated), tuple(sums)
        self._made: dict[tuple[bool, bool], dict[str, Function]] = {}

    @cached_property
    def _hunt(self) -> Hunt:
        return Hunt(self.local, scaled=self._scaled)

    def phase(self, phase: str, zeros: bool = False) -> Function | None:
        key = (zeros, anomaly.is_on())
        if key not in self._made:
            donated = Donated.of(self.local, self._donated, self._sums if zeros else ())
            hunt = self._hunt if anomaly.is_on() else None
            phases = lower(
                self.local, self._groups, None, self._device, hunt, pacing_of(self._explicit), donated, self._regions
            )
            self._made[key] = {name: _Lowered(self.local, lowered, hunt) for name, lowered in phases.items()}
        return self._made[key].get(phase)


@dataclass(frozen=True)
class _Simulated:
    """The instructions of a phase."""

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    code: list[Instruction]
    functions: SimulatedFunctions
    rank: int

    def __call__(self, boxed: list[Any], task: Task | None = None) -> Steps:
        values: Values = dict(zip(self.takes, boxed, strict=True))
        boxed.clear()
        if anomaly.is_on():
            _enter(self.functions.hunt, task)
            values = Watched(values, self.functions.hunt)
        during = "" if task is None else slot_of(task)
        run: Run = run_rank(self.code, values, self.functions.local.meshes, self.rank, during)
        yield from run
        return [values[name] for name in self.gives]


class SimulatedFunctions:
    """The functions of a scheduled program on a simulated rank. Arguments are as those of ``ProcessFunctions``."""

    def __init__(self, local: Program, rank: int, scaled: bool = False) -> None:
        self.local, self._rank, self._scaled = local, rank, scaled

    @cached_property
    def hunt(self) -> Hunt:
        return Hunt(self.local, scaled=self._scaled)

    @cached_property
    def _phases(self) -> dict[str, Function]:
        code = compile_phases(self.local)
        phases: dict[str, Function] = {}
        for function in functions_of(self.local, whole=False):
            name = function.phases[0]
            takes, gives = (tuple(node.name for node in nodes) for nodes in (function.takes, function.gives))
            phases[name] = _Simulated(takes, gives, code.get(name, []), self, self._rank)
        return phases

    def phase(self, phase: str, zeros: bool = False) -> Function | None:
        return self._phases.get(phase)


def slot_of(task: Task) -> str:
    """Return what errors call the slot of a pass: ``BW03 of stage 1 (micro-batch 3)``."""
    return f"{task.where} (micro-batch {task.batch})"


def _enter(hunt: Hunt, task: Task | None) -> None:
    if task is None:
        hunt.enter("", -1)
    else:
        hunt.enter(slot_of(task), task.batch)


def zeros_of(local: Program, name: str, device: torch.device) -> torch.Tensor:
    """Return the zeros that a sum begins with on this rank. ``name``: its placeholder."""
    type = next(record_of(node).type for node in local.placeholders if node.name == name)
    assert isinstance(type, TensorType)
    return torch.zeros(type.shape, dtype=type.dtype, device=device)
