"""Check values that are no data but each rank's own, and that ops which draw the same numbers are split alike."""

from __future__ import annotations

from torch import fx

from autopar.errors import RuleError
from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, operands
from autopar.ir.record import Record
from autopar.rules.binding import bind_node
from autopar.rules.drawn import own_maker, split_of, splits_in_common
from autopar.verify.subject import Subject


def check_own(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that only its own backward reads what an op leaves on each rank."""
    if node.op not in ("call_function", "output") or is_getitem(node):
        return
    for position, value in enumerate(operands(node)):
        op = own_maker(value)
        if op is None:
            continue
        bound = bind_node(op)
        what = f"{value} is no data: {bound.rule.op} leaves each rank its own ({bound.pattern})"
        if node.target in transfers.BY_FUNCTION:
            raise of.error(node, f"{what}, and nothing moves it: remove this transfer, and read {value} itself", value)
        if node.op == "output":
            raise of.error(node, f"{what}, so it has no global value: do not return it", value)
        try:
            reads_own = position in bind_node(node).own[0]
        except RuleError:
            return  # check_rule says why
        if not reads_own:
            raise of.error(node, f"{what}, which only its own backward reads; read another result of {op}", value)


def check_drawn(of: Subject, node: fx.Node, record: Record) -> None:
    """Check that an op is split like the one whose random numbers it draws again."""
    other = of.drawn_alike.get(node)
    if other is None:
        return
    mesh = next(need.placed.mesh for need in record.uses if need is not None)
    bound, bound_of_other = bind_node(node), bind_node(other)
    if splits_in_common(bound, split_of(node), bound_of_other, mesh) != splits_in_common(
        bound_of_other, split_of(other), bound, mesh
    ):
        raise of.error(
            node, f"it draws the random numbers of {other} again, and these are others for other pieces: split both "
            f"ops alike", other
        )  # fmt: skip
