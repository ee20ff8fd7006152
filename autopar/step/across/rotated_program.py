"""Rotate a step: write one program that finishes the step before, and runs this one up to the cut (``cut``).

Here the reduction of a gradient crosses. In the rotated program it stands where its result is read, in the phase
``finish``, and its operand is a state that the run before has computed:

    micro:                                                   w : f32[8 4] = state(sgd, 'w')
      w : f32[8 4] = param                                   w_before : f32[8 4] +dp = state(w_grad_sum, 'w.before')
      …                                                      …
      backward:                                              finish:
        w_grad_sum : f32[8 4] +dp = add.Tensor(w_grad, mm) →   w_grad_dp : f32[8 4] = all_reduce(w_before, dp)
    update:                                                    sgd : f32[8 4] = autopar::sgd(w, w_grad_dp, lr_0, …)
      w_grad_dp : f32[8 4] = all_reduce(w_grad, dp)          forward:
      sgd : f32[8 4] = autopar::sgd(w, w_grad_dp, lr_0, …)     … = … sgd …
                                                             backward:
                                                               w_grad_sum : f32[8 4] +dp = add.Tensor(w_grad, mm)

The schedule of the program starts such a collective in the run before, as soon as its operand is computed (software
pipelining: Lam, PLDI 1988).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import name_of, operands, record_of, set_record, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement
from autopar.ir.value_names import copy_name, next_values_by_name, sums_in
from autopar.scheduling.programs.functions import runs
from autopar.step.across.cut import Cut
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.compiling.hoisted_counts import hoist_counts
from autopar.torch_private import aten

ADD = aten.add.Tensor


@dataclass(frozen=True)
class Rotated:
    """A rotated step.

    Attributes:
        program: explicit; its phase ``finish`` completes the step before.
        crossing: the names of the collectives that are started in the run before.
        sums: placeholder of a sum of gradients or losses → the value that it becomes in a micro-batch.
    """

    program: Program
    crossing: tuple[str, ...]
    sums: Mapping[str, str]


def rotate(micro: Program, update: Program, cut: Cut, counts: Sequence[str] = ()) -> Rotated:
    """Return the rotated step of two explicit programs. Linear in both.

    Where ``micro`` takes a low-precision copy in the place of a parameter ``w``, ``update`` makes it as the state
    ``w.copy``.

    Args:
        counts: the names of the first values that ``micro`` returns, the counts of all micro-batches. They are states.
    """
    return _Rotation(micro, update, cut, counts).run()


class _Rotation:
    """Writes a rotated step.

    Attributes:
        homes: name → placeholder of the rotated step. Of a value that several stages have, the name has the stage.
        nexts: name of a state → its next value, so far.
        names: placeholder of both programs → its name in the rotated step.
        counted: name of a count → the value of ``micro``.
        needs: value → the layout and the dtype that its home requires.
        befores: value that is handed to the next run → the placeholder with the value of the run before.
    """

    def __init__(self, micro: Program, update: Program, cut: Cut, counts: Sequence[str]) -> None:
        self.micro, self.update, self.cut = micro, update, cut
        self.counted = dict(zip(counts, operands(micro.output), strict=False))
        self.builder = GraphBuilder(torch.device("cpu"))
        self.nexts: dict[str, fx.Node] = {}
        self.needs: dict[fx.Node, Requirement | None] = {}
        self.returned: list[fx.Node] = []
        self.crossing: list[fx.Node] = []
        self.sums = next_values_by_name(micro)
        self.names = _names(micro, update)
        unused = {self.names[home] for home in cut.moved}
        records = {name: record_of(node) for node, name in self.names.items()}
        records |= {name: Record(record_of(value).type, role="state") for name, value in self.counted.items()}
        self.roles = {name: record.role for name, record in records.items()}
        self.homes = {
            name: self.builder.placeholder(_name(name), record._replace(name=_name(name)))
            for name, record in records.items()
            if name not in unused
        }
        self.befores = {value: self._before(value, name) for value, name in cut.handed.items()}

    def _before(self, value: fx.Node, name: str) -> fx.Node:
        source = operands(self.cut.moved[value])[0] if value in self.cut.moved else value
        return self.builder.placeholder(name, Record(record_of(source).type, role="state", name=name))

    def run(self) -> Rotated:
        update, finish = self.update, self.cut.finish
        values = self._taken(update)
        values |= self.befores
        for home, reduction in self.cut.moved.items():
            values[home] = self._copy(reduction, {operands(reduction)[0]: self.befores[home]}, self.micro, "finish")
        rows = zip(operands(update.output), record_of(update.output).results, strict=True)
        names = {node.name: self.names[node] for node in update.placeholders}
        updated = {value: self.homes[names[result.of]] for value, result in rows if result.kind == "state"}
        finished = {**updated, **values}  # values of the step before that are not in ``finish`` are states now
        self._run(update, [node for node in update.nodes if node in finish], finished, "finish")
        self._results(update, {node: new for node, new in finished.items() if node in finish or node in values})
        in_micro = self._taken(self.micro)
        dropped = {*self.cut.moved.values(), *(self.sums[name_of(home)] for home in self.cut.moved)}
        self._run(self.micro, [node for node in self.micro.nodes if runs(node) and node not in dropped], in_micro)
        self._results(self.micro, in_micro)
        values = self._taken(update)
        self._run(update, [node for node in update.nodes if runs(node) and node not in finish], values)
        self._results(update, values)
        states = {self.homes[name]: self.nexts[name] for name in self.homes if self.roles[name] == "state"}
        for value, before in self.befores.items():
            moved = self.cut.moved.get(value)
            states[before] = handed = values[value] if moved is None else in_micro[operands(moved)[0]]
            self.needs.setdefault(handed, Requirement(tensor_type(before).layout, tensor_type(before).dtype))
        sums = {self.homes[n].name: in_micro[self.sums[n]].name for n in sums_in(self.micro) if n in self.homes}
        return Rotated(self._program(states), tuple(node.name for node in self.crossing), sums)

    def _taken(self, program: Program) -> dict[fx.Node, fx.Node]:
        """Return placeholder of a program → its value here: the latest one of a state."""
        known = {**self.homes, **self.nexts}
        return {node: known[self.names[node]] for node in program.placeholders if self.names[node] in known}

    def _run(self, program: Program, nodes: Sequence[fx.Node], values: dict[fx.Node, fx.Node], phase: str = "") -> None:
        for node in nodes:
            values[node] = new = self._copy(node, values, program, phase)
            if not phase and node.target is transfers.slice and operands(new)[0] in self.crossing:
                values[node] = self._own(new)

    def _own(self, piece: fx.Node) -> fx.Node:
        """Copy a piece of a gathered parameter, so that the update may write to it: the step returns the whole."""
        new: fx.Node = self.builder.inline(aten.clone.default, piece, name=f"{piece.name}_own")
        type = tensor_type(piece)
        set_record(new, record_of(piece)._replace(uses=(Requirement(type.layout, type.dtype),)))
        return new

    def _copy(self, node: fx.Node, values: Mapping[fx.Node, fx.Node], program: Program, phase: str) -> fx.Node:
        new = self.builder.copy(node, values, program.constants)
        if phase:
            set_record(new, record_of(new)._replace(phase=phase))
            if node in self.cut.crossing:
                self.crossing.append(new)
        return new

    def _results(self, program: Program, values: Mapping[fx.Node, fx.Node]) -> None:
        """Take over the results of a program whose values are computed."""
        about = record_of(program.output)
        names = {node.name: self.names[node] for node in program.placeholders}
        uses = about.uses or (None,) * len(about.results)
        counts = {value: name for name, value in self.counted.items()} if program is self.micro else {}
        for value, result, need in zip(operands(program.output), about.results, uses, strict=True):
            if value in counts:
                self.nexts[counts[value]] = values[value]
                self.needs[values[value]] = need
                continue
            if value not in values or (result.kind == "state" and names[result.of] in self.nexts):
                continue
            if result.kind == "state":
                self.nexts[names[result.of]] = values[value]
                self.needs[values[value]] = need
            elif values[value].op != "placeholder":  # the step before has returned it
                self.returned.append(values[value])
                self.needs[values[value]] = need

    def _program(self, states: Mapping[fx.Node, fx.Node]) -> Program:
        micro, update = self.micro, self.update
        self.builder.arrange(hoist_counts)
        tree = None if micro.tree and update.tree else micro.tree or update.tree
        program = self.builder.program(self.returned, states, tree)
        needs = tuple(self.needs.get(value) for value in operands(program.output))
        set_record(program.output, record_of(program.output)._replace(uses=needs))
        program.level, program.mesh, program.stages = micro.level, micro.mesh, dict(micro.stages)
        return program


def _names(micro: Program, update: Program) -> dict[fx.Node, str]:
    """Map the placeholders of both programs to their names in the rotated step."""
    names = {node: _key(node) for node in update.placeholders}
    types = {name: record_of(node).type for node, name in names.items()}
    of_micro = {}
    for node in micro.placeholders:
        name = _key(node)
        is_copy = copy_name(name) in types and types.get(name) != record_of(node).type
        of_micro[node] = copy_name(name) if is_copy else name
    return {**of_micro, **names}


def _key(node: fx.Node) -> str:
    """Return what tells a placeholder from others: its name, and its stage if it is on one."""
    stage = tensor_type(node).mesh.name
    return name_of(node) if stage is None else f"{name_of(node)}@{stage}"


def _name(key: str) -> str:
    return key.partition("@")[0]
