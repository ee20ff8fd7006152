"""Look up torch's ops by name, and read their schemas and kernels.

    aten.mm.default          torch.ops.aten.mm.default, or a ``LackingOp``
    op_named("add.Tensor")   the same by its printed name
    present({op: row, …})    the rows whose ops this torch has
    packets("fill_ zero_")   {torch.ops.aten.fill_, torch.ops.aten.zero_}; names_present: {"aten::fill_", …}

What this torch lacks is a skipped line of a table, and no error at import. A test compares ``LACKING`` with what each
version is known to lack, so that a misspelt name is not a skipped line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch._ops import OpOverload as OpOverload  # tried on 2.11 to 2.15: the class of torch.ops.aten.mm.default
from torch._ops import OpOverloadPacket as OpOverloadPacket  # tried on 2.11 to 2.15: the class of torch.ops.aten.mm
from torch.utils import _pytree as pytree  # tried on 2.11 to 2.15: flattens user structures, knows registered classes

from autopar.errors import RuleError
from autopar.torch_private.tracing import FakeTensor

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


# -- schemas -----------------------------------------------------------------------------------------------------------


FLASH_FOR_CPU = (  # tried on 2.11 to 2.15: attention on CPU, and its backward
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


def mutates(op: Any) -> bool:
    """Return whether an overload writes to an argument, by its schema. Tried on 2.11 to 2.15."""
    return isinstance(op, OpOverload) and op._schema.is_mutable


def draws_random(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether a call draws random numbers; it does not if its dropout is 0 or off. Tried on 2.11 to 2.15."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    if is_composite(op):
        return False  # the ops that it consists of decide: dropout in evaluation draws nothing
    if op._schema.name.endswith("_backward"):
        return False  # it draws again from the state that its forward returned
    call_arguments = {
        a.name: args[k] if k < len(args) else a.default_value for k, a in enumerate(op._schema.arguments)
    } | dict(kwargs or {})
    return (
        call_arguments.get("dropout_p") != 0.0
        and call_arguments.get("training") is not False
        and call_arguments.get("train") is not False
    )


def is_composite(op: Any) -> bool:
    """Return whether an overload consists of other ops, which autograd sees. Tried on 2.11 to 2.15."""
    return isinstance(op, OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )


def random_ops() -> list[OpOverload]:
    """Return the ops of tensors that may draw random numbers, without those that consist of others.

    Tried on 2.11 to 2.15.
    """
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    every = [getattr(p, name) for p in packets if isinstance(p, OpOverloadPacket) for name in p.overloads()]
    return [op for op in every if torch.Tag.nondeterministic_seeded in op.tags and not is_composite(op)]


def is_random_composite(op: Any) -> bool:
    """Return whether an overload consists of other ops, some of which draw random numbers. Tried on 2.11 to 2.15."""
    return isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags and is_composite(op)


def operator_schema(op: OpOverload) -> str:
    """Return the schema of a random op's twin.

    For example ``(Tensor self, float p=0.5, *, Tensor seed, int stream, int[]? order=None) -> Tensor``.
    Tried on 2.11 to 2.15.
    """
    parameters, _, returned = str(op._schema).partition("(")[2].rpartition(") -> ")
    without_generator = [parameter.strip() for parameter in parameters.split(", ") if "Generator" not in parameter]
    star = [] if "*" in without_generator else ["*"]
    return f"({', '.join([*without_generator, *star, 'Tensor seed', 'int stream', 'int[]? order=None'])}) -> {returned}"


def overload_of(op: torch.library.CustomOpDef) -> OpOverload:
    """Return the op that ``torch.library.custom_op`` made. Tried on 2.11 to 2.15."""
    return op._opoverload


def with_defaults(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments, all that can be positional by position, with defaults. Tried on 2.11 to 2.15."""
    positional, rest = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:
        if not argument.kwarg_only:
            positional.append(rest.pop(argument.name, argument.default_value))
    return positional, rest


def is_seeded(op: OpOverload) -> bool:
    """Return whether an overload draws random numbers, unless an argument turns that off. Tried on 2.11 to 2.15."""
    return torch.Tag.nondeterministic_seeded in op.tags


def torch_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return overload → torch's decomposition, also of autograd's backward ops. Tried on 2.11 to 2.15."""
    from torch._decomp import global_decomposition_table  # imported late, because it loads all of torch's references

    return global_decomposition_table["post_autograd"]


def kernel_of(op: OpOverload) -> Callable[..., Any]:
    """Return what calling an overload calls, without the Python function around it. Tried on 2.11 to 2.15."""
    return op._op if type(op).__call__ is OpOverload.__call__ else op


def functional_name(op: OpOverload) -> tuple[str, str]:
    """Return packet and overload of an in-place op's functional form: ``("add", "Tensor")``. Tried on 2.11 to 2.15."""
    return op._opname.removesuffix("_"), op._overloadname


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, by its schema. Tried on 2.11 to 2.15."""
    tensors = []
    for position, argument in enumerate(op._schema.arguments if mutates(op) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += [tensor for tensor in pytree.tree_leaves(value) if isinstance(tensor, torch.Tensor)]
    return tensors


def writes_outside(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call under fake tensors writes into a real tensor, which existed before.

    Tried on 2.11 to 2.15.
    """
    if not mutates(op):
        return False
    written = [
        k
        for k, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(
        isinstance(args[k], torch.Tensor) and not isinstance(args[k], FakeTensor) for k in written if k < len(args)
    )


def tensor_arguments(op: OpOverload) -> list[tuple[int, str, bool]]:
    """Return (position, name, is a list) of each tensor argument in the schema. Tried on 2.11 to 2.15."""
    arguments = []
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if "Tensor" in kind:
            arguments.append((position, argument.name, "List" in kind))
    return arguments


def tensor_results(op: OpOverload) -> list[bool]:
    """Return for each result of the schema that contains tensors whether it is a list. Tried on 2.11 to 2.15."""
    kinds = [str(result.type) for result in op._schema.returns]
    return ["List" in kind for kind in kinds if "Tensor" in kind]


def returns_alias(op: Any) -> bool:
    """Return whether a result of an overload may share memory with an argument, by its schema.

    Tried on 2.11 to 2.15.
    """
    return not isinstance(op, OpOverload) or any(result.alias_info is not None for result in op._schema.returns)


def changes_operands(op: OpOverload) -> bool:
    """Return whether an overload writes to an argument, by its schema. Tried on 2.11 to 2.15."""
    return bool(op._schema.is_mutable)


assert_without_sync = (
    torch._assert_async
)  # tried on 2.11 to 2.15: an error where a tensor is false, without waiting for the device


@functools.cache
def has_kernel(op: OpOverload, device: str) -> bool:
    """Return whether an overload runs on devices of a type. Tried on 2.11 to 2.15."""
    return not isinstance(op, LackingOp) and torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), torch._C._dispatch_key_for_device(device)
    )


def number_arguments(op: OpOverload) -> list[tuple[int, str]]:
    """Return (position, name) of each argument that may be one number: no size, dim or flag. Tried on 2.11 to 2.15."""
    return [
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if str(argument.type).removeprefix("Optional[").removesuffix("]") in ("number", "float", "Tensor")
    ]
