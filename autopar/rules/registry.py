"""Register the sharding rules of ops, and look them up."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from autopar.errors import RuleError, shown
from autopar.ir.ops.seeded_random import FUSED_DROPOUT, source_of, twin_of, with_seed
from autopar.rules.notation import ELLIPSIS, OWN, Pattern, parse_pattern
from autopar.torch_private import (
    OpOverload,
    OpOverloadPacket,
    find_op,
    is_seeded,
    mutates,
    op_named,
    overload_of,
    tensor_arguments,
    tensor_results,
)

# -- work --------------------------------------------------------------------------------------------------------------
#
# Parse the work of an op, its floating point operations, in the factors of its rule: ``2 m k n``.
#
# Terms are joined by ``+``; each is a product of numbers and factors. A number is whole or a quotient, ``1/3``. ``...``
# stands for all leading dims. A factor may occur twice: ``... i i c``. Additions and multiplications count as one
# operation each, so a sum of products has a 2.


@dataclass(frozen=True)
class Term:
    """A product of a number, ``times / over``, and of factors."""

    times: int
    over: int
    factors: tuple[str, ...]

    def count(self, sizes: Mapping[str, int]) -> int:
        """Return the operations for factors of these sizes, rounded down."""
        return self.times * math.prod([sizes[factor] for factor in self.factors]) // self.over


Work = tuple[Term, ...]

_WORD = re.compile(r"(?P<number>[0-9]+(/0*[1-9][0-9]*)?)|(?P<factor>[A-Za-z_][A-Za-z0-9_]*|\.\.\.)")


@cache
def parse_work(text: str) -> Work:
    """Read a work; ``ValueError`` quotes it and says what is wrong with it. An empty text is no work."""
    return tuple(_term(text, term) for term in text.split("+")) if text.strip() else ()


def _term(text: str, term: str) -> Term:
    times, over, factors = 1, 1, []
    if not term.strip():
        raise ValueError(f"work {text!r}: a term between '+' is empty; write a work as '2 m k n + m n'")
    for word in term.split():
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(
                f"work {text!r}: {word!r} is neither a number nor a factor; write a work as '2 m k n + m n'"
            )
        if match["number"]:
            above, _, below = word.partition("/")
            times, over = times * int(above), over * int(below or 1)
        else:
            factors.append(word)
    return Term(times, over, tuple(factors))


def check_work(text: str, pattern: Pattern) -> None:
    """Check that a work has no other factors than a rule; ``ValueError`` quotes both."""
    known = {factor for side in (*pattern.operands, *pattern.results) for dim in side for factor in dim}
    for term in parse_work(text):
        for factor in term.factors:
            if factor not in known:
                raise ValueError(
                    f"rule {pattern.text!r}: its work {text!r} has the factor {factor!r}, which the rule does not "
                    f"have; it has {', '.join(sorted(known)) or 'none'}"
                )


def bound_work(text: str, factors: Collection[str]) -> Work:
    """Return the work of one call, with ``...`` replaced by its factors.

    Terms with factors of operands that the call leaves out do not count.
    """
    leading = tuple(factor for factor in factors if factor.startswith(ELLIPSIS))
    terms = []
    for term in parse_work(text):
        opened = tuple(f for factor in term.factors for f in (leading if factor == ELLIPSIS else (factor,)))
        if all(factor in factors for factor in opened):
            terms.append(replace(term, factors=opened))
    return tuple(terms)


# -- registry ----------------------------------------------------------------------------------------------------------


Linear = tuple[tuple[int, ...], ...]
Size = str | int | Callable[[Sequence[Any], Sequence[int], Mapping[str, int]], Any]


@dataclass(frozen=True)
class Rule:
    """How one op can be sharded.

    Attributes:
        op: the printed name, ``add.Tensor``.
        pattern: the factors in the notation of ``autopar.rules.notation``, or a function of the op's arguments (types
            in place of tensors) that returns it, alone or with sizes of factors: ``("(g a) -> g a", {"g": 2})``; the
            function returns ``None`` if all dims stay whole. A pattern of ``None`` means that the op has no rule.
        linear: the operands through which a pending sum may pass: alternatives, each one or several jointly;
            or a function of the arguments that returns them in the notation ``"0, 1+2"``.
        sizes: arguments that are sizes: position → ``"*"`` for the whole shape of the (first) result, one of its dims,
            factors whose sizes are multiplied (``"g c"``), or a function of the arguments, the result's shape and the
            factors.
        view: the op only regroups or reorders elements, so a pending value may wait through it at no cost.
        empty: whether the op accepts pieces without elements; a maximum does not, and some kernels crash.
        work: the floating point operations in the notation of ``autopar.rules.registry``, ``"2 m k n"``; or a function
            of the arguments that returns them. Empty: none that count beside reading and writing.
        layouts: for an op that runs in one choice of layouts alone, a function of its arguments, the types of its
            results and the mesh that returns them, for operands and results. All factors are whole then.
    """

    op: str
    pattern: str | Callable[..., Any] | None
    linear: str | Callable[..., str] = ""
    sizes: Mapping[int, Size] = field(default_factory=dict)
    view: bool = False
    empty: bool = True
    work: str | Callable[..., str] = ""
    layouts: Callable[..., Any] | None = None

    @property
    def counts_factors(self) -> bool:
        """Whether sizes of factors are among the arguments, or needed to compute them."""
        return any(callable(size) or (isinstance(size, str) and size != "*") for size in self.sizes.values())

    def resized(self, args: Sequence[Any], shape: Sequence[int], factors: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the op's arguments for a first result of ``shape`` and factors of these sizes."""
        new = list(args)
        for position, size in self.sizes.items():
            if position >= len(args):
                continue  # left out
            if isinstance(size, str):
                new[position] = list(shape) if size == "*" else math.prod(factors[factor] for factor in size.split())
            else:
                new[position] = size(args, shape, factors) if callable(size) else shape[size]
        return tuple(new)


