"""Find the rule of each op; refuse ops that ranks would compute differently, and note those without a rule."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from autopar.capture.provenance import warn_user
from autopar.errors import RuleError, at_line
from autopar.ir.nodes import called_op, is_getitem, operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Record, TensorType
from autopar.rules.binding import bind_node
from autopar.rules.registry import rule_of
from autopar.rules.strategies import Bound
from autopar.transitions import cost

# -- usable rules ------------------------------------------------------------------------------------------------------
#
# Find the rule of each op that is placed, and refuse ops that ranks would compute differently.


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


# -- ops without rule --------------------------------------------------------------------------------------------------


OF_TORCH = ("aten", "prims", "autopar", "_c10d_functional", "higher_order")
TRIED = (
    "the sharding rule of {op} was found by running it on some values, and an op that treats other values otherwise "
    "would be wrong on a mesh: if the rule is right, register it before parallelize\n    {line}{place}"
)
_warned: set[str] = set()


def notes_without_rule(program: Program) -> list[str]:
    """Note for each op without a rule, with the user's line, the rule that was discovered.

    If none was, the note says that every rank computes all of it.
    """
    discovered: dict[tuple[str, str], list[fx.Node]] = {}
    whole: dict[tuple[str, str, str], list[fx.Node]] = {}
    for node in program.nodes:
        if node.op == "call_function" and not is_getitem(node) and rule_of(node.target).pattern is None:
            bound = bind_node(node)
            if bound.rule.pattern is None:
                whole.setdefault((bound.rule.op, bound.why, where(record_of(node))), []).append(node)
            else:
                discovered.setdefault((_registered(node, bound), where(record_of(node))), []).append(node)
    texts = []
    for (line, place), nodes in discovered.items():
        _warn(called_op(nodes[0]).name(), line, place)
        texts.append(
            f"{rule_of(nodes[0].target).op} has no sharding rule: one was found by running it on pieces ({len(nodes)} "
            f"times); register it to be certain, and to silence this note\n    {line}{place}"
        )
    for (op, why, place), nodes in whole.items():
        gathered, computed = (sum(map(bytes_of, nodes)) for bytes_of in (_gathered, _made))
        texts.append(
            f"{op} has no sharding rule, and none was found: {why}; each rank computes all of it, on whole operands "
            f"({len(nodes)} times, {gathered:,} bytes gathered, {computed:,} bytes of results); register_rule one, or "
            f"refuse it with strict=True{place}"
        )
    return texts


def _warn(op: str, line: str, place: str) -> None:
    """Warn once of each op of the user's whose rule holds on the tried values, and perhaps not on others."""
    if op.partition("::")[0] not in OF_TORCH and op not in _warned:
        _warned.add(op)
        warn_user(TRIED.format(op=op, line=line, place=place))


def _registered(node: fx.Node, bound: Bound) -> str:
    """Return the line that registers the discovered rule."""
    linear = f', linear="{bound.rule.linear}"' if bound.rule.linear else ""
    return f'autopar.register_rule("{bound.pattern}", "{called_op(node).name()}"{linear})'


def _gathered(node: fx.Node) -> int:
    """Return the bytes that the worst rank receives so that an op's operands have the required layouts."""
    pairs = [(record_of(value).type, use) for value, use in zip(operands(node), record_of(node).uses, strict=True)]
    return sum(
        cost(type, replace(type, layout=use.layout))
        for type, use in pairs
        if isinstance(type, TensorType) and use is not None
    )


def _made(node: fx.Node) -> int:
    """Return the bytes of all results of an op."""
    type = record_of(node).type
    types = type if isinstance(type, tuple) else (type,)
    return sum(math.prod(result.shape) * result.dtype.itemsize for result in types if result is not None)
