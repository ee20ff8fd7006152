"""Join the programs of the stages to one program, in which the messages between stages are lines.

    stage 0 on dp=2                                     program explicit on pp=2 dp=2
      x : f32[8/dp 4] = input                           stage s0 on dp=2
      d_relu : f32[8/dp 4] = tangent(0)                 stage s1 on dp=2 ranks 2 3
    forward:                                              x : f32[8/dp 4] @s0 = input
      relu : f32[8/dp 4] = relu(x)                        w : f32[4 4] @s1 = param
      return (relu,)                             →      forward:
    …                                                     relu : f32[8/dp 4] @s0 = relu(x)
    stage 1 on dp=2 ranks 2 3                             relu_s1 : f32[8/dp 4] @s0 = send(relu, s1)
      relu : f32[8/dp 4] = input('.received.relu')        relu_s1_s1 : f32[8/dp 4] @s1 = recv(relu_s1, s1, splits=…)
      w : f32[4 4] = param                                mm : f32[8/dp 4] @s1 = mm(relu_s1_s1, w)
    forward:                                            backward:
      mm : f32[8/dp 4] = mm(relu, w)                      …

A value that is read further on goes through the stages between. A message is in the phase in which it is received.
Stages on the same ranks exchange no messages: there the first one gives a value the layout of the second one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import fx

from autopar.costs.profile import Profile
from autopar.gc_pause import gc_paused
from autopar.ir import transfers
from autopar.ir.layout import DistAttr, Layout, layout_of
from autopar.ir.mesh import Mesh, stage_name
from autopar.ir.nodes import operands, record_of, set_record, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import PHASES, Record, Requirement, Result, TensorType, ValueType
from autopar.ir.transfers import Ends
from autopar.model.compiled import Compiler
from autopar.report.passes import PassReport
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.lowering.bundles import Crossed
from autopar.scheduling.programs.order import OF_STAGES
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.compiling.part_of_stage import part_of_stage
from autopar.step.pipelined.cutting.stage_programs import StageProgram
from autopar.transitions import transitions
from autopar.verify.levels import verify

FORWARD = PHASES.index("forward")


class PlacedStage(Protocol):
    """What a stage brings: its mesh, what the cut says of it, and its explicit program."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def cut(self) -> StageProgram: ...

    @property
    def program(self) -> Program: ...


def join(compiler: Compiler, stages: Sequence[PlacedStage]) -> tuple[Program, LocalPrograms, list[PassReport]]:
    """Join the programs of stages, and make each rank's program of it. ``compiler``: of the whole mesh."""
    start = time.perf_counter()
    program = join_stages(compiler.mesh, [(stage.mesh, stage.cut, stage.program) for stage in stages])
    ms = (time.perf_counter() - start) * 1e3
    verify(program, "join")
    check_profile(compiler, program)
    local, reports = compiler.localize(program, OF_STAGES)
    return program, local, [PassReport("join", ms), *reports]


def check_profile(compiler: Compiler, program: Program) -> None:
    """Refuse a profile of other programs than the parts of the stages."""
    if isinstance(compiler.figures, Profile):
        for stage in program.stages:
            compiler.figures.rows_of(part_of_stage(program, stage))


def join_stages(mesh: Mesh, parts: Sequence[tuple[Mesh, StageProgram, Program]]) -> Program:
    """Join the explicit programs of stages. Linear in them.

    Args:
        mesh: the whole mesh.
        parts: for each stage its mesh, what the cut says of it, and its explicit program.
    """
    with gc_paused():
        return _Joining(mesh, parts).run()


