"""Hold the programs of a pipelined step: those of each stage, and what goes between the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.capture import Captured
from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh, mesh_of_stage
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.transfers import Ends
from autopar.ir.value_names import sums_in, total_name
from autopar.model.stage_homes import StageHomes
from autopar.pipeline import PipelineSchedule
from autopar.report.passes import PassReport
from autopar.runtime.interface import Interface
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.bundles import Crossed
from autopar.scheduling.programs.order import Order
from autopar.step.compiling.compiled_step import MicroBatch, Placed
from autopar.step.compiling.outputs import Output
from autopar.step.compiling.update import Untrained
from autopar.step.pipelined.cutting.stage_programs import StageProgram
from autopar.step.pipelined.placing.joined import stage_name


@dataclass(frozen=True)
class Counting:
    """The programs of the counts that a stage divides by.

    Attributes:
        sums: computes the sums of one micro-batch, from its inputs.
        counts: computes the mean counts, from the sums of all micro-batches.
    """

    sums: Placed
    counts: Placed


@dataclass(frozen=True)
class CutStage:
    """One stage of a program that was cut.

    Attributes:
        number: its number.
        mesh: the mesh of its ranks.
        cut: what the cut says of its program.
        program: its program with the transfers.
    """

    number: int
    mesh: Mesh
    cut: StageProgram
    program: Program

    @cached_property
    def interface(self) -> Interface:
        return Interface.of(self.program)

    @cached_property
    def types(self) -> dict[str, TensorType]:
        """The types of its placeholders, by the user's names."""
        return {name_of(node): tensor_type(node) for node in self.program.placeholders}

    @cached_property
    def input_types(self) -> dict[str, TensorType]:
        """The types of what it reads of a call, by the user's names."""
        return self.types

    @cached_property
    def named(self) -> dict[str, str]:
        """The user's name of each placeholder → its name in the program."""
        return {name_of(node): node.name for node in self.program.placeholders}

    @cached_property
    def parameters(self) -> list[str]:
        """The names of the parameters that it reads."""
        return [name_of(n) for n in self.program.placeholders if record_of(n).role == "param"]

    def sent(self, value: str) -> tuple[str, TensorType]:
        """Return the name and the type of a value that goes to the next stage, as the stage returns it."""
        return self.interface.returned[self.cut.up[value]]

    def sent_back(self, value: str) -> tuple[str, TensorType]:
        """Return the name and the type of a value of the backward that goes to the stage before."""
        where = self.cut.down[value]
        if isinstance(where, str) and where in self.cut.from_behind.values():
            return where, self.interface.types[where]
        return self.interface.gradients[where] if isinstance(where, str) else self.interface.returned[where]


def forward_values(here: CutStage, behind: CutStage) -> list[Crossed]:
    """Return the values that go from a stage to the next one."""
    types = behind.interface.types
    return [Crossed.of(value, here.sent(value)[1], types[behind.cut.from_before[value]]) for value in here.cut.up]


def backward_values(here: CutStage, behind: CutStage) -> list[Crossed]:
    """Return the values that go from a stage back to the one before, ``here``."""
    types = here.interface.types
    return [
        Crossed.of(value, behind.sent_back(value)[1], types[here.cut.from_behind[value]]) for value in behind.cut.down
    ]


def written_buffers(stages: Sequence[CutStage]) -> list[Crossed]:
    """Return the buffers that the forward of one stage writes, as they go to the ranks of each other stage."""
    values = []
    for stage in stages:
        sums = sums_in(stage.program)
        users = {of: name for name, of in stage.named.items()}
        others = dict.fromkeys(other.mesh for other in stages if other.mesh != stage.mesh)
        for of in stage.interface.states:
            if (name := users[of]) not in sums:
                type = stage.types[name]
                ends = (Ends(type.shape, type.placed, layout_of(mesh, type.attr)) for mesh in others)
                values += [Crossed(name, end, type.dtype) for end in ends]
    return values


@dataclass(frozen=True)
class Stage(CutStage):
    """One stage of a pipelined step.

    Attributes:
        micro: the programs of a micro-batch on it.
        counting: the programs of its counts; ``None`` if it divides by none.
    """

    micro: MicroBatch
    counting: Counting | None = None

    @cached_property
    def input_types(self) -> dict[str, TensorType]:
        """The types of what it reads of a micro-batch, by the user's names; its counts may read more."""
        counted = [] if self.counting is None else [*self.counting.sums[0].placeholders]
        if self.counting is not None:
            ends = self.counting.counts[0].placeholders
            totals = {*map(total_name, range(len(ends)))}
            counted += [node for node in ends if name_of(node) not in totals]
        return {**{name_of(node): tensor_type(node) for node in counted}, **self.types}


