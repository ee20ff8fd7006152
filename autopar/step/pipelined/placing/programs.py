"""Hold the programs of a pipelined step: those of each stage, and what goes between the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch

from autopar.capture import Captured
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh, mesh_of_stage, stage_name
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.value_names import gradient_name, sums_in
from autopar.model.compiled import Compiler
from autopar.model.stage_homes import StageHomes
from autopar.passes import OnStages
from autopar.pipeline import PipelineSchedule
from autopar.report.passes import PassReport
from autopar.runtime.interface import Interface
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.bundles import Crossed
from autopar.scheduling.programs.order import Execution, Order
from autopar.step.compiling.compiled_step import MicroBatch, Placed, StepUpdate
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.compiling.outputs import Output
from autopar.step.compiling.update import Staged, Untrained, UpdateProgram
from autopar.step.pipelined.cutting.stage_programs import StageProgram
from autopar.step.pipelined.placing.joined import StageMessage, messages_in
from autopar.step.pipelined.placing.on_stages import Traced, place_on_stages
from autopar.verify.levels import verify


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


S = TypeVar("S", bound=CutStage)


def place_stages(
    meshes: Sequence[Mesh], parts: Sequence[StageProgram], attrs: Mapping[str, DistAttr],
    place: Callable[[int, Mesh, StageProgram, dict[str, DistAttr]], S],
) -> list[S]:  # fmt: skip
    """Place the stages one after the other: each takes its values in the layouts in which the one before returns them.

    Args:
        meshes: the mesh of each stage.
        parts: the traced program of each.
        attrs: node → its layout, of the nodes that have one before.
        place: places a stage, given its number, its mesh, its part, and the layouts that are known.
    """
    stages: list[S] = []
    for number, (mesh, part) in enumerate(zip(meshes, parts, strict=True)):
        verify(part.program, "cut")
        own = dict(attrs)
        if stages:
            own |= {part.from_before[value]: stages[-1].sent(value)[1].attr for value in part.from_before}
        stages.append(place(number, mesh, part, own))
    return stages


def written_buffers(stages: Sequence[CutStage]) -> list[tuple[CutStage, str]]:
    """Return the buffers that the forward of one stage writes: the stage, and the name."""
    found = []
    for stage in stages:
        sums = sums_in(stage.program)
        users = {of: name for name, of in stage.named.items()}
        found += [(stage, users[of]) for of in stage.interface.states if users[of] not in sums]
    return found


@dataclass(frozen=True)
class Stage(CutStage):
    """One stage of a pipelined step.

    Attributes:
        micro: the programs of a micro-batch on it.
    """

    micro: MicroBatch


@dataclass(frozen=True)
class PipelinedMicro:
    """The programs of a micro-batch on all stages.

    Attributes:
        captured: the call that was captured.
        schedule: the order of the passes, with messages and releases.
        stages: the stages.
        program: the programs of the passes of all stages, joined, in which the messages between stages are lines.
        local: that of each rank.
        around: the programs of all stages around the passes: ``copy`` makes copies of parameters, in low precision or
            for a stage that does not keep them; ``sums`` and ``count`` the counts that losses are divided by, of one
            micro-batch and of all; ``share`` brings outputs and written buffers to all stages.
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
    around: Mapping[str, Placed]
    homes: Mapping[str, int]
    reports: tuple[PassReport, ...]
    outputs: tuple[Output, ...] = ()
    whole: bool = False
    found: None = None
    digest: str = ""
    inputs: tuple[str, ...] = ()

    loss: ClassVar[None] = None  # each stage with a loss has its own

    @property
    def policy(self) -> str:
        """The name of the schedule."""
        return self.schedule.name

    @property
    def staged(self) -> Staged:
        """Where the values of the update are."""
        foreign: dict[str, dict[str, TensorType]] = {}
        for name, home in self.homes.items():
            for stage in self.stages:
                if stage.number != home and (type := stage.types.get(gradient_name(name))) is not None:
                    foreign.setdefault(name, {})[stage_name(stage.number)] = type
        homes = {name: stage_name(home) for name, home in self.homes.items()}
        losses = {stage_name(stage.number): loss for stage in self.stages if (loss := stage.micro.loss) is not None}
        return Staged(self.stages[0].mesh, homes, foreign, losses)

    def place_update(
        self, compiler: Compiler, ending: UpdateProgram, execution: Execution
    ) -> tuple[Placed, list[PassReport]]:
        """Place the update behind the micro-batches, on all stages."""
        traced = Traced(ending.program, ending.constraints, ending.stages)
        own = replace(compiler, whole=False)
        return place_on_stages(own, traced, self.on_stages, self.stages[0].mesh, self.captured.device, execution)

    def turned(self, ending: Program) -> tuple[Program, Program, Sequence[str]]:
        """Return what the rotated step is made of: no micro-batch, which slots run, and the update."""
        nothing = GraphBuilder(torch.device("cpu")).program(())
        nothing.level, nothing.mesh, nothing.stages = ending.level, ending.mesh, dict(ending.stages)
        return nothing, ending, ()

    def ended(self, compiler: Compiler, ending: Placed, execution: Execution) -> tuple[Placed, list[PassReport]]:
        """Return the update alone: slots run the last micro-batch."""
        return ending, []

    def programs(self, update: StepUpdate) -> dict[str, Placed]:
        """Return the programs of a step, by name, in the order in which they run."""
        gathers = {f"gather@{stage.number}": stage.micro.copy for stage in self.stages}
        behind = {name: placed for name, placed in self.around.items() if name == "share"}
        return {
            **{name: placed for name, placed in self.around.items() if name not in behind},
            **{name: placed for name, placed in gathers.items() if placed is not None},
            "micro": (self.program, self.local), **behind, "update": (update.program, update.local),
        }  # fmt: skip

    def running(self, update: StepUpdate, microbatches: int) -> dict[str, tuple[LocalPrograms, int]]:
        """Return the programs that a step runs, by name, in order, and how often each runs."""
        often = {"micro": microbatches, "sums": microbatches}
        found = {name: (local, often.get(name, 1)) for name, (_, local) in self.programs(update).items()}
        if update.crossing:  # the rotated update takes its place
            del found["update"]
            found["turn"] = update.last[1], 1
        return found

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
        gathers = [stage.micro.copy for stage in self.stages if stage.micro.copy is not None]
        return [self.program, *(program for program, _ in (*gathers, *self.around.values()))]

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

    @property
    def on_stages(self) -> OnStages:
        """The whole mesh and its stages."""
        assert self.program.mesh is not None
        return OnStages(self.program.mesh, self.program.stages, {})

    @cached_property
    def stage_homes(self) -> StageHomes:
        """Where the parameters are between steps."""
        mesh = self.program.mesh
        assert mesh is not None
        return StageHomes(mesh, tuple(stage.mesh for stage in self.stages), self.homes, self.layouts)

    @cached_property
    def _messages(self) -> Mapping[tuple[str, str, str], list[StageMessage]]:
        return messages_in(self.program)

    def forward_values(self, boundary: int) -> list[Crossed]:
        """Return the values that go from stage ``boundary`` to the next one."""
        return self._crossed(boundary, boundary + 1, "forward")

    def backward_values(self, boundary: int) -> list[Crossed]:
        """Return the values that go from the stage behind ``boundary`` back to it."""
        return self._crossed(boundary + 1, boundary, "backward")

    def _crossed(self, sender: int, receiver: int, phase: str) -> list[Crossed]:
        messages = self._messages.get((stage_name(sender), stage_name(receiver), phase), ())
        return [message.crossed for message in messages]


def meshes_of(mesh: Mesh, rank_of: Sequence[int]) -> list[Mesh]:
    """Return the mesh of each stage."""
    positions = {position: mesh_of_stage(mesh, position) for position in set(rank_of)}
    return [positions[position] for position in rank_of]
