"""Check streams: each collective that is started is waited for, and only scheduled programs have any.

The members of a message are started side by side on one stream, and waited for side by side, in one order:

    a_dp_start : f32[8] = start all_reduce(a, dp) on dp in dp_0
    b_dp_start : f32[4] = start all_reduce(b, dp) on dp in dp_0
    …
    a_dp : f32[8] = wait(a_dp_start)
    b_dp : f32[4] = wait(b_dp_start)

What is under way at the end of a run is a state. The next run waits for it, and its next value is the start of the same
collective:

    a_dp_start : f32[8] = state(a_dp_next_start) on dp
    finish:
      a_dp : f32[8] = wait(a_dp_start)
      …
    backward:
      a_dp_next_start : f32[8] = start all_reduce(a, dp) on dp
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
    if record.started and record.role == "state":
        of.unwaited[node] = None
    elif record.started:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is None or not row.collective or row.function in (transfers.send, transfers.recv):
            raise of.error(node, "only a collective can be started and waited for")
        if record.stream is None:
            raise of.error(node, "a collective is started on a stream: add 'on' and the name of one")
        of.unwaited[node] = None
    elif record.message or record.span:
        raise of.error(node, "only a collective that is started is part of a message")
    check_message(of, node, record)
    if node.op == "output":
        check_under_way(of, node, record)
        return
    for value in operands(node):
        if record_of(value).started != (node.target is transfers.wait):
            if node.target is transfers.wait:
                raise of.error(node, f"{value.name} is not started: read it without waiting", value)
            raise of.error(node, f"{value.name} is only started here: read wait({value.name})", value)
        of.unwaited.pop(value, None)


def check_under_way(of: Subject, output: fx.Node, record: Record) -> None:
    """Check that each started state is replaced by the start of the same collective, and that no other result is only
    started."""
    homes = {node.name: node for node in of.program.placeholders}
    messages: dict[str, str] = {}
    for value, result in zip(operands(output), record.results, strict=True):
        about, home = record_of(value), homes.get(result.of)
        before = None if home is None or result.kind != "state" else record_of(home)
        if before is None or not before.started:
            if about.started:
                raise of.error(output, f"{value.name} is only started here: return wait({value.name})", value)
            continue
        same = (about.type, about.stream, about.span) == (before.type, before.stream, before.span)
        if not about.started or not same or messages.setdefault(before.message, about.message) != about.message:
            raise of.error(
                output,
                f"the state {result.of} was started before, so that {value.name}, its next value, is the start of the "
                f"same collective, with the same stream and elements, and in the same message",
                home,
                value,
            )
        of.unwaited.pop(value, None)
    nexts = {result.of: value for value, result in zip(operands(output), record.results, strict=True)}
    for earlier, later in messages.items():
        homes_of, values_of = of.messages.get(earlier, []), of.messages.get(later, [])
        if earlier and [nexts[home.name] for home in homes_of] != values_of:
            why = f"the messages {earlier} and {later} have other members, or another order"
            raise of.error(output, why, *homes_of)


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
    record = record_of(node)
    type = record.type
    assert isinstance(type, TensorType)
    if node.op == "placeholder":
        return record.stream, type.dtype
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    return node.target, arguments["axis"], arguments.get("op", "sum"), arguments.get("stage"), record.stream, type.dtype


def check_waited(of: Subject) -> None:
    """Check, at the end of the program, that nothing is left to wait for."""
    if of.unwaited:
        node = next(iter(of.unwaited))
        raise of.error(node, f"{node.name} is started and never waited for: insert wait({node.name})")
