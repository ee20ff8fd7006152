"""Check Layouts, requirements and sharding rules: what traced, placed and explicit programs promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar.errors import RuleError
from autopar.ir import transfers
from autopar.ir.layout import UNDECIDED, Layout
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.record import Record, TensorType
from autopar.ir.subaxes import overlap
from autopar.ir.text.printer import print_requirement, print_type
from autopar.rules.binding import bind_node
from autopar.verify.subject import Subject


def check_dtypes(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that a traced program requires dtypes only."""
    if record.uses and len(record.uses) != len(operands(node)):
        raise of.error(
            node, f"{len(operands(node))} operands, but {len(record.uses)} requirements: every use has one, or none has"
        )
    if any(need is not None and need.layout is not None for need in record.uses):
        raise of.error(node, "a use in a traced program requires a dtype alone; place decides its Layout")


def check_untransferred(of: Subject, node: fx.Node, record: Record) -> None:
    if node.target in transfers.BY_FUNCTION:
        raise of.error(node, f"a {of.program.level} program has no transfers; reshard inserts them")


def check_placed(of: Subject, node: fx.Node, record: Record) -> None:
    for type in record.type if isinstance(record.type, tuple) else (record.type,):
        if type is not None:
            if type.layout is None:
                raise of.error(node, f"at the level {of.program.level} every value has a Layout")
            check_layout(of, node, type, type.layout)
            if node.op == "get_attr" and not type.layout.attr.is_replicated:
                raise of.error(node, "a constant is whole on every rank, and its uses may need pieces of it")
    if node.op not in ("call_function", "output") or node.target in transfers.BY_FUNCTION:
        return
    values = operands(node)
    if len(record.uses) != len(values):
        raise of.error(node, f"{len(values)} operands, but {len(record.uses)} requirements: every use has one")
    for value, need in zip(values, record.uses, strict=True):
        operand_type = record_of(value).type
        if not isinstance(operand_type, TensorType):
            continue
        if need is None:
            raise of.error(node, f"the use of {value.name} has no requirement", value)
        if need.layout is None:
            raise of.error(node, f"the use of {value.name} requires a dtype alone; place gives it a Layout", value)
        if (need.layout, operand_type.shape) not in of.right:
            check_layout(of, node, operand_type, need.layout)
        if of.program.level == "explicit" and (need.layout, need.dtype) != (operand_type.layout, operand_type.dtype):
            user = "the output" if node.op == "output" else node.name
            wanted = f"{user} needs {value.name} as {print_requirement(need, operand_type)}"
            reason = f"{wanted}, but it is {print_type(operand_type)}: insert the transfers between them"
            raise of.error(node, reason, value)


def check_layout(of: Subject, node: fx.Node, type: TensorType, layout: Layout) -> None:
    if (layout, type.shape) in of.right:
        return
    attr, mesh = layout.attr, layout.mesh
    if len(attr.dims) != len(type.shape):
        raise of.error(node, f"the Layout has {len(attr.dims)} dims, the value {len(type.shape)}")
    axes = attr.axes
    if UNDECIDED in axes:
        raise of.error(node, "a dim is left undecided ('?'): place decides it")
    if mesh != of.program.mesh and of.program.stages.get(mesh.name or "") != mesh:
        raise of.error(node, f"the mesh ({mesh!r}) is neither the program's nor one of its stages")
    for axis in axes:
        try:
            mesh.check_axis(axis)
        except ValueError as error:
            raise of.error(node, str(error)) from None
    if twice := next((axis for k, axis in enumerate(axes) if any(overlap(axis, other) for other in axes[:k])), None):
        raise of.error(node, f"the axis {twice} is used twice on one value; each axis splits it, or is pending, once")
    if len({kind for _, kind in attr.pending}) > 1:
        kinds = " and ".join(f"{kind} over {axis}" for axis, kind in attr.pending)
        raise of.error(node, f"pending {kinds} at once: the order of the reductions would matter; reduce one first")
    if attr.normalize(type.shape, mesh) != attr:
        raise of.error(node, "the Layout is not in its normal form; make it with DistAttr.normalize")
    of.right.add((layout, type.shape))


def check_rule(of: Subject, node: fx.Node, record: Record) -> None:
    if node.op != "call_function" or is_getitem(node):
        return
    values = operands(node)
    if node.target in transfers.BY_FUNCTION:
        check_transfer(of, node, values[0], record)
        return
    try:
        bound = bind_node(node)
    except RuleError as error:
        raise of.error(node, str(error), *values) from None
    results = record.type if isinstance(record.type, tuple) else (record.type,)
    needs = [need.placed.attr for need in record.uses if need is not None]
    gives = [None if r is None else r.attr for r in results]
    meshes = {need.placed.mesh for need in record.uses if need} | {r.layout.mesh for r in results if r and r.layout}
    if len(meshes) > 1:
        raise of.error(
            node, "operands and results are on different meshes; an op runs on one: insert a send and a recv", *values
        )
    if meshes and (why := bound.check(meshes.pop(), needs, gives, [v.name for v in values])):
        raise of.error(node, why, *values)


def check_transfer(of: Subject, node: fx.Node, value: fx.Node, record: Record) -> None:
    row = transfers.BY_FUNCTION[node.target]
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    source = record_of(value).type
    if not isinstance(source, TensorType):
        raise of.error(node, f"{row.name} takes one tensor and makes one", value)
    try:
        want = row.infer(source, arguments, of.program.meshes)
    except ValueError as error:
        raise of.error(node, str(error), value) from None
    if want != record.type:
        raise of.error(node, f"{row.name} makes it {print_type(want)}", value)
    check_channel(of, node, value, arguments)


def check_channel(of: Subject, node: fx.Node, value: fx.Node, arguments: Mapping[str, Any]) -> None:
    """Check that a sent value is only received, and by the stage it was sent to."""
    if node.target is transfers.send:
        for user in node.users:
            if user.target is not transfers.recv:
                raise of.error(
                    user,
                    f"{node} is on its way to {arguments['stage']}: read a recv({node}, {arguments['stage']})",
                    node,
                )
    elif node.target is transfers.recv:
        sent = value.target is transfers.send
        stage = transfers.arguments(transfers.send, value.args, value.kwargs)["stage"] if sent else None
        if stage != arguments["stage"]:
            raise of.error(
                node,
                f"{value} was not sent to {arguments['stage']}: receive a send({value}, {arguments['stage']})",
                value,
            )
