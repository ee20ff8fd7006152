"""Verify a program against the promises of its level. It runs after every pass, so that the error names the pass at
fault."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.ir.nodes import has_record, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record
from autopar.verify.every_level import check_header, check_record
from autopar.verify.layouts import check_dtypes, check_placed, check_rule, check_untransferred
from autopar.verify.own import check_drawn, check_own
from autopar.verify.pieces import check_local
from autopar.verify.reductions import check_reduced_once
from autopar.verify.streams import check_stream, check_unstreamed, check_waited
from autopar.verify.subject import Subject

CHECKS: dict[str, tuple[Callable[[Subject, fx.Node, Record], None], ...]] = {  # level → the checks of each node
    "traced": (check_record, check_dtypes, check_untransferred, check_unstreamed),
    "placed": (check_record, check_placed, check_own, check_rule, check_drawn, check_untransferred, check_unstreamed),
    "explicit": (check_record, check_placed, check_own, check_rule, check_drawn, check_unstreamed),
    "local": (check_record, check_local, check_unstreamed),
    "scheduled": (check_record, check_local, check_stream),
}
REDUCES = ("explicit", "local", "scheduled")  # levels with transfers


def verify(program: Program, made_by: str = "") -> None:
    """Raise ``VerifyError`` for the first node that breaks a promise of the program's level. Linear in the graph.

    Args:
        made_by: the pass that made the program, named in the error.
    """
    of = Subject(program, made_by)
    check_header(of)
    seen: set[fx.Node] = set()
    names: set[str] = set()
    checks = CHECKS[program.level]
    for node in program.nodes:
        if not has_record(node):
            raise of.error(node, "every node has a record; this one was made without program.edit()")
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise of.error(node, f"{operand.name} is read before it is made")
        if node.name in names:
            raise of.error(node, f"the name {node.name} is given twice")
        seen.add(node)
        names.add(node.name)
        record = record_of(node)
        for check in checks:
            check(of, node, record)
    check_waited(of)
    if program.level in REDUCES:
        check_reduced_once(of)


Program.verifier = verify
