"""Hold back the ops of the backward that need no gradient, so that their results do not fill the memory early.

    forward                              backward
    pow_1 : … = pow(x, 2)                pow_2 : … = pow(x, 1)           needs no gradient, and could run at once
                                         mul : … = mul(g_tp, pow_2)      so pow_2 runs after g, while g is reduced

Such an op is ready from the forward on: a factor of a derivative, or a recomputed value. Its first reader also reads a
gradient. The op runs after that gradient; if the gradient is the result of a collective, after the operand of the
collective, so that it overlaps with it. Gathers of parameters, and ops that compute only their operands, are not held
back: several gathers share a message, and the schedule starts it by its deadline.
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
    """Return the ops of a function of an explicit program, with those of the backward held back until near their
    readers. Linear in the graph."""
    inside, anchors = {op.name for op in ops}, _anchors(program)
    return [
        replace(op, behind=(*op.behind, anchors[op.name])) if anchors.get(op.name) in inside else op for op in ops
    ]  # fmt: skip


def _anchors(program: Program) -> Mapping[str, str]:
    """Map each op that is held back to the op that it runs after, which stands before it in the program."""
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
        if anchor is not None and place[anchor] < place[node]:  # so that no op waits for itself
            behind[node] = anchor
    return {node.name: _sent(anchor).name for node, anchor in behind.items() if node not in free}


def _gradients(program: Program) -> set[fx.Node]:
    """Return the values that depend on a first gradient: a tangent, or that of the loss, which the backward makes."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        makes = node.op == "call_function" and record_of(node).phase == "backward" and not operands(node)
        if makes or record_of(node).role == "tangent" or any(value in found for value in operands(node)):
            found.add(node)
    return found


def _sent(value: fx.Node) -> fx.Node:
    """Return the op that computes a value; of the result of a collective, the op that computes its operand."""
    while is_getitem(value) or (value.op == "call_function" and is_collective(value)):
        value = operands(value)[0]
    return value
