"""Take the part of one stage out of an explicit program of all stages, for prices, memory and times.

    program explicit on pp=2 dp=2                            program explicit on dp=2 ranks 2 3
    stage s0 on dp=2
    stage s1 on dp=2 ranks 2 3
      w_grad : f32[4] @s0 = buffer
      b : f32[4/dp] @s1 = buffer                      →        b : f32[4/dp] = buffer
                                                               w_grad_s1_s1 : f32[4/dp] = input
    update:                                                  update:
      w_grad_s1 : f32[4] @s0 = send(w_grad, s1)
      w_grad_s1_s1 : f32[4/dp] @s1 = recv(w_grad_s1, …)
      c : f32[4/dp] @s1 = add.Tensor(b, w_grad_s1_s1)          c : f32[4/dp] = add.Tensor(b, w_grad_s1_s1)
      d : f32[] +dp @s1 = sum(c)                               d : f32[] +dp = sum(c)
      e : f32[] +dp +pp = over_stages([d], f32, …)             e : f32[] +dp = over_stages([d], f32, …)
      e_pp_dp : f32[] = all_reduce(e, (pp, dp))                e_pp_dp : f32[] = all_reduce(e, dp)

What it receives is an input, and what it sends is returned, as stage 0 returns ``w_grad``. What other stages add to a
reduction is left out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.layout import layout_of
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.nodes import operands, record_of, set_record, tensor_type
from autopar.ir.ops.over_stages import OVER_STAGES
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.torch_private import inputs_of


def part_of_stage(program: Program, stage: str) -> Program:
    """Return the part of a stage. Linear in the graph. ``stage``: its name in the program."""
    return _Part(program, stage).run()


class _Part:
    """Copies the values that lie on one stage or on the whole mesh."""

    def __init__(self, program: Program, stage: str) -> None:
        self.program, self.stage = program, stage
        named = program.stages[stage]
        self.mesh = Mesh(dict(named.axes), ranks=named.ranks)
        self.builder = GraphBuilder(torch.device("cpu"))
        self.values: dict[fx.Node, fx.Node] = {}
        self.sent: dict[fx.Node, None] = {}  # ordered

    def run(self) -> Program:
        rows = list(zip(operands(self.program.output), record_of(self.program.output).results, strict=True))
        homes = {node.name: node for node in self.program.placeholders}
        for node in self.program.nodes:
            record = record_of(node)
            if node.op == "output" or not self._is_here(record.type):
                continue
            own = record._replace(type=self._type(record.type), uses=self._uses(node, record))
            if node.op == "placeholder":
                self.values[node] = self.builder.placeholder(node.name, own._replace(name=record.name or node.name))
            elif node.target is transfers.recv:
                self.values[node] = self._received(node, own)
            elif node.target is transfers.send:
                self.sent[self.values[operands(node)[0]]] = None
            else:
                self._copy(node, own)
        states = {
            self.values[homes[result.of]]: self.values[value]
            for value, result in rows
            if result.kind == "state" and homes[result.of] in self.values and value in self.values
        }
        returned = [self.values[value] for value, result in rows if result.kind == "return" and value in self.values]
        returned += [value for value in self.sent if value not in returned]
        part = self.builder.program(returned, states)
        part.level, part.mesh = "explicit", self.mesh
        types = map(tensor_type, operands(part.output))
        uses = tuple(Requirement(type.layout, type.dtype) for type in types)
        set_record(part.output, record_of(part.output)._replace(uses=uses))
        return part

    def _is_here(self, type: ValueType) -> bool:
        types = type if isinstance(type, tuple) else (type,)
        meshes = [part.layout.mesh for part in types if part is not None and part.layout is not None]
        return not meshes or meshes[0].name in (None, self.stage)

    def _received(self, node: fx.Node, record: Record) -> fx.Node:
        """Return a value of another stage as an input; one that was here already as it is."""
        (value,) = operands(operands(node)[0])
        if value in self.values and record_of(self.values[value]).type == record.type:
            return self.values[value]
        return self.builder.placeholder(node.name, Record(record.type, role="input", name=node.name))

    def _copy(self, node: fx.Node, record: Record) -> None:
        if node.target is OVER_STAGES:
            here = [self.values[value] for value in operands(node) if value in self.values]
            if here:
                args = (here, *node.args[1:])
                self.values[node] = self.builder.transfer(node.name, OVER_STAGES, args, {}, record)
            return
        if not all(value in self.values for value in operands(node)):
            return
        if node.target is transfers.all_reduce:
            axes = transfers.axes_of(transfers.arguments(node.target, node.args, node.kwargs)["axis"])
            left = tuple(axis for axis in axes if axis != PIPELINE)
            operand = self.values[operands(node)[0]]
            if left == axes:
                pass
            elif not left:
                self.values[node] = operand
                return
            else:
                args = (operand, left if len(left) > 1 else left[0])
                self.values[node] = self.builder.transfer(node.name, node.target, args, dict(node.kwargs), record)
                return
        new = self.builder.copy(node, self.values, self.program.constants)
        set_record(new, record)
        self.values[node] = new

    def _uses(self, node: fx.Node, record: Record) -> tuple[Requirement | None, ...]:
        """Return what a node requires of the values that are here."""
        values = inputs_of(node) if len(inputs_of(node)) == len(record.uses) else operands(node)[: len(record.uses)]
        return tuple(
            need if need is None else replace(need, layout=tensor_type(self.values[value]).layout)
            for value, need in zip(values, record.uses, strict=True)
            if value in self.values
        )

    def _type(self, type: ValueType) -> ValueType:
        if isinstance(type, tuple):
            return tuple(None if part is None else self._on(part) for part in type)
        return None if type is None else self._on(type)

    def _on(self, type: TensorType) -> TensorType:
        if type.layout is None:
            return type
        pending = tuple(row for row in type.layout.attr.pending if row[0] != PIPELINE)
        return replace(type, layout=layout_of(self.mesh, replace(type.layout.attr, pending=pending)))
