"""Describe the call of each op and transfer of an explicit program as one line of text: equal lines cost the same.

    mm(f32[256 512], f32[512 1024] by t of f32[1024 512]) -> f32[256 1024]
    sum.dim_IntList(f32[256 1024], [0], True) -> f32[1 1024]
    all_reduce(f32[256 1024], tp) -> f32[256 1024]

Types are those of the largest pieces, which the first rank has. Where an operand is a view whose elements are not in
memory order, the line names the view, because kernels take longer on such operands. Arguments that are sizes are left
out, because the types have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, node_at, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, TensorType, ValueType
from autopar.ir.text.printer import print_literal, print_type, target_name
from autopar.rules.registry import rule_of
from autopar.torch_private import OpOverload, returns_alias

# views that keep the elements in memory order
ORDERED = frozenset({
    "alias", "detach", "view", "reshape", "unsqueeze", "squeeze", "squeeze.dim", "squeeze.dims", "positive",
})  # fmt: skip
# in memory, their results of four dims have the heads after the sequence: transposed, they are in order (torch 2.13)
ATTENTION = ("aten::_scaled_dot_product_", "autopar::causal_attention")
MOST_VIEWS = 6  # of views of views: an operand behind more of them counts as one in memory order
BY_LAYOUT = (transfers.redistribute, transfers.send, transfers.recv)  # the layouts decide which ranks exchange what
OP, LOCAL, EXCHANGE = KINDS = ("op", "local", "exchange")


def kind_of(node: fx.Node) -> str:
    """Return the kind of a call: ``op``, ``exchange`` for transfers in which ranks communicate, else ``local``."""
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None:
        return OP
    axes = transfers.arguments(row.function, node.args, node.kwargs).get("axis", True)
    return EXCHANGE if row.collective and axes else LOCAL


def group_of(node: fx.Node) -> str:
    """Return the collective and the axes of its group, ``all_reduce over dp tp``."""
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    axes = " ".join(transfers.axes_of(arguments.get("axis") or ()))
    return f"{target_name(node.target)} over {axes}" if axes else target_name(node.target)


def is_view(node: fx.Node) -> bool:
    """Return whether a value is a view of another one, so that its elements may not be in memory order."""
    op = node_at(node) if is_getitem(node) else node
    return op.op == "call_function" and isinstance(op.target, OpOverload) and returns_alias(op.target)


def viewed(node: fx.Node) -> fx.Node:
    """Return the value that a view views."""
    return operands(node_at(node) if is_getitem(node) else node)[0]


def lies_by_sequence(node: fx.Node) -> bool:
    """Return whether a value is a result of an attention, with the heads after the sequence in memory."""
    if not is_getitem(node) or not isinstance(op := node_at(node).target, OpOverload):
        return False
    type = record_of(node).type
    return op.name().startswith(ATTENTION) and isinstance(type, TensorType) and len(type.shape) == 4


def views_behind(node: fx.Node) -> int:
    """Return the number of views between a value and one in memory order; 0 if the value itself is in memory order.

    At most ``MOST_VIEWS`` are counted.
    """
    chain: list[fx.Node] = []
    while is_view(node) and len(chain) < MOST_VIEWS:
        chain.append(node)
        node = viewed(node)
    while chain and _is_ordered(chain[-1]) and not lies_by_sequence(viewed(chain[-1])):
        chain.pop()
    return len(chain)


def _is_ordered(view: fx.Node) -> bool:
    return not is_getitem(view) and rule_of(view.target).op in ORDERED


def calls_of(program: Program) -> Iterator[tuple[fx.Node, str]]:
    """Yield each op and transfer of an explicit program with the text of its call. Linear in the graph.

    Elements of results with several values are left out: they call nothing.
    """
    for node in program.nodes:
        if node.op == "call_function" and not is_getitem(node):
            yield node, call_text(node)


def call_text(node: fx.Node) -> str:
    """Return the call of a node of an explicit program, as text."""
    result = local_type(record_of(node).type)
    if node.target in transfers.BY_FUNCTION:
        return _transfer_text(node, result)
    sizes = rule_of(node.target).sizes
    args = [_argument(value) for k, value in enumerate(node.args) if k not in sizes]
    args += [f"{name}={_argument(value)}" for name, value in node.kwargs.items()]
    return f"{target_name(node.target)}({', '.join(args)}) -> {print_type(result)}"


def _transfer_text(node: fx.Node, result: ValueType) -> str:
    operand, whole = operands(node)[0], node.target in BY_LAYOUT
    source = print_type(record_of(operand).type) if whole else _operand(operand)
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    given = [_axes(value) for value in arguments.values() if value is not None]
    after = print_type(record_of(node).type if whole else result)
    return f"{target_name(node.target)}({', '.join([source, *given])}) -> {after}"


def _axes(value: Any) -> str:
    """Return an argument of a transfer; names of axes have no quotes."""
    if isinstance(value, (tuple, list)):
        return f"({' '.join(map(_axes, value))})"
    return value if isinstance(value, str) else DTYPE_NAMES[value] if value in DTYPE_NAMES else str(value)


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _operand(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_argument(entry)}" for name, entry in value.items()) + "}"
    try:
        return print_literal(value)
    except TypeError:
        return shown(value)


def _operand(node: fx.Node) -> str:
    """Return the type of an operand, and the views of which it is the result if it is not in memory order."""
    text, names = print_type(local_type(record_of(node).type)), list[str]()
    for _ in range(views_behind(node)):
        names.append(_view_text(node))
        node = viewed(node)
    base = print_type(local_type(record_of(node).type)) + " of an attention" * lies_by_sequence(node)
    return f"{text} by {' of '.join(names)} of {base}" if names else base


def _view_text(view: fx.Node) -> str:
    """Return a view with those arguments that are not sizes: ``transpose.int(1, 2)``."""
    op = node_at(view) if is_getitem(view) else view
    sizes = rule_of(op.target).sizes
    args = [_argument(value) for k, value in enumerate(op.args[1:], 1) if k not in sizes]
    element = f"[{view.args[1]}]" if is_getitem(view) else ""
    return target_name(op.target) + (f"({', '.join(args)})" if args else "") + element


def local_type(type: ValueType) -> ValueType:
    """Return the type of the first rank's piece, which no other piece exceeds."""
    return tuple(map(_piece, type)) if isinstance(type, tuple) else _piece(type)


@lru_cache(maxsize=65536)  # a program has few different types
def _piece(type: TensorType | None) -> TensorType | None:
    if type is None or type.layout is None:
        return type
    mesh = type.layout.mesh
    return TensorType(type.attr.local_shape(type.shape, mesh, dict.fromkeys(mesh.sizes, 0)), type.dtype)


def first_ranks(program: Program) -> Sequence[int]:
    """Return the first rank of the mesh, and of each stage: together they have a largest piece of each value."""
    return list(dict.fromkeys(mesh.ranks[0] for mesh in program.meshes.values()))
