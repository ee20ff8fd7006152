"""Move the counts that are summed over the mesh to the middle of the forward, to overlap their messages with it.

    …the forward…                                        …the first half…
    ne : bool[8 16 dp] = ne(labels, -100)                ne : bool[8 16 dp] = ne(labels, -100)
    sum_1 : i64[] +dp = sum(ne)                          sum_1 : i64[] +dp = sum(ne)
    sum_dp : i64[] = all_reduce(sum_1, dp)         →     sum_dp : i64[] = all_reduce(sum_1, dp)
    loss : f32[] +dp = div.Tensor(sum_2, sum_dp)         …the second half…
                                                         loss : f32[] +dp = div.Tensor(sum_2, sum_dp)

A loss is divided by such a count, which depends on inputs alone. If the count were reduced right before the division,
all ranks would wait for a small message, which takes long while processes compute. The message does not begin with the
forward either: before the first message of a step the ranks compare their calls, and that comparison runs during the
first half of the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.record import TensorType

LARGEST = 64  # elements of a count; a larger one would take memory for long


def hoist_counts(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Reorder the nodes of an explicit program, so that counts are reduced early.

    Operands stay before their users. Linear in the graph.
    """
    from_inputs: set[fx.Node] = set()  # values that depend on inputs and buffers alone
    late: set[fx.Node] = set()  # among them, the counts and the values that are computed from counts
    for node in nodes:
        if node.op == "get_attr" or (
            record_of(node).phase == "forward"
            and all(_is_input(value) or value in from_inputs for value in operands(node))
        ):
            from_inputs.add(node)
            if _is_count(node) or any(value in late for value in operands(node)):
                late.add(node)
    counts = [node for node in nodes if node in late and _is_count(node)]
    if not counts:
        return list(nodes)
    forward = [node for node in nodes if record_of(node).phase == "forward" and node not in from_inputs]
    middle = forward[len(forward) // 2] if forward else None
    ordered: dict[fx.Node, None] = {}
    for node in nodes:
        if node is middle:
            _put(ordered, (value for count in counts for value in operands(count)))
            _put(ordered, counts)  # side by side, so that they share a message
        if node not in late:
            _put(ordered, (node,))
    _put(ordered, nodes)
    return list(ordered)


def _put(ordered: dict[fx.Node, None], nodes: Iterable[fx.Node]) -> None:
    """Add nodes to the order, each after its operands."""
    remaining = list(nodes)[::-1]
    while remaining:
        node = remaining.pop()
        if node in ordered or node.op == "placeholder":
            continue
        open_ = [value for value in operands(node) if value not in ordered and value.op != "placeholder"]
        if open_:
            remaining += [node, *open_]
        else:
            ordered[node] = None


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and record_of(node).role in ("input", "buffer")


def _is_count(node: fx.Node) -> bool:
    """Return whether a node reduces a small value over the mesh."""
    type = record_of(node).type
    return node.target is transfers.all_reduce and isinstance(type, TensorType) and math.prod(type.shape) <= LARGEST
