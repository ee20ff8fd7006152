"""Check streams: each collective that is started is waited for, and only scheduled programs have any."""

from __future__ import annotations

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.record import Record
from autopar.verify.subject import Subject


def check_unstreamed(of: Subject, node: fx.Node, record: Record) -> None:
    if record.started or record.stream is not None or node.target is transfers.wait:
        raise of.error(node, f"a {of.program.level} program has no streams; only a scheduled one starts and waits")


def check_stream(of: Subject, node: fx.Node, record: Record) -> None:
    if record.stream is not None and record.stream not in of.program.streams:
        raise of.error(node, f"no stream {record.stream!r}; streams are {', '.join(of.program.streams) or 'none'}")
    if record.started:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is None or not row.collective:
            raise of.error(node, "only a collective can be started and waited for")
        of.unwaited[node] = None
    for value in operands(node):
        if record_of(value).started != (node.target is transfers.wait):
            if node.target is transfers.wait:
                raise of.error(node, f"{value.name} is not started: read it without waiting", value)
            raise of.error(node, f"{value.name} is only started here: read wait({value.name})", value)
        of.unwaited.pop(value, None)


def check_waited(of: Subject) -> None:
    """Check, at the end of the program, that nothing is left to wait for."""
    if of.unwaited:
        node = next(iter(of.unwaited))
        raise of.error(node, f"{node.name} is started and never waited for: insert wait({node.name})")
