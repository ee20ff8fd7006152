"""Keep ops of the backward that need no gradient from running in the forward, where their results fill the memory.

    forward                              backward
    pow_1 : … = pow(x, 2)                pow_2 : … = pow(x, 1)           needs no gradient, and could run at once
                                         mul : … = mul(g_tp, pow_2)      behind g, so that it runs while g is reduced

Such an op is ready from the forward on: a factor of a derivative, or what is recomputed. It runs behind the gradient
that its first reader also reads, or, if that is being communicated, behind what is sent: then it runs meanwhile.
A gather of a parameter, and what computes only what it sends, are left free: several share a message, and the schedule
starts it by its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.capture.blocks import is_parameter
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.scheduling.op import Op
from autopar.scheduling.programs.functions import is_collective


def just_in_time(program: Program, ops: Sequence[Op]) -> list[Op]:
    """Return the ops of a function of an explicit program so that none of the backward runs long before its reader.
    Linear in the graph."""
    inside, anchors = {op.name for op in ops}, _anchors(program)
    return [
        replace(op, behind=(*op.behind, anchors[op.name])) if anchors.get(op.name) in inside else op for op in ops
    ]  # fmt: skip


def _anchors(program: Program) -> Mapping[str, str]:
    """Map each op that needs no gradient to the op that it runs behind, which stands before it in the program."""
    gradients = _gradients(program)
    place = {node: k for k, node in enumerate(program.nodes)}
    behind: dict[fx.Node, fx.Node] = {}
    free: set[fx.Node] = set()
    for node in reversed(list(program.nodes)):
        if node in gradients or node.op != "call_function" or record_of(node).phase != "backward":
            continue
        gathers = is_collective(node) and is_parameter(operands(node)[0])
        if gathers or (node.users and all(user in free for user in node.users)):
            free.add(node)
        reader = min(node.users, key=place.__getitem__, default=program.output)
        anchor = behind.get(reader)
        if reader in gradients:
            read = [value for value in operands(reader) if value in gradients]
            anchor = max(read, key=place.__getitem__, default=None)
        if anchor is not None and place[anchor] < place[node]:  # so that nothing is behind itself
            behind[node] = anchor
    return {node.name: _sent(anchor).name for node, anchor in behind.items() if node not in free}


def _gradients(program: Program) -> set[fx.Node]:
    """Return what depends on a gradient that is given: a tangent, or that of the loss, which the backward makes."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        makes = node.op == "call_function" and record_of(node).phase == "backward" and not operands(node)
        if makes or record_of(node).role == "tangent" or any(value in found for value in operands(node)):
            found.add(node)
    return found


def _sent(value: fx.Node) -> fx.Node:
    """Return what computes a value, or what a collective sends."""
    while is_getitem(value) or (value.op == "call_function" and is_collective(value)):
        value = operands(value)[0]
    return value
