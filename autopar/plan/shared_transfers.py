"""Say which equal transfers of one value are one transfer of the program: in one phase, or in all.

What a view or a cast gives has the same numbers. So if a pending value and its views would be reduced by themselves,
the value is reduced once, and the views, through which it waits, read the reduced one.

Transfers are not shared across phases: the backward gathers again what the forward gathered, so that it need not be
kept. There are three exceptions. A value that the forward reduced is kept, because it is no larger than the partial
sums that would be kept instead; so is what leads to the reduction, which is done once. So is a value that the forward
cast to fewer bytes, except parameters and inputs, which are kept anyway. And so are the gathered parameters of the
block with which the forward ends and the backward begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.capture.blocks import block_of, is_parameter, reader_of
from autopar.ir import transfers
from autopar.ir.computed_again import computed_again, hashable
from autopar.ir.nodes import called_op, is_getitem, name_of, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, Requirement, TensorType, ValueType
from autopar.ir.value_names import LOSS, gradient_parameter
from autopar.rules.binding import bind_node
from autopar.rules.pointwise import CASTS
from autopar.rules.registry import RULES

REDUCTIONS = (transfers.all_reduce, transfers.reduce_scatter)


def computed(value: fx.Node) -> bool:
    """Return whether an op makes a value: it is no placeholder or constant, and no view or transfer of one."""
    while value.op == "call_function" and (
        value.target in transfers.BY_FUNCTION or ((rule := RULES.get(called_op(value))) and rule.view)
    ):
        (value,) = operands(value)
    return value.op == "call_function"


def narrows(source: TensorType, result: TensorType) -> bool:
    """Return whether a cast reduces the bytes of a value."""
    return result.dtype.itemsize < source.dtype.itemsize


def turning_block(program: Program) -> str | None:
    """Return the path of the block, or of the module outside of blocks, of the last op that reads a parameter.

    It is that of the forward; ``None`` if the forward reads none. The backward begins with this block.
    """
    block, last = block_of(program), None
    for node in program.nodes:
        if node.op == "call_function" and record_of(node).phase == "forward" and any(map(_is_weight, operands(node))):
            last = node
    return None if last is None else block(reader_of(last))


def _is_weight(value: fx.Node) -> bool:
    """Return whether a value is a parameter, and not a sum of gradients or losses."""
    if not is_parameter(value):
        return False
    placeholder = value if value.op == "placeholder" else operands(value)[0]
    name = name_of(placeholder)
    return name != LOSS and gradient_parameter(name) is None


# -- views of reduced values -------------------------------------------------------------------------------------------


def views_of_reduced(program: Program) -> dict[fx.Node, Record]:
    """Return the views of pending values that should read the reduced value, with the records that they then have.

    What the backward computes again is the same value as the first one.
    """
    members: dict[fx.Node, tuple[fx.Node, tuple[Any, ...]]] = {}  # pending value → the first one, and its views so far
    reduced: dict[fx.Node, None] = {}  # that are reduced for some use
    for node in program.nodes:
        waits = _waits(node)
        if waits:
            root, views = members[operands(node)[0]]
            members[node] = root, (*views, (node.target, hashable(node.args[1:]), hashable(dict(node.kwargs))))
        elif _pending(record_of(node).type):
            members[node] = node, ()
        for value, need in zip(operands(node), record_of(node).uses, strict=False):
            if value in members and _reduces(value, need):
                reduced[value] = None
    roots = {members[value][0]: None for value in reduced}
    if len(roots) == len(reduced) and all(not members[value][1] for value in reduced):
        return {}
    numbers = computed_again(program, roots)
    ways: dict[object, set[tuple[Any, ...]]] = {}  # value, under the number of its copies, too → what is reduced of it
    for value in reduced:
        root, views = members[value]
        ways.setdefault(root, set()).add((value,))
        ways.setdefault(numbers.get(root, root), set()).add(views if root in numbers else (value,))
    found: dict[fx.Node, Record] = {}
    for node in reversed(list(members)):
        root, views = members[node]
        several = any(len(ways.get(key, ())) > 1 for key in (root, numbers.get(root, root)))
        if views and several and (node in reduced or any(user in found for user in node.users)):
            found[node] = _of_reduced(node)
    return found


def is_view(node: fx.Node) -> bool:
    """Return whether an op gives the numbers of its only operand in another shape, order or dtype."""
    if node.op != "call_function" or is_getitem(node) or node.target in transfers.BY_FUNCTION:
        return False
    return len(operands(node)) == 1 and (called_op(node) in CASTS or bind_node(node).rule.view)


def _waits(node: fx.Node) -> bool:
    uses = record_of(node).uses
    return (
        node.op == "call_function"
        and len(uses) == 1
        and uses[0] is not None
        and bool(uses[0].placed.attr.pending)
        and _pending(record_of(node).type)
        and _pending(record_of(operands(node)[0]).type)
        and is_view(node)
    )


def _pending(type: ValueType) -> bool:
    return isinstance(type, TensorType) and type.layout is not None and bool(type.attr.pending)


def _reduces(value: fx.Node, need: Requirement | None) -> bool:
    type = record_of(value).type
    assert isinstance(type, TensorType)
    return need is not None and need.layout is not None and reduces(type.attr.pending, need.layout.attr.pending)


def reduces(have: Iterable[tuple[str, str]], need: Iterable[tuple[str, str]]) -> bool:
    """Return whether an axis that is pending in a value is not in what a use needs."""
    return not set(have) <= set(need)


def _of_reduced(node: fx.Node) -> Record:
    record = record_of(node)
    (need,) = record.uses
    assert isinstance(record.type, TensorType) and need is not None
    layout, read = record.type.placed, need.placed
    return record._replace(
        type=replace(record.type, layout=replace(layout, attr=layout.attr.without_pending())),
        uses=(replace(need, layout=replace(read, attr=read.attr.without_pending())),),
    )
