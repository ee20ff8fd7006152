"""The registry: op → rule."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.notation import parse_pattern
from autopar.torch_private import OpOverload, OpOverloadPacket

Linear = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Rule:
    """What is known of one op.

    Attributes:
        op: as it prints, ``add.Tensor``.
        pattern: the factors in the notation of ``autopar.notation``, or a function of the op's arguments (tensors are
            given as their types) that returns it, alone or with sizes of factors: ``("(g a) -> g a", {"g": 2})``.
        linear: the operands through which a pending sum may pass: alternatives, each one or several jointly;
            or a function of the arguments that returns them in the notation ``"0, 1+2"``.
        sizes: arguments that are sizes of the result: position → ``"*"`` for its whole shape, or one of its dims.
        view: the op only regroups or reorders elements, so a pending value may wait through it at no cost.
        empty: the op takes pieces without elements; a maximum does not, and some kernels end the process.
    """

    op: str
    pattern: str | Callable[..., Any]
    linear: str | Callable[..., str] = ""
    sizes: Mapping[int, str | int] = field(default_factory=dict)
    view: bool = False
    empty: bool = True

    def resized(self, args: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
        """The op's arguments for a first result of ``shape``: those that are sizes of it say so."""
        new = list(args)
        for position, what in self.sizes.items():
            new[position] = list(shape) if what == "*" else shape[what]  # type: ignore[index]
        return tuple(new)


RULES: dict[OpOverload, Rule] = {}


def rule(
    pattern: str | Callable[..., Any],
    ops: str,
    *,
    linear: str | Callable[..., str] = "",
    sizes: Mapping[int, str | int] | None = None,
    view: bool = False,
    empty: bool = True,
) -> None:
    """One line of a table: the rule of one or several ops (names separated by spaces, ``.default`` left out)."""
    if isinstance(pattern, str):
        parse_pattern(pattern)
    for name in ops.split():
        RULES[overload(name)] = Rule(name, pattern, linear, sizes or {}, view, empty)


def register_rule(
    pattern: str | Callable[..., Any],
    op: str | OpOverload | OpOverloadPacket,
    *,
    linear: str | Callable[..., str] = "",
    sizes: Mapping[int, str | int] | None = None,
) -> None:
    """Tell autopar how an op of yours comes apart: ``register_rule("... d! -> ... d!", "mylib::rope")``.

    Args:
        pattern: operands ``->`` results in factors; see ``autopar.notation``.
        op: a name (``"mylib::rope"``, ``"mylib::rope.overload"``) or ``torch.ops.mylib.rope``.
        linear: the operands through which a pending sum may pass: ``"0"``, ``"0, 1"``, ``"0+1"``.
        sizes: argument positions that are sizes of the result: ``{1: "*"}`` for all of its shape, ``{2: 0}`` for dim 0.

    Raises:
        ValueError: the pattern is not in the notation; it quotes the pattern.
        RuleError: there is no such op.
    """
    if isinstance(pattern, str):
        parse_pattern(pattern)
    found = overload(op) if isinstance(op, str) else op.default if isinstance(op, OpOverloadPacket) else op
    RULES[found] = Rule(op_name(found), pattern, linear, sizes or {})


def overload(name: str) -> OpOverload:
    """``torch.ops.aten.add.Tensor`` for ``add.Tensor``."""
    space, _, rest = name.rpartition("::")
    packet, _, overload_name = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, space or "aten"), packet), overload_name or "default")
    except AttributeError:
        raise RuleError(f"torch has no op {name!r}; write it as 'add.Tensor' or 'library::op'") from None
    if not isinstance(found, OpOverload):
        raise RuleError(f"{name!r} is not an op overload")
    return found


def op_name(op: OpOverload) -> str:
    return op.name().removeprefix("aten::")


def find_rule(op: Any) -> Rule:
    """The rule of an op; ``RuleError`` says how to register one."""
    try:
        return RULES[op]
    except KeyError:
        name = op_name(op) if isinstance(op, OpOverload) else str(op)
        full = name if "::" in name else f"aten::{name}"
        near = difflib.get_close_matches(name, [r.op for r in RULES.values()], n=3, cutoff=0.7)
        hint = f" (rules exist for {', '.join(near)})" if near else ""
        raise RuleError(
            f"no sharding rule for {name}{hint}; if it works element by element, register one in a line:\n"
            f'    autopar.register_rule("... -> ...", "{full}")'
        ) from None


def parse_linear(text: str) -> Linear:
    """``"0+1, 0+2"`` → ``((0, 1), (0, 2))``."""
    return tuple(tuple(int(slot) for slot in one.split("+")) for one in text.split(",") if one.strip())
