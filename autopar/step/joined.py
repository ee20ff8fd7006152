"""Joined: the last micro-batch and the update as one program, so that gradients are reduced while the backward goes on.

    micro:                                                        w : f32[8 4] = state(w_next, 'w')
      w : f32[8 4] = param                                        w_grad : f32[8 4] +dp = buffer('w.grad')
      w_grad : f32[8 4] +dp = state(w_grad_sum, 'w.grad')         …
      …                                                           backward:
      backward:                                                →    mm : f32[8 4] +dp = mm(t, x)
        mm : f32[8 4] +dp = mm(t, x)                                w_grad_sum : f32[8 4] +dp = add.Tensor(w_grad, mm)
        w_grad_sum : f32[8 4] +dp = add.Tensor(w_grad, mm)        update:
    update:                                                         w_grad_sum_dp : f32[8 4] = all_reduce(w_grad_sum, dp)
      w_grad_dp : f32[8 4] = all_reduce(w_grad, dp)                 sgd : f32[8 4] = autopar::sgd(w, w_grad_sum_dp, lr_0, …)
      sgd : f32[8 4] = autopar::sgd(w, w_grad_dp, lr_0, …)

What runs, and in which order, is that of both programs; the reductions of sums stand where the update reads them, and are begun
when a sum has been made (``runtime.buckets``).
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.program import Program, name_of, operands, record_of, set_record
from autopar.record import Requirement
from autopar.step.assembly import Assembly
from autopar.step.copies import COPY


def joined(micro: Program, update: Program) -> Program:
    """Explicit programs as one, which returns what ``update`` does; linear in both.

    A low-precision copy that ``micro`` takes in the place of a parameter is called ``w.copy`` in it.
    """
    made = Assembly(torch.device("cpu"))
    ended = {node: name_of(node) for node in update.placeholders}
    types = {name: record_of(node).type for node, name in ended.items()}
    taken = {node: name_of(node) + COPY * (types.get(name_of(node), record_of(node).type) != record_of(node).type) for node in micro.placeholders}
    roles = {name: record_of(node).role for node, name in (*taken.items(), *ended.items())}
    homes: dict[str, fx.Node] = {}
    for node, name in (*taken.items(), *ended.items()):
        if name not in homes:
            homes[name] = made.placeholder(name, record_of(node)._replace(role=roles[name], name=name))
    nexts: dict[str, fx.Node] = {}
    needs: dict[fx.Node, Requirement | None] = {}
    returned: list[fx.Node] = []
    for program, names in ((micro, taken), (update, ended)):
        values = {node: nexts.get(name, homes[name]) for node, name in names.items()}
        for node in program.nodes:
            if node.op in ("call_function", "get_attr"):
                values[node] = made.copy(node, values, program.constants)
        named = {node.name: name for node, name in names.items()}
        about = record_of(program.output)
        for value, result, need in zip(operands(program.output), about.results, about.uses, strict=True):
            needs[values[value]] = need
            if result.kind == "state":
                nexts[named[result.of]] = values[value]
            else:
                returned.append(values[value])
    states = {home: nexts[name] for name, home in homes.items() if roles[name] == "state"}
    found = made.program(returned, states, update.tree)
    set_record(found.output, record_of(found.output)._replace(uses=tuple(needs[value] for value in operands(found.output))))
    found.level, found.mesh, found.stages = micro.level, micro.mesh, dict(micro.stages)
    return found