RULES: dict[OpOverload, Rule] = {}
WITHOUT: dict[OpOverload, Rule] = {}  # ops that have been used and have no rule
REGISTERED: dict[str, Rule] = {}  # the rules of users, by the names of ops


def rule(
    pattern: str | Callable[..., Any],
    ops: str,
    *,
    linear: str | Callable[..., str] = "",
    sizes: Mapping[int, Size] | None = None,
    view: bool = False,
    empty: bool = True,
    work: str | Callable[..., str] = "",
) -> None:
    """Define the rule of one or several ops (names separated by spaces, without ``.default``): one line of a table."""
    if isinstance(pattern, str):
        parse_pattern(pattern)
    _check_work(work, pattern)
    for name in ops.split():
        if op := op_named(name):
            RULES[op] = Rule(name, pattern, linear, sizes or {}, view, empty, work)
            if name in FUSED_DROPOUT:
                add_twin(op)


def _check_work(work: str | Callable[..., str], pattern: str | Callable[..., Any]) -> None:
    """Check a work as far as it is known without a call: a function's factors and text are checked when it is bound."""
    if isinstance(work, str) and isinstance(pattern, str):
        check_work(work, parse_pattern(pattern))
    elif isinstance(work, str):
        parse_work(work)


def register_rule(
    pattern: str | Callable[..., Any],
    op: str | OpOverload | OpOverloadPacket,
    *,
    linear: str | Callable[..., str] = "",
    sizes: Mapping[int, str | int] | None = None,
    work: str | Callable[..., str] = "",
) -> None:
    """Define how an op of yours can be sharded: ``register_rule("... d! -> ... d!", "mylib::rope")``.

    The rule is trusted: a wrong rule gives wrong numbers. ``autopar.runtime.discovery.proof.prove(op, args)`` tests
    each of its claims on a call. A second rule for an op replaces the first.

    Args:
        pattern: operands ``->`` results in factors; see ``autopar.rules.notation``.
        op: a name (``"mylib::rope"``, ``"mylib::rope.overload"``), ``torch.ops.mylib.rope``, or what
            ``torch.library.custom_op`` made.
        linear: the operands through which a pending sum may pass: ``"0"``, ``"0, 1"``, ``"0+1"``.
        sizes: argument positions that are sizes of the result: ``{1: "*"}`` for all of its shape, ``{2: 0}`` for dim 0.
        work: the floating point operations in factors, from which the op's price is computed: ``"2 m k n"``, or a
            function of the arguments that returns them; see ``parse_work``. An op without work costs what it reads
            and writes.

    Raises:
        ValueError: the pattern or the work is not in the notation, or the work has a factor that the pattern lacks; the
            error quotes it.
        TypeError: ``pattern`` is neither a pattern nor a function, ``op`` neither a name nor an op of ``torch.ops``, or
            ``work`` neither a text nor a function.
        RuleError: there is no such op, or the pattern has another number of operands or results than the op.
    """
    if not isinstance(pattern, str) and not callable(pattern):
        raise TypeError(f'{shown(pattern)} is not a pattern; write one as "... -> ...", or a function that returns one')
    if not isinstance(work, str) and not callable(work):
        raise TypeError(f'{shown(work)} is no work; write one as "2 m k n", or a function that returns one')
    op_overload = _op(op)
    if isinstance(pattern, str):
        _check_counts(pattern, op_overload)
        _check_results(parse_pattern(pattern), sizes or {})
    _check_work(work, pattern)
    made = Rule(op_name(op_overload), pattern, linear, sizes or {}, work=work)
    RULES[op_overload] = REGISTERED[str(op_overload)] = made
    if is_seeded(op_overload):
        add_twin(op_overload)


