"""Early: what is counted over the mesh, of inputs alone, travels while the forward runs.

    …the forward…                                        …the first half…
    ne : bool[8 16 dp] = ne(labels, -100)                ne : bool[8 16 dp] = ne(labels, -100)
    sum_1 : i64[] +dp = sum(ne)                          sum_1 : i64[] +dp = sum(ne)
    sum_dp : i64[] = all_reduce(sum_1, dp)         →     sum_dp : i64[] = all_reduce(sum_1, dp)
    loss : f32[] +dp = div.Tensor(sum_2, sum_dp)         …the second half…
                                                         loss : f32[] +dp = div.Tensor(sum_2, sum_dp)

A loss is divided by such a count. Where that was made a moment ago, all ranks stand still for as long as a small message takes, which is
long on processes that compute. Nor does it begin with the forward: before a step's first message the ranks compare what they were called
with, and that comparison travels in the first half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.record import TensorType

LARGEST = 64  # elements of what is counted; more would be held for long


def counted_early(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of an explicit program in another order, which is one too; linear in the graph."""
    told: set[fx.Node] = set()  # values that inputs alone tell
    late: set[fx.Node] = set()  # of these, the counts and what is made of them
    for node in nodes:
        if node.op == "get_attr" or (record_of(node).phase == "forward" and all(_is_given(value) or value in told for value in operands(node))):
            told.add(node)
            if _is_count(node) or any(value in late for value in operands(node)):
                late.add(node)
    counts = [node for node in nodes if node in late and _is_count(node)]
    if not counts:
        return list(nodes)
    forward = [node for node in nodes if record_of(node).phase == "forward" and node not in told]
    middle = forward[len(forward) // 2] if forward else None
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node is middle:
            _put(found, (value for count in counts for value in operands(count)))
            _put(found, counts)  # side by side, so that they share a message
        if node not in late:
            _put(found, (node,))
    _put(found, nodes)
    return list(found)


def _put(found: dict[fx.Node, None], nodes: Iterable[fx.Node]) -> None:
    """Values, each behind what it is made of."""
    left = list(nodes)[::-1]
    while left:
        node = left.pop()
        if node in found or node.op == "placeholder":
            continue
        open_ = [value for value in operands(node) if value not in found and value.op != "placeholder"]
        if open_:
            left += [node, *open_]
        else:
            found[node] = None


def _is_given(node: fx.Node) -> bool:
    return node.op == "placeholder" and record_of(node).role in ("input", "buffer")


def _is_count(node: fx.Node) -> bool:
    type = record_of(node).type
    return node.target is transfers.all_reduce and isinstance(type, TensorType) and math.prod(type.shape) <= LARGEST
