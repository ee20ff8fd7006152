"""Look up torch's ops by name. What this torch lacks is a skipped line of a table, and no error at import.

    aten.mm.default          torch.ops.aten.mm.default, or a ``LackingOp``
    op_named("add.Tensor")   the same by its printed name
    present({op: row, …})    the rows whose ops this torch has
    packets("fill_ zero_")   {torch.ops.aten.fill_, torch.ops.aten.zero_}; names_present: {"aten::fill_", …}

A test compares ``LACKING`` with what each version is known to lack, so that a misspelt name is not a skipped line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch._ops import OpOverload as OpOverload  # tried on 2.11 to 2.15: the class of torch.ops.aten.mm.default
from torch._ops import OpOverloadPacket as OpOverloadPacket  # tried on 2.11 to 2.15: the class of torch.ops.aten.mm

from autopar.errors import RuleError

Key = TypeVar("Key")
Row = TypeVar("Row")

LACKING: set[str] = set()  # the ops that autopar has asked for, and this torch does not have


class LackingOp:
    """Stands for an op that this torch does not have: no program contains it, and it cannot be called."""

    def __init__(self, name: str) -> None:
        self.name = name
        LACKING.add(name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuleError(f"torch {torch.__version__} has no op {self.name}, which autopar needs here")

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"LackingOp({self.name!r})"


def find_op(name: str) -> OpOverload | None:
    """Return ``torch.ops.aten.add.Tensor`` for ``add.Tensor`` or ``aten::add.Tensor``; ``None`` if there is none."""
    space, _, path = name.rpartition("::")
    packet, _, overload = path.partition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, space or "aten"), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None
    return op if isinstance(op, OpOverload) else None


def op_named(name: str) -> Any:
    """Return an op for a table or a constant; a ``LackingOp``, which is false, if this torch does not have it."""
    return find_op(name) or LackingOp(name if "::" in name else f"aten::{name}")


def present(table: Mapping[Key, Row]) -> dict[Key, Row]:
    """Return the rows of a table without those of an op that this torch lacks: as key, as value or in a tuple."""
    return {key: row for key, row in table.items() if not _lacks(key) and not _lacks(row)}


def packets(names: str) -> frozenset[OpOverloadPacket]:
    """Return the packets ``torch.ops.aten.fill_`` of these names, separated by spaces, that this torch has."""
    return frozenset(getattr(torch.ops.aten, name.removeprefix("aten::")) for name in names_present(names))


def names_present(names: str) -> frozenset[str]:
    """Return ``aten::fill_`` for each of these names, separated by spaces, that this torch has."""
    found = {f"aten::{name}": hasattr(torch.ops.aten, name) for name in names.split()}
    LACKING.update(name for name, is_there in found.items() if not is_there)
    return frozenset(name for name, is_there in found.items() if is_there)


def _lacks(row: object) -> bool:
    return any(isinstance(part, LackingOp) for part in row) if isinstance(row, tuple) else isinstance(row, LackingOp)


class _Packet:
    """The overloads of a name: ``aten.add``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):
            raise AttributeError(overload)
        op = op_named(self._name if overload == "default" else f"{self._name}.{overload}")
        setattr(self, overload, op)
        return op


class _Space:
    """The ops of a namespace."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, packet: str) -> _Packet:
        if packet.startswith("__"):
            raise AttributeError(packet)
        made = _Packet(f"{self._name}::{packet}")
        setattr(self, packet, made)
        return made


aten, prims = _Space("aten"), _Space("prims")
