"""Read the schemas and kernels of ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree  # tried on 2.11 to 2.15: flattens user structures, knows registered classes

from autopar.torch_private.ops import LackingOp, OpOverload, OpOverloadPacket, aten
from autopar.torch_private.tracing import FakeTensor

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