def add_twin(op: OpOverload) -> None:
    """Give the twin of a random op, which capture puts in its place, the same rule with one operand more: the seed."""
    made, twin = RULES[op], twin_of(op)
    assert made.pattern is not None
    RULES[twin] = replace(
        made,
        op=op_name(twin),
        pattern=with_seed(made.pattern),
        linear=made.linear if isinstance(made.linear, str) else "",
        work=_without_seed(made.work) if callable(made.work) else made.work,
    )


def _without_seed(work: Callable[..., str]) -> Callable[..., str]:
    """Return the work of a twin, which has arguments more than its op."""
    return lambda *args, seed, stream, order=None, **kwargs: work(*args, **kwargs)


def _op(op: object) -> OpOverload:
    if isinstance(op, OpOverload):
        return op
    if isinstance(op, str):
        return overload(op)
    if isinstance(op, OpOverloadPacket):
        return _member(op, "default")
    if isinstance(op, torch.library.CustomOpDef):
        return overload_of(op)
    name = getattr(op, "__name__", None)
    remedy = (
        f"torch.ops.aten.{name}" if name and hasattr(torch.ops.aten, name) else 'torch.ops.mylib.rope or "mylib::rope"'
    )
    raise TypeError(f"{shown(op)} is not an op; give {remedy}")


def _check_counts(text: str, op: OpOverload) -> None:
    pattern = parse_pattern(text)
    operands, results = _counts(op)
    for kind, has, wanted in (("operand", len(pattern.operands), operands), ("result", len(pattern.results), results)):
        if wanted is not None and has != wanted:
            names = (
                f": {', '.join(name for _, name, _ in tensor_arguments(op))}" if kind == "operand" and wanted else ""
            )
            raise RuleError(
                f"rule {text!r} has {has} {kind}{'s' * (has != 1)}, {op.name()} has "
                f"{wanted}{names}{_fitting_overloads(pattern, op)}"
            )


