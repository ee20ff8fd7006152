"""Carry the runs of ranks: this process is one of them, or this process simulates all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from autopar.errors import SimulationError
from autopar.ir.record import TensorType
from autopar.ir.streams import Groups
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.regions import Regions
from autopar.runtime.modes import as_captured
from autopar.runtime.running.functions import Functions, LoweredFunctions, Lowering, PlacedProgram, SimulatedFunctions
from autopar.runtime.running.messages import Messages, Pool, ProcessMessages, SimulatedMessages, connect
from autopar.runtime.simulation.in_flight import InFlight, Instruction
from autopar.runtime.simulation.pieces import agree, cut, join
from autopar.runtime.simulation.simulate import compile_whole, run_together

Runs = Mapping[int, Generator[Any, Any, None]]
T = TypeVar("T")
Boxes = Mapping[int, dict[str, torch.Tensor]]  # rank → its values


class Carrier:
    """Runs the generators of some ranks in this process.

    Attributes:
        ranks: the ranks that this process runs.
        device: the device of their pieces, or of the full tensors.
    """

    ranks: Sequence[int]
    device: torch.device

    def functions(self, placed: PlacedProgram, rank: int) -> Functions:
        """Return the functions of a program on one of them."""
        raise NotImplementedError

    def messages(self, rank: int) -> Messages:
        """Return where a rank sends and receives."""
        raise NotImplementedError

    def held(
        self, tensors: Mapping[str, torch.Tensor], types: Mapping[str, TensorType], known: Collection[str], rank: int
    ) -> dict[str, torch.Tensor]:
        """Return a rank's pieces of what stays between steps.

        Args:
            tensors: the tensors of the model and of the optimizer, and numbers, by name.
            types: the global types of what the rank keeps.
            known: the names of what any rank keeps; others are numbers.
        """
        raise NotImplementedError

    def write(
        self, full: Mapping[str, torch.Tensor], held: Boxes, types: Mapping[str, TensorType], names: Collection[str]
    ) -> None:
        """Write what the runs have changed back to the tensors of the model and of the optimizer.

        ``names``: of what they may have changed. Nothing is written where runs write to the tensors themselves.
        """

    def run(self, runs: Runs) -> None:
        """Run the generators to their ends."""
        raise NotImplementedError

    def settle(self, started: Boxes) -> None:
        """Complete what the latest runs have started and nothing has waited for, where that is no collective's."""


@dataclass(eq=False)
class ProcessCarrier(Carrier):
    """Runs one rank on this process.

    Attributes:
        rank: the rank.
        device: the device of its pieces.
        groups: the names of the process groups that there are.
        groups_for: makes those that programs need. All ranks call it alike.
        gate: called before the first message and the first collective of each function, and at its end.
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

    def __post_init__(self) -> None:
        self.ranks = (self.rank,)

    def functions(self, placed: PlacedProgram, rank: int) -> Functions:
        assert isinstance(placed.local, LocalPrograms)
        groups = self.groups if placed.of_stage else self.groups_for(placed.local)
        return LoweredFunctions(placed, rank, Lowering(groups, self.device, self.gate, self.regions, self.offloaded))

    @cached_property
    def _messages(self) -> ProcessMessages:
        connect(self.device)
        return ProcessMessages(self.device, Pool(self.device), self.gate)

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

    def run(self, runs: Runs) -> None:
        (run,) = runs.values()
        with as_captured():
            to_the_end(run)


@dataclass(eq=False)
class SimulatedCarrier(Carrier):
    """Runs all ranks of a mesh in this process, on pieces of full tensors.

    Attributes:
        ranks: the ranks.
        device: the device of the tensors.
    """

    ranks: Sequence[int]
    device: torch.device
    _code: dict[int, list[Instruction]] = field(default_factory=dict)  # by graph: ranks of one class share it
    _in_flight: InFlight = field(default_factory=InFlight)

    def functions(self, placed: PlacedProgram, rank: int) -> Functions:
        local = placed.local[rank]
        key = id(local.graph)
        if key not in self._code:
            self._code[key] = compile_whole(local)
        return SimulatedFunctions(placed, rank, self._code[key], self._in_flight)

    def messages(self, rank: int) -> Messages:
        return SimulatedMessages(rank, self._in_flight)

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
        self._in_flight.clear()
        with as_captured():
            run_together(runs)
        self._in_flight.check_empty()

    def settle(self, started: Boxes) -> None:
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