@dataclass
class _Joining:
    """Copies the programs of stages into one.

    Attributes:
        values: for each stage: node of its program → node of the joined program.
    """

    mesh: Mesh
    parts: Sequence[tuple[Mesh, StageProgram, Program]]
    values: list[dict[fx.Node, fx.Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = GraphBuilder(torch.device("cpu"))
        self.values = [{} for _ in self.parts]
        self.meshes = [
            Mesh(dict(own.axes), ranks=own.ranks, name=stage_name(number))
            for number, (own, *_) in enumerate(self.parts)
        ]
        self.named = [{node.name: node for node in program.nodes} for *_, program in self.parts]
        self.returned = [
            [value for value, result in self._rows(k) if result.kind == "return"] for k in range(len(self.parts))
        ]
        self.gradients = [
            {result.of: value for value, result in self._rows(k) if result.kind == "grad"}
            for k in range(len(self.parts))
        ]

    def _rows(self, stage: int) -> Iterator[tuple[fx.Node, Result]]:
        output = self.parts[stage][2].output
        return zip(operands(output), record_of(output).results, strict=True)

    def run(self) -> Program:
        for stage, (_, cut, program) in enumerate(self.parts):
            received = {*cut.from_before.values(), *cut.from_behind.values()}
            for node in program.placeholders:
                if node.name not in received:
                    record = record_of(node)
                    named = self._on(record, stage)._replace(name=record.name or node.name)
                    self.values[stage][node] = self.builder.placeholder(node.name, named)
        for phase in PHASES:
            numbers = range(len(self.parts))
            for stage in numbers if PHASES.index(phase) <= FORWARD else reversed(numbers):
                self._receive(stage, phase)
                self._copy(stage, phase)
        return self._finish()

    def _receive(self, stage: int, phase: str) -> None:
        """Write the messages that a stage receives in a phase."""
        _, cut, _ = self.parts[stage]
        if phase == "forward" and stage:
            before = self.parts[stage - 1][1]
            for value, placeholder in cut.from_before.items():
                self._message(stage - 1, self.returned[stage - 1][before.up[value]], stage, placeholder, phase)
        if phase == "backward" and stage + 1 < len(self.parts):
            behind = self.parts[stage + 1][1]
            for value, placeholder in cut.from_behind.items():
                self._message(stage + 1, self._sent_back(stage + 1, behind.down[value]), stage, placeholder, phase)

    def _sent_back(self, stage: int, where: str | int) -> fx.Node:
        """Return the value that a stage sends to the one before."""
        if isinstance(where, int):
            return self.returned[stage][where]
        return self.gradients[stage].get(where) or self.named[stage][where]  # or it goes on as it came

    def _message(self, source: int, value: fx.Node, target: int, placeholder: str, phase: str) -> None:
        """Write the send and the receive of a value."""
        sent, there = self.values[source][value], self.named[target][placeholder]
        received = self._on(record_of(there), target).type
        assert isinstance(received, TensorType)
        splits, parts = transfers.flat_splits(received.attr, received.shape)
        about = record_of(value)
        at = Record(tensor_type(sent), phase=phase, module=about.module, source=about.source, call=about.call)
        if self.parts[source][0] == self.parts[target][0]:
            sent = self._relaid(sent, received.attr, at)
            at = at._replace(type=tensor_type(sent))
        name = stage_name(target)
        send = self.builder.transfer(f"{sent.name}_{name}", transfers.send, (sent, name), {}, at)
        kwargs = {"splits": splits} if parts is None else {"splits": splits, "parts": parts}
        recv = self.builder.transfer(
            f"{send.name}_{name}", transfers.recv, (send, name), kwargs, at._replace(type=received)
        )
        self.values[target][there] = recv

    def _relaid(self, value: fx.Node, attr: DistAttr, at: Record) -> fx.Node:
        """Write the transfers that give a value another layout on its stage."""
        type = tensor_type(value)
        for step in transitions(type, replace(type, layout=layout_of(type.mesh, attr))):
            arguments = dict(step.arguments)
            args, kwargs = transfers.call(step.function, value, arguments)
            name = f"{value.name}_{transfers.suffix(arguments)}"
            value = self.builder.transfer(name, step.function, args, kwargs, at._replace(type=step.type))
        return value

    def _copy(self, stage: int, phase: str) -> None:
        _, _, program = self.parts[stage]
        own = self.values[stage]
        for node in program.nodes:
            if node.op in ("call_function", "get_attr") and record_of(node).phase == phase:
                new = self.builder.copy(node, own, program.constants)
                set_record(new, self._on(record_of(node), stage))
                own[node] = new

    def _finish(self) -> Program:
        states, outputs, needs = {}, dict[int, fx.Node](), dict[fx.Node, Requirement | None]()
        for stage, (_, cut, program) in enumerate(self.parts):
            uses = record_of(program.output).uses or [None] * len(operands(program.output))
            for (value, result), need in zip(self._rows(stage), uses, strict=True):
                needs[self.values[stage][value]] = None if need is None else self._need(need, stage)
                if result.kind == "state":
                    home = self.named[stage][result.of]
                    states[self.values[stage][home]] = self.values[stage][value]
            for position, k in cut.outputs.items():
                outputs[position] = self.values[stage][self.returned[stage][k]]
        program = self.builder.program([outputs[position] for position in sorted(outputs)], states)
        record = record_of(program.output)
        set_record(program.output, record._replace(uses=tuple(needs[value] for value in operands(program.output))))
        program.level, program.mesh = "explicit", self.mesh
        program.stages = {mesh.name or "": mesh for mesh in self.meshes}
        return program

    # -- the meshes of the stages by their names -------------------------------------------------------------------

    def _on(self, record: Record, stage: int) -> Record:
        """Return a record whose Layouts are on the stage of the joined program."""
        uses = tuple(None if need is None else self._need(need, stage) for need in record.uses)
        return record._replace(type=self._type(record.type, stage), uses=uses)

    def _type(self, type: ValueType, stage: int) -> ValueType:
        if isinstance(type, tuple):
            return tuple(None if part is None else self._placed(part, stage) for part in type)
        return None if type is None else self._placed(type, stage)

    def _placed(self, type: TensorType, stage: int) -> TensorType:
        return type if type.layout is None else replace(type, layout=self._layout(type.layout, stage))

    def _need(self, need: Requirement, stage: int) -> Requirement:
        return need if need.layout is None else replace(need, layout=self._layout(need.layout, stage))

    def _layout(self, layout: Layout, stage: int) -> Layout:
        return layout_of(self.meshes[stage], layout.attr)


@dataclass(frozen=True)
class StageMessage:
    """A value that one stage sends to another.

    Attributes:
        value: the value, on the stage that sends it.
        received: what it is called where it is received.
        crossed: its Layouts at both ends.
    """

    value: str
    received: str
    crossed: Crossed


def messages_in(program: Program) -> Mapping[tuple[str, str, str], list[StageMessage]]:
    """Return the messages of a joined program, in order: (sender, receiver, phase) → those that go together."""
    found: dict[tuple[str, str, str], list[StageMessage]] = {}
    for node in program.nodes:
        if node.target is not transfers.recv:
            continue
        (send,) = operands(node)
        (value,) = operands(send)
        source, target = tensor_type(value), tensor_type(node)
        crossed = Crossed(value.name, Ends(source.shape, source.placed, target.placed), source.dtype)
        key = (source.mesh.name or "", target.mesh.name or "", record_of(node).phase)
        found.setdefault(key, []).append(StageMessage(value.name, node.name, crossed))
    return found
