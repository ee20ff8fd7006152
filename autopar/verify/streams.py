"""Check streams: each collective that is started is waited for, and only scheduled programs have any.

The members of a message are started side by side on one stream, and waited for side by side, in one order:

    a_dp_start : f32[8] = start all_reduce(a, dp) on dp in dp_0
    b_dp_start : f32[4] = start all_reduce(b, dp) on dp in dp_0
    …
    a_dp : f32[8] = wait(a_dp_start)
    b_dp : f32[4] = wait(b_dp_start)
"""

from __future__ import annotations

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.record import Record, TensorType
from autopar.verify.subject import Subject


def check_unstreamed(of: Subject, node: fx.Node, record: Record) -> None:
    if record.started or record.stream is not None or node.target is transfers.wait:
        raise of.error(node, f"a {of.program.level} program has no streams; only a scheduled one starts and waits")


def check_stream(of: Subject, node: fx.Node, record: Record) -> None:
    if record.stream is not None and record.stream not in of.program.streams:
        raise of.error(node, f"no stream {record.stream!r}; streams are {', '.join(of.program.streams) or 'none'}")
    if record.started:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is None or not row.collective or row.function in (transfers.send, transfers.recv):
            raise of.error(node, "only a collective can be started and waited for")
        if record.stream is None:
            raise of.error(node, "a collective is started on a stream: add 'on' and the name of one")
        of.unwaited[node] = None
    elif record.message or record.span:
        raise of.error(node, "only a collective that is started is part of a message")
    check_message(of, node, record)
    for value in operands(node):
        if record_of(value).started != (node.target is transfers.wait):
            if node.target is transfers.wait:
                raise of.error(node, f"{value.name} is not started: read it without waiting", value)
            raise of.error(node, f"{value.name} is only started here: read wait({value.name})", value)
        of.unwaited.pop(value, None)


def check_message(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that the members of a message stand side by side, where they are started and where they are waited for."""
    value = operands(node)[0] if node.target is transfers.wait else None
    message = record.message if value is None else record_of(value).message
    last, of.last_message = of.last_message, (message, value is not None)
    if not message:
        return
    members = of.messages.setdefault(message, [])
    if value is None:
        if members and (last != (message, False) or key_of_message(members[0]) != key_of_message(node)):
            raise of.error(
                node,
                f"the message {message} is started in two places, or has members that differ in transfer, axis, stream "
                f"or dtype: give them messages of their own",
                members[0],
            )
        members.append(node)
        return
    waited = of.waited.setdefault(message, [])
    if members[len(waited) : len(waited) + 1] != [value] or (waited and last != (message, True)):
        raise of.error(
            node,
            f"the members of the message {message} are waited for side by side, in the order in which they start: "
            f"{', '.join(member.name for member in members)}",
            value,
        )
    waited.append(value)


def key_of_message(node: fx.Node) -> tuple[object, ...]:
    """Return what the members of a message have in common."""
    arguments, record = transfers.arguments(node.target, node.args, node.kwargs), record_of(node)
    type = record.type
    assert isinstance(type, TensorType)
    return node.target, arguments["axis"], arguments.get("op", "sum"), arguments.get("stage"), record.stream, type.dtype


def check_waited(of: Subject) -> None:
    """Check, at the end of the program, that nothing is left to wait for."""
    if of.unwaited:
        node = next(iter(of.unwaited))
        raise of.error(node, f"{node.name} is started and never waited for: insert wait({node.name})")
