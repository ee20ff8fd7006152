"""Merge two programs of a step into one, in which collectives begin early.

The last micro-batch and the update are merged, so that gradients are reduced while the backward goes on:

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

The counts and the first of several micro-batches are merged, so that counts are summed over the mesh while the forward
goes on:

    count:                                                        labels_0 : i64[8 16 dp] = input('labels.0')
      …                                                           …
      count : f32[] = div.Scalar(add_dp, 2)                  →    count : f32[] = div.Scalar(add_dp, 2)
    micro:                                                        …
      count_0 : f32[] = input('count.0')                          loss : f32[] +dp = div.Tensor(sum_2, count)
      loss : f32[] +dp = div.Tensor(sum_2, count_0)               backward:
      backward:                                                     …
        …

The merged program has the ops of both. The reduction of a sum of gradients stands where the update reads it; the
schedule starts it earlier (``scheduling.programs``). The reductions of counts stand in the middle of the forward
(``hoisted_counts``).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar.ir.nodes import name_of, operands, record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Requirement
from autopar.ir.value_names import copy_name
from autopar.step.compiling.graph_builder import GraphBuilder
from autopar.step.compiling.hoisted_counts import hoist_counts


def merge_programs(first: Program, second: Program, handed: Sequence[str] = ()) -> Program:
    """Merge two explicit programs into one, which returns the values of both. Linear in both.

    ``second`` takes the next values of the states of ``first``. Where ``first`` takes a low-precision copy in the place
    of a parameter ``w``, the merged program takes both, and calls the copy ``w.copy``.

    Args:
        handed: the names under which ``second`` takes the values that ``first`` returns.
    """
    builder = GraphBuilder(torch.device("cpu"))
    second_names = {node: name_of(node) for node in second.placeholders}
    types = {name: record_of(node).type for node, name in second_names.items()}
    names = {node: name_of(node) for node in first.placeholders}
    first_names = {
        node: name if types.get(name, record_of(node).type) == record_of(node).type else copy_name(name)
        for node, name in names.items()
    }
    roles: dict[str, str] = {}
    for node, name in (*first_names.items(), *second_names.items()):
        if name not in roles or record_of(node).role != "param":  # what one program replaces is a state of both
            roles[name] = record_of(node).role
    homes: dict[str, fx.Node] = {}
    for node, name in (*first_names.items(), *second_names.items()):
        if name not in homes and name not in handed:
            homes[name] = builder.placeholder(name, record_of(node)._replace(role=roles[name], name=name))
    nexts: dict[str, fx.Node] = {}
    needs: dict[fx.Node, Requirement | None] = {}
    returned: list[fx.Node] = []
    for program, names in ((first, first_names), (second, second_names)):
        values = {node: nexts[name] if name in nexts else homes[name] for node, name in names.items()}
        for node in program.nodes:
            if node.op in ("call_function", "get_attr"):
                values[node] = builder.copy(node, values, program.constants)
        named = {node.name: name for node, name in names.items()}
        about = record_of(program.output)
        for value, result, need in zip(operands(program.output), about.results, about.uses, strict=True):
            needs[values[value]] = need
            if result.kind == "state":
                nexts[named[result.of]] = values[value]
            else:
                returned.append(values[value])
        if program is first:
            nexts |= dict(zip(handed, returned, strict=bool(handed)))
    builder.arrange(hoist_counts)
    states = {home: nexts[name] for name, home in homes.items() if roles[name] == "state"}
    merged = builder.program(returned, states, None if first.tree and second.tree else first.tree or second.tree)
    set_record(
        merged.output, record_of(merged.output)._replace(uses=tuple(needs[value] for value in operands(merged.output)))
    )
    merged.level, merged.mesh, merged.stages = first.level, first.mesh, dict(first.stages)
    return merged
