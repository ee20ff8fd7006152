"""Cut the traced program of a micro-batch into one program for each stage.

    micro                                               stage 1
      x : f32[8 4] = input                                add : f32[8 4] = input('.received.add')
      w : f32[4 4] = param                                w : f32[4 4] = param
      w_grad : f32[4 4] = state(w_grad_sum, 'w.grad')     w_grad : f32[4 4] = state(w_grad_sum, 'w.grad')
      forward:                                            d_mm : f32[8 4] = tangent(0)
        …                           stage 0         →     forward:
        add : f32[8 4] = …          stage 0                 mm : f32[8 4] = mm(add, w)
        mm : f32[8 4] = mm(add, w)  stage 1               backward:
        …                           stage 2                 mm_2 : f32[8 4] = mm(d_mm, t)
      backward:                                             mm_3 : f32[4 4] = mm(t_1, d_mm)
        …                           stage 2                 w_grad_sum : f32[4 4] = add.Tensor(w_grad, mm_3)
        mm_2 : f32[8 4] = …         stage 1                 return (mm,)
        mm_3 : f32[4 4] = …         stage 1                 grad add = mm_2
        …                           stage 0

The program of a stage is that of a call: it takes values from the stage before and their gradients from the stage behind,
and returns its own. So the passes, ZeRO and recomputation see nothing new. A value that is read further on is returned
by each stage between, and its gradient comes back the same way.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.nodes import name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record
from autopar.ir.value_names import LOSS, gradient_name, gradient_parameter, received_name
from autopar.step.compiling.graph_builder import GraphBuilder, type_of
from autopar.step.pipelined.cutting.assignment import Assignment
from autopar.step.pipelined.cutting.gradient_parts import Part, emit, gradient_parts
from autopar.torch_private import aten


@dataclass(frozen=True)
class StageProgram:
    """The traced program of one stage.

    Attributes:
        program: the program.
        up: the values that the stage sends to the next one, in order: name of the value → its position among the
            returned ones.
        down: the values that the stage sends to the one before: name of the value in the backward → the placeholder
            whose gradient it is, or in which it came from behind; or its position among the returned values.
        from_before: name of a value of the stage before → its placeholder.
        from_behind: name of a value of the stage behind → its placeholder.
        gradients: the names of the parameters whose gradients add up here.
        has_loss: whether the losses add up here.
        outputs: position among the values that the whole program returns → position among those of the stage.
    """

    program: Program
    up: Mapping[str, int]
    down: Mapping[str, str | int]
    from_before: Mapping[str, str]
    from_behind: Mapping[str, str]
    gradients: tuple[str, ...]
    has_loss: bool
    outputs: Mapping[int, int] = field(default_factory=dict)


@dataclass
class CrossingValues:
    """The values that cross each boundary: number ``b`` is between the stages ``b`` and ``b + 1``."""

    up: list[list[fx.Node]] = field(default_factory=list)
    down: list[list[fx.Node]] = field(default_factory=list)


def crossing_values(program: Program, assignment: Assignment, dissolved: set[fx.Node]) -> CrossingValues:
    """Return the values that cross each boundary, in the order of the program. Linear in the graph."""
    boundaries = range(assignment.stages - 1)
    crossing = CrossingValues([[] for _ in boundaries], [[] for _ in boundaries])
    for node in program.nodes:
        if node not in assignment.stage or node in dissolved:
            continue
        at = assignment.stage[node]
        read = [assignment.stage[user] for user in node.users if user in assignment.stage and user not in dissolved]
        for boundary in range(at, max(read, default=at)):
            crossing.up[boundary].append(node)
        for boundary in range(min(read, default=at), at):
            crossing.down[boundary].append(node)
    return crossing


def cut_program(program: Program, assignment: Assignment, device: torch.device) -> list[StageProgram]:
    """Cut a traced micro-batch into the programs of its stages. Linear in the graph, for each stage."""
    rows = list(zip(operands(program.output), record_of(program.output).results, strict=True))
    homes = {node.name: node for node in program.placeholders}
    states = {homes[result.of]: node for node, result in rows if result.kind == "state"}
    parameters = {gradient_name(name_of(n)) for n in program.placeholders if record_of(n).role == "param"}
    dissolved: set[fx.Node] = set()
    sums: dict[fx.Node, dict[int, Part]] = {}
    for home, value in states.items():
        if name_of(home) in parameters:
            (gradient,) = (operand for operand in operands(value) if operand is not home)
            sums[home] = gradient_parts(gradient, assignment.stage, dissolved)
            dissolved.add(value)
    others = {home: value for home, value in states.items() if home not in sums}
    outputs = [node for node, result in rows if result.kind == "return"]
    crossing = crossing_values(program, assignment, dissolved)
    return [
        _Stage(program, assignment, device, stage, crossing, dissolved, sums, others, outputs).run()
        for stage in range(assignment.stages)
    ]


class _Stage:
    """Builds the program of one stage."""

    def __init__(
        self,
        program: Program,
        assignment: Assignment,
        device: torch.device,
        stage: int,
        crossing: CrossingValues,
        dissolved: set[fx.Node],
        sums: Mapping[fx.Node, Mapping[int, Part]],
        states: Mapping[fx.Node, fx.Node],
        outputs: Sequence[fx.Node],
    ) -> None:
        self.program, self.stage, self.builder = program, stage, GraphBuilder(device)
        last = assignment.stages - 1
        self.before, self.gradients_before = (crossing.up[stage - 1], crossing.down[stage - 1]) if stage else ([], [])
        self.behind, self.gradients_behind = (crossing.up[stage], crossing.down[stage]) if stage < last else ([], [])
        self.own = {node for node, at in assignment.stage.items() if at == stage and node not in dissolved}
        self.anywhere = assignment.anywhere
        self.sums = {home: parts[stage] for home, parts in sums.items() if stage in parts}
        self.states = {home: value for home, value in states.items() if self._makes(value)}
        self.outputs = {k: node for k, node in enumerate(outputs) if self._makes(node)}
        self.values: dict[fx.Node, fx.Node] = {}

    def _makes(self, value: fx.Node) -> bool:
        """Return whether a result is made here; what all stages can make is made on the first one."""
        return value in self.own or (self.stage == 0 and (value in self.anywhere or value.op == "placeholder"))

    def run(self) -> StageProgram:
        needed = self._needed()
        from_before, from_behind = self._placeholders(needed)
        sums = {
            home: self.builder.placeholder(home.name, record_of(home)._replace(name=name_of(home)))
            for home in self.sums
        }
        self._seeds(needed)
        tangents = self._tangents()
        from_behind |= {node.name: placeholder.name for node, placeholder in tangents.items()}
        self.values |= {node: placeholder for node, placeholder in tangents.items()}
        at_sums = self._places_of_sums()
        next_values: dict[fx.Node, fx.Node] = {}
        for node in self.program.nodes:
            if node.op != "placeholder" and (node in self.own or node in needed):
                self.values[node] = self.builder.copy(node, self.values, self.program.constants)
            for home in at_sums.get(node, ()):
                next_values[sums[home]] = self._added(home, sums[home])
        next_values |= {self.values[home]: self.values[value] for home, value in self.states.items()}
        return self._finish(next_values, from_before, from_behind)

    def _needed(self) -> set[fx.Node]:
        """Return what this stage reads: ops that run on any stage, and placeholders."""
        needed: set[fx.Node] = set()
        open_ = [value for node in self.own for value in operands(node)]
        open_ += [value for part in self.sums.values() for value in _values_of(part)]
        open_ += [node for home, value in self.states.items() for node in (home, value)]
        open_ += self.outputs.values()
        # a parameter also where only its gradient is made here, as that of one without elements
        sums = {name_of(home) for home in self.sums}
        open_ += [node for node in self.program.placeholders if gradient_name(name_of(node)) in sums]
        while open_:
            node = open_.pop()
            if node in needed or node in self.own:
                continue
            if node in self.anywhere:
                open_ += operands(node)
            elif node.op not in ("placeholder", "get_attr"):
                continue  # it is received
            needed.add(node)
        return needed

    def _placeholders(self, needed: set[fx.Node]) -> tuple[dict[str, str], dict[str, str]]:
        """Write the placeholders but sums, seeds and tangents; return those of received values."""
        for node in self.program.placeholders:
            if node in needed and node not in self.sums and record_of(node).role != "seed":
                self.values[node] = self.builder.placeholder(node.name, record_of(node)._replace(name=name_of(node)))
        matched = self._matched(self.behind, self.gradients_behind)
        from_before = {node.name: self._received(node) for node in self.before}
        from_behind = {node.name: self._received(node) for node in self.gradients_behind if node not in matched}
        return from_before, from_behind

    def _received(self, node: fx.Node) -> str:
        placeholder = self.builder.placeholder(
            node.name, Record(type_of(node), role="input", name=received_name(node.name))
        )
        self.values[node] = placeholder
        return placeholder.name

    def _seeds(self, needed: set[fx.Node]) -> None:
        for node in self.program.placeholders:
            if node in needed and record_of(node).role == "seed":
                self.values[node] = self.builder.placeholder(node.name, record_of(node))

    def _tangents(self) -> dict[fx.Node, fx.Node]:
        """Write a tangent for each gradient of a value that is sent: value of the stage behind → placeholder."""
        matched = self._matched(self.behind, self.gradients_behind)
        return {
            gradient: self.builder.placeholder(
                gradient.name, Record(type_of(gradient), role="tangent", index=self.behind.index(value))
            )
            for gradient, value in matched.items()
        }

    @staticmethod
    def _matched(values: Sequence[fx.Node], gradients: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Match gradients that come back to values that were sent, by their types: gradient → value."""
        left = list(values)
        matched = {}
        for gradient in gradients:
            value = next((v for v in left if type_of(v) == type_of(gradient)), None)
            if value is not None and record_of(gradient).phase != "forward":
                matched[gradient] = value
                left.remove(value)
        return matched

    def _places_of_sums(self) -> dict[fx.Node, list[fx.Node]]:
        """Return where each part is added to its sum: behind the last of its values."""
        place = {node: k for k, node in enumerate(self.program.nodes)}
        at: dict[fx.Node, list[fx.Node]] = {}
        for home, part in self.sums.items():
            at.setdefault(max(_values_of(part), key=place.__getitem__), []).append(home)
        return at

    def _added(self, home: fx.Node, sum: fx.Node) -> fx.Node:
        def copy(node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
            return self.builder.copy(node, values, self.program.constants)

        part = self.sums[home]
        record = record_of(part.node)
        self.builder.phase, self.builder.about = record.phase, record
        added = emit(part, self.values, copy)
        return self.builder.inline(aten.add.Tensor, sum, added, name=f"{home.name}_sum")

    def _finish(
        self, next_values: Mapping[fx.Node, fx.Node], from_before: dict[str, str], from_behind: dict[str, str]
    ) -> StageProgram:
        matched = self._matched(self.before, self.gradients_before)
        # what comes from behind and is no gradient here is sent on as it came; no pass of this stage returns it
        passed_on = set(self.gradients_behind) - matched.keys()
        made = [node for node in self.gradients_before if node not in matched and node not in passed_on]
        returned = [*self.behind, *made]
        outputs = {position: len(returned) + k for k, position in enumerate(self.outputs)}
        gradients = {self.values[value]: self.values[gradient] for gradient, value in matched.items()}
        results = [self.values[node] for node in (*returned, *self.outputs.values())]
        program = self.builder.program(results, next_values, gradients=gradients)
        down: dict[str, str | int] = {
            node.name: self.values[matched.get(node, node)].name
            if node in matched or node in passed_on
            else returned.index(node)
            for node in self.gradients_before
        }
        return StageProgram(
            program,
            {node.name: k for k, node in enumerate(self.behind)},
            down,
            from_before,
            from_behind,
            tuple(parameter for home in self.sums if (parameter := gradient_parameter(name_of(home)))),
            any(name_of(home) == LOSS for home in self.states),
            outputs,
        )


def _values_of(part: Part) -> list[fx.Node]:
    """Return the values that a part is made of."""
    return [part.node] if not part.of else [value for inner in part.of for value in _values_of(inner)]