def _check_results(pattern: Pattern, sizes: Mapping[int, Size]) -> None:
    known = {factor for dims in pattern.operands for dim in dims for factor in dim} | pattern.whole | {OWN}
    new = sorted({factor for dims in pattern.results for dim in dims for factor in dim} - known)
    if new and not sizes:
        raise RuleError(
            f"rule {pattern.text!r}: the factor {new[0]!r} of its result is in no operand, so no rank knows its "
            f"piece; write '{new[0]}!' if it stays whole, or name the arguments that are sizes of it, with sizes="
        )


def _fitting_overloads(pattern: Pattern, op: OpOverload) -> str:
    """Return the overloads of the same op that the pattern fits.

    ``torch.ops.aten.mul`` without overload takes numbers.
    """
    others = [getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()]
    counts = (len(pattern.operands), len(pattern.results))
    fitting = [other.name() for other in others if not mutates(other) and _counts(other) == counts]
    return f"; it fits {', '.join(fitting[:3])}" if fitting else ""


def _counts(op: OpOverload) -> tuple[int | None, int | None]:
    """Return how many operands and results a rule of ``op`` has; ``None`` if it has a list of tensors."""
    operands = [many for _, _, many in tensor_arguments(op)]
    results = tensor_results(op)
    return None if any(operands) else len(operands), None if any(results) else len(results)


def overload(name: str) -> OpOverload:
    """Return ``torch.ops.aten.add.Tensor`` for ``add.Tensor``."""
    if op := find_op(name):
        return op
    space, _, path = name.rpartition("::")
    op_packet = getattr(getattr(torch.ops, space or "aten"), path.partition(".")[0], None)
    if not isinstance(op_packet, OpOverloadPacket):
        raise RuleError(f"torch has no op {name!r}; write it as 'add.Tensor' or 'library::op'")
    return _member(op_packet, path.partition(".")[2] or "default")


def _member(packet: OpOverloadPacket, name: str) -> OpOverload:
    if name not in packet.overloads():
        op = str(packet).replace(".", "::", 1)
        raise RuleError(
            f"{op} has no overload {name!r}; name one of {', '.join(f'{op}.{other}' for other in packet.overloads())}"
        )
    return getattr(packet, name)


def op_name(op: OpOverload) -> str:
    return op.name().removeprefix("aten::")


def find_rule(op: Any) -> Rule:
    """Return the rule of an op; ``RuleError`` says how to register one."""
    try:
        return RULES[op]
    except KeyError:
        op = source_of(op)
        name = op_name(op) if isinstance(op, OpOverload) else str(op)
        near = difflib.get_close_matches(name, [r.op for r in RULES.values()], n=3, cutoff=0.7)
        hint = f" (rules exist for {', '.join(near)})" if near else ""
        raise RuleError(f"no sharding rule for {name}{hint}{_remedy(op)}") from None


def rule_of(op: Any) -> Rule:
    """Return the rule of an op, or for an op without one the rule that all dims stay whole."""
    if op not in RULES and isinstance(op, OpOverload):
        return WITHOUT.setdefault(op, Rule(op_name(op), None))
    return find_rule(op)


def _remedy(op: Any) -> str:
    """Return the line that registers a rule of ``op``, with its operands and results."""
    if not isinstance(op, OpOverload):
        return ""
    counts = _counts(op)
    if None in counts or not all(counts):  # the arguments decide the numbers of operands and results
        return (
            f"; register a function of its arguments that returns its pattern:\n    "
            f'autopar.register_rule(pattern_of, "{op.name()}")'
        )
    pattern = " -> ".join(", ".join(["..."] * (count or 0)) for count in counts)
    return (
        "; if it works element by element, register one in a line:\n"
        f'    autopar.register_rule("{pattern}", "{op.name()}")'
    )


def parse_linear(text: str) -> Linear:
    """Parse ``"0+1, 0+2"`` as ``((0, 1), (0, 2))``."""
    return tuple(
        tuple(int(slot) for slot in alternative.split("+")) for alternative in text.split(",") if alternative.strip()
    )
