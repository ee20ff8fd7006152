"""Carry the runs of ranks: this process is one of them, or this process simulates all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from autopar.errors import SimulationError
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.streams import Groups
from autopar.ir.value_names import SCALE, sums_in
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.modes import as_captured
from autopar.runtime.running.functions import Functions, LoweredFunctions, Lowering, SimulatedFunctions
from autopar.runtime.running.messages import Mail, Messages, Pool, ProcessMessages, SimulatedMessages, connect
from autopar.runtime.running.programs import RankProgram
from autopar.runtime.simulation.in_flight import InFlight
from autopar.runtime.simulation.pieces import agree, cut, join
from autopar.runtime.simulation.simulate import Instruction, compile_whole, run_together
from autopar.scheduling.programs.functions import functions_of, stages_in

Runs = Mapping[int, Generator[Any, Any, None]]
T = TypeVar("T")
Boxes = Mapping[int, dict[str, torch.Tensor]]  # rank → its values


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A program that a timetable names, for all ranks.

    Attributes:
        program: the explicit program.
        local: the scheduled program of each rank.
        returns: what the values are called that it returns.
        written: the states that it may overwrite besides sums, by the user's names.
        sent_back, handed_sums: as of ``RankProgram``.
        of_stage: whether it is the program of one stage, so that ranks of other stages run others meanwhile.
        stage: that stage, of a program with several; empty of a program that has no other.
    """

    program: Program
    local: LocalPrograms | Mapping[int, Program]
    returns: Sequence[str] | None = None
    written: Collection[str] = ()
    sent_back: Collection[str] = ()
    handed_sums: Mapping[str, str] = field(default_factory=dict)
    of_stage: bool = False
    stage: str = ""

    def on(self, rank: int, functions: Callable[[PlacedProgram, int], Functions]) -> RankProgram:
        """Return the program of one rank."""
        return RankProgram(functions(self, rank), self.program, self.returns, self.sent_back, self.handed_sums,
                           self.stage)  # fmt: skip

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


class Carrier(Protocol):
    """Runs the generators of some ranks in this process."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that this process runs."""
        ...

    @property
    def device(self) -> torch.device: ...

    def functions(self, placed: PlacedProgram, rank: int) -> Functions:
        """Return the functions of a program on one of them."""
        ...

    def messages(self, rank: int) -> Messages:
        """Return where a rank sends and receives."""
        ...

    def held(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, TensorType], known: Collection[str], rank: int
    ) -> dict[str, torch.Tensor]:
        """Return a rank's pieces of what stays between steps.

        Args:
            tensors: the tensors of the model and of the optimizer, and numbers, by name.
            types: the global types of what the rank keeps.
            known: the names of what any rank keeps; others are numbers.
        """
        ...

    def write(
        self, full: Mapping[str, torch.Tensor], held: Boxes, types: Mapping[str, TensorType], names: Collection[str]
    ) -> None:
        """Write what the runs have changed back to the tensors of the model and of the optimizer.

        ``names``: of what they may have changed.
        """
        ...

    def run(self, runs: Runs) -> None:
        """Run the generators to their ends."""
        ...

    def settle(self, started: Boxes) -> None:
        """Complete what the latest runs have started and nothing has waited for, where that is no collective's."""
        ...


