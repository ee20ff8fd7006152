"""Find the rule of each op that is placed, and refuse ops that ranks would compute differently."""

from __future__ import annotations

from torch import fx

from autopar.errors import RuleError, at_line
from autopar.ir.nodes import record_of
from autopar.ir.record import Record
from autopar.rules.binding import bind_node
from autopar.rules.strategies import Bound

UNSTEADY = ("it draws random numbers", "it gives another result the second time")  # reasons why no rule was discovered


def usable_rule(node: fx.Node, *, strict: bool = False) -> Bound:
    """Return the bound rule of a node that is placed on a mesh.

    Raises:
        RuleError: as for ``bind_node``, or every rank would compute the op for itself and get different values. The
            error names the node and the user's line.
    """
    record = record_of(node)
    try:
        bound = bind_node(node, strict=strict)
    except RuleError as error:
        raise RuleError(f"{node.name}: {error}{where(record)}") from None
    if bound.why in UNSTEADY:
        raise RuleError(
            f"{node.name}: {bound.rule.op} has no sharding rule, and {bound.why}, so that ranks would hold "
            f"different values of one{where(record)}\n  tag it: torch.library.custom_op(..., "
            f"tags=[torch.Tag.nondeterministic_seeded]) draws from the step's seed"
        )
    return bound


def where(record: Record) -> str:
    """Return the user's line and module on a separate line."""
    return f"\n{at_line(record.source, record.module)}" if record.source else ""