@dataclass(frozen=True)
class Tied:
    """A parameter that several stages read.

    Attributes:
        name: its name.
        home: the stage that keeps and updates it.
        readers: the other stages, which take a copy when the step begins.
    """

    name: str
    home: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class PipelinedMicro:
    """The programs of a micro-batch on all stages.

    Attributes:
        captured: the call that was captured.
        schedule: the order of the passes, with messages and releases.
        stages: the stages.
        program: the programs of the passes of all stages, joined, in which the messages between stages are lines.
        local: that of each rank.
        tied: the parameters that several stages read.
        homes: the stage that keeps each parameter, by name.
        reports: what each pass did.
        outputs: how the outputs of micro-batches are joined, if the step returns them.
        whole: whether each rank gets all of each output.
        digest: that of the text in which other processes have it; "" if they have not.
        inputs: the names of the inputs in the programs, in the order in which a call passes them.
    """

    captured: Captured
    schedule: PipelineSchedule
    stages: tuple[Stage, ...]
    program: Program
    local: LocalPrograms
    tied: tuple[Tied, ...]
    homes: Mapping[str, int]
    reports: tuple[PassReport, ...]
    outputs: tuple[Output, ...] = ()
    whole: bool = False
    found: None = None
    digest: str = ""
    inputs: tuple[str, ...] = ()

    def order_of(self, stage: int) -> Order:
        """Return the order of the passes of a stage, with its times."""
        assert self.local.order is not None
        order, name = self.local.order, stage_name(stage)
        pairs = zip(order.functions, order.schedules, strict=True)
        own = [(function, made) for function, made in pairs if function.stage == name]
        return Order(tuple(function for function, _ in own), tuple(made for _, made in own), order.source)

    @cached_property
    def parameters(self) -> dict[str, TensorType]:
        """The types of the trained parameters between steps, by the user's names."""
        return {name: type for stage in self.stages for name, type in stage.micro.parameters.items()}

    @cached_property
    def gradients(self) -> dict[str, TensorType]:
        """The types of the sums of their gradients, on their homes."""
        return {name: type for stage in self.stages for name, type in stage.micro.gradients.items()}

    @cached_property
    def states(self) -> dict[str, DistAttr]:
        """The layouts of their optimizer state."""
        return {name: attr for stage in self.stages for name, attr in stage.micro.states.items()}

    @property
    def explicit(self) -> list[Program]:
        """The explicit programs of all stages."""
        programs = [self.program]
        for stage in self.stages:
            programs += [*([stage.micro.copy[0]] if stage.micro.copy else [])]
            if stage.counting is not None:
                programs += [stage.counting.sums[0], stage.counting.counts[0]]
        return programs

    @property
    def untrained(self) -> tuple[Untrained, ...]:
        """The other parameters whose gradients are measured."""
        return tuple(other for stage in self.stages for other in stage.micro.untrained)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """Where each parameter is between steps: the mesh of its home, and its layout there."""
        layouts = {}
        for name, home in self.homes.items():
            stage = self.stages[home]
            type = stage.micro.parameters.get(name) or stage.types.get(name)
            if type is not None:
                layouts[name] = type.placed
        return layouts

    @cached_property
    def stage_homes(self) -> StageHomes:
        """Where the parameters are between steps."""
        mesh = self.program.mesh
        assert mesh is not None
        return StageHomes(mesh, tuple(stage.mesh for stage in self.stages), self.homes, self.layouts)

    @cached_property
    def written_buffers(self) -> list[Crossed]:
        """The buffers that the forward writes, as they go to the ranks of each other stage."""
        return written_buffers(self.stages)

    def forward_values(self, boundary: int) -> list[Crossed]:
        """Return the values that go from stage ``boundary`` to the next one."""
        return forward_values(self.stages[boundary], self.stages[boundary + 1])

    def backward_values(self, boundary: int) -> list[Crossed]:
        """Return the values that go from the stage behind ``boundary`` back to it."""
        return backward_values(self.stages[boundary], self.stages[boundary + 1])


def meshes_of(mesh: Mesh, rank_of: Sequence[int]) -> list[Mesh]:
    """Return the mesh of each stage."""
    positions = {position: mesh_of_stage(mesh, position) for position in set(rank_of)}
    return [positions[position] for position in rank_of]