@dataclass(eq=False)
class ProcessCarrier:
    """Runs one rank on this process.

    Attributes:
        rank: the rank.
        device: the device of its pieces.
        groups: the names of the process groups that there are.
        groups_for: makes those that programs need. All ranks call it alike.
        gate: called before the first collective of each function of programs that all ranks run.
        regions: compiles the functions.
        offloaded: whether the optimizer's state is in host memory.
    """

    rank: int
    device: torch.device
    groups: Groups
    groups_for: Callable[[LocalPrograms], Groups]
    gate: Callable[[], None] | None = None
    regions: Regions | None = None
    offloaded: bool = False

    @property
    def ranks(self) -> Sequence[int]:
        return (self.rank,)

    def functions(self, placed: PlacedProgram, rank: int) -> Functions:
        assert isinstance(placed.local, LocalPrograms)
        groups, gate = (self.groups, None) if placed.of_stage else (self.groups_for(placed.local), self.gate)
        how = Lowering(
            groups, self.device, gate, self.regions, placed.donated, placed.sums, placed.is_scaled, self.offloaded,
            placed.handed_sums, placed.of_stage, placed.stage,
        )  # fmt: skip
        return LoweredFunctions(placed.program, placed.local[rank], how)

    @cached_property
    def _messages(self) -> ProcessMessages:
        connect(self.device)
        return ProcessMessages(self.device, Pool(self.device))

    def messages(self, rank: int) -> Messages:
        return self._messages

    @property
    def pooled(self) -> int:
        """The bytes that stay between steps for messages to be received in."""
        return self._messages.pool.bytes if "_messages" in self.__dict__ else 0

    def held(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, TensorType], known: Collection[str], rank: int
    ) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {
                name: tensor.to_local() if is_dtensor(tensor) else tensor.detach() if tensor.requires_grad else tensor
                for name, tensor in tensors.items()
            }

    def write(
        self, full: Mapping[str, torch.Tensor], held: Boxes, types: Mapping[str, TensorType], names: Collection[str]
    ) -> None:
        """Nothing: runs have written to the tensors themselves."""

    def run(self, runs: Runs) -> None:
        (run,) = runs.values()
        with as_captured():
            to_the_end(run)

    def settle(self, started: Boxes) -> None:
        """Nothing: its collectives are under way."""


@dataclass(eq=False)
class SimulatedCarrier:
    """Runs all ranks of a mesh in this process, on pieces of full tensors.

    Attributes:
        ranks: the ranks.
        device: the device of the tensors.
    """

    ranks: Sequence[int]
    device: torch.device
    _code: dict[int, list[Instruction]] = field(default_factory=dict)  # by graph: ranks of one class share it
    _mail: Mail = field(default_factory=dict)
    _in_flight: InFlight | None = None

    def functions(self, placed: PlacedProgram, rank: int) -> Functions:
        local = placed.local[rank]
        key = id(local.graph)
        if key not in self._code:
            self._code[key] = compile_whole(local)
        stages = stages_in(placed.program, local) if placed.stage else None
        functions = functions_of(local, False, stages)
        phases = {function.phases[0]: function for function in functions if function.stage == placed.stage}
        return SimulatedFunctions(local, rank, self._code[key], phases, placed.is_scaled, placed.handed_sums)

    def messages(self, rank: int) -> Messages:
        return SimulatedMessages(rank, self._mail)

    def held(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, TensorType], known: Collection[str], rank: int
    ) -> dict[str, torch.Tensor]:
        pieces = {name: tensor for name, tensor in tensors.items() if name not in known}
        for name, tensor in tensors.items():
            if (type := types.get(name)) is not None:
                pieces[name] = cut(tensor.detach(), type, type.mesh.coordinates(rank)).clone()
        return pieces

    def write(
        self, full: Mapping[str, torch.Tensor], held: Boxes, types: Mapping[str, TensorType], names: Collection[str]
    ) -> None:
        first = next(iter(held.values()))
        for name, tensor in ((name, full[name].detach()) for name in names if name in full):
            type = types.get(name)
            if type is not None:
                pieces = {rank: own[name] for rank, own in held.items() if rank in type.mesh and name in own}
                tensor.copy_(join(pieces, type, name))
            elif name in first:
                tensor.copy_(first[name])

    def run(self, runs: Runs) -> None:
        self._mail.clear()
        with as_captured():
            self._in_flight = run_together(runs)
        if left := [key for key, box in self._mail.items() if box]:
            raise SimulationError(f"rank {left[0][1]} never receives what rank {left[0][0]} has sent to it")

    def settle(self, started: Boxes) -> None:
        assert self._in_flight is not None
        self._in_flight.complete(started)


def to_the_end(run: Generator[Any, Any, T]) -> T:
    """Run the generator of a real rank, which never stops, and return its result."""
    try:
        next(run)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a real rank waits inside of its calls")


def same_on_all(name: str, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return a number that all ranks have; ``SimulationError`` if they differ by more than rounding."""
    (first_rank, first), *others = values.items()
    for rank, value in others:
        if not agree(first, value):
            raise SimulationError(
                f"rank {rank} has the {name} {value}, and rank {first_rank} has {first}, which should be the same"
            )
    return first
