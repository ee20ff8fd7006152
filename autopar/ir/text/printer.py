"""Print programs, records, types and arguments in the grammar of ``GRAMMAR.md``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from autopar.errors import shown
from autopar.ir import transfers
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import is_getitem, operands, record_of
from autopar.ir.program_data import ProgramData
from autopar.ir.record import DTYPE_NAMES, Record, Requirement, TensorType, ValueType
from autopar.ir.sizes import Size, values_text
from autopar.ir.subaxes import sub_axis
from autopar.ir.text.tokens import LITERALS, RESERVED
from autopar.torch_private import OpOverload


def print_program(program: ProgramData, *, comments: bool = False) -> str:
    lines = _header(program)
    phase, next_values = "", _next_values(program)
    for node in program.nodes:
        record = record_of(node)
        if node.op == "output":
            lines += _results(program, node, record)
            continue
        introduced = node.op == "placeholder" and not phase and record.phase == "forward"
        if not introduced and record.phase != phase:
            phase = record.phase
            lines.append(f"{phase}:")
        line = _line(program, node, record, next_values)
        if comments and (about := "  ".join(part for part in (record.module, record.source) if part)):
            line += f"  # {about}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _header(program: ProgramData) -> list[str]:
    head = f"program {program.level}"
    if program.mesh is not None:
        head += f" on {_mesh(program.mesh)}"
    if program.coordinates is not None:
        head += " at" + "".join(f" {axis}={index}" for axis, index in program.coordinates.items())
    lines = [head]
    if program.sizes:
        lines.append(f"sizes {values_text(program.sizes)}")
    lines += [f"stage {name} on {_mesh(mesh)}" for name, mesh in program.stages.items()]
    lines += [f"stream {name}" for name in program.streams]
    return lines


def _mesh(mesh: Mesh) -> str:
    ranks = "" if mesh.ranks == tuple(range(mesh.size)) else f" ranks {' '.join(map(str, mesh.ranks))}"
    return f"{mesh if mesh.axes else '()'}{ranks}"


def print_node(program: ProgramData, node: fx.Node) -> str:
    """Return the line of one value."""
    record = record_of(node)
    return _line(program, node, record, _next_values(program) if record.role == "state" else {})


def print_op(program: ProgramData, node: fx.Node) -> str:
    """Return the line of the op that computes a value, for messages.

    A collective that is started or waited for prints as one line, as before it was scheduled: ``y : f32[8 4] =
    all_reduce(x, tp)``.
    """
    started = node.args[0] if node.target is transfers.wait else node
    if not isinstance(started, fx.Node) or not record_of(started).started:
        return print_node(program, node)
    waited = next((user for user in started.users if user.target is transfers.wait), started)
    record = record_of(started)._replace(type=record_of(waited).type, started=False, stream=None)
    return f"  {waited.name} : {print_type(record.type)} = {_call(started, record)}"


def _next_values(program: ProgramData) -> dict[str, str]:
    """Return the next value of each state, by name."""
    if not any(record_of(node).role == "state" for node in program.placeholders):
        return {}
    results = zip(operands(program.output), record_of(program.output).results, strict=False)
    return {result.of: value.name for value, result in reversed([*results]) if result.kind == "state"}


def _line(program: ProgramData, node: fx.Node, record: Record, next_values: Mapping[str, str]) -> str:
    if node.op == "placeholder":
        definition = _placeholder(node, record, next_values)
    elif node.op == "get_attr":
        constant = program.constants[str(node.target)]
        content = constant.content
        definition = f"constant({content!r})" if isinstance(content, str) else f"constant({print_literal(content)})"
    else:
        definition = _call(node, record)
    return f"  {node.name} : {print_type(record.type)} = {definition}{_issued(record)}"


def _issued(record: Record) -> str:
    """Return the stream on which an op runs, and the message and the elements that a started collective sends."""
    if record.stream is None:
        return ""
    message = f" in {record.message}" if record.message else ""
    span = f" from {record.span[0]} to {record.span[1]}" if record.span else ""
    return f" on {record.stream}{message}{span}"


def _placeholder(node: fx.Node, record: Record, next_values: Mapping[str, str]) -> str:
    inner = [repr(record.name)] if record.name not in ("", node.name) else []
    if record.index is not None:
        inner.insert(0, str(record.index))
    if record.role == "state":
        inner.insert(0, next_values.get(node.name, "?"))
    return f"{record.role}({', '.join(inner)})" if inner else record.role


def _call(node: fx.Node, record: Record) -> str:
    operand, target = _Operands(node, record), node.target
    if is_getitem(node):
        return f"{operand(node.args[0])}[{node.args[1]}]"
    bare = target in transfers.BY_FUNCTION
    args = [_argument(value, operand, bare) for value in node.args]
    if kwargs := node.kwargs:
        args += [f"{key}={_argument(value, operand, bare)}" for key, value in kwargs.items()]
    start = "start " if record.started else ""
    return f"{start}{target_name(target)}({', '.join(args)})"


class _Operands:
    """Write operands in order, with the requirement where it differs from the value."""

    def __init__(self, node: fx.Node, record: Record) -> None:
        self.uses, self.position = record.uses, -1

    def __call__(self, operand: Any) -> str:
        self.position += 1
        need = self.uses[self.position] if self.uses else None
        if need is None:
            return operand.name
        value = record_of(operand).type
        if not isinstance(value, TensorType) or (need.layout is value.layout and need.dtype is value.dtype):
            return operand.name
        if (need.layout, need.dtype) == (value.layout, value.dtype):
            return operand.name
        return f"{operand.name} as {print_requirement(need, value)}"


def _argument(value: Any, operand: Callable[[Any], str], bare: bool = False) -> str:
    if isinstance(value, fx.Node):
        return operand(value)
    if isinstance(value, (tuple, list)):
        return _brackets(value, [_argument(v, operand, bare) for v in value])
    if bare and isinstance(value, str) and value not in RESERVED and (value.isidentifier() or sub_axis(value)):
        return value
    return print_literal(value)


def _brackets(value: Sequence[Any], inner: list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(inner)}]"
    return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"


def print_literal(value: Any) -> str:
    """Return a scalar argument as text; ``TypeError`` if the grammar has no form for it."""
    if value.__class__ is int or value.__class__ is Size:
        return repr(value)
    if isinstance(value, (tuple, list)):
        return _brackets(value, [print_literal(v) for v in value])
    if isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format, type(None))) and value in LITERALS:
        return LITERALS[value]
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, (int, str)):
        return repr(value)
    if isinstance(value, complex):
        return f"complex({print_literal(value.real)}, {print_literal(value.imag)})"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    raise TypeError(f"the program's text has no form for {shown(value)} of type {type(value).__name__}")


def target_name(target: Any) -> str:
    """Return the printed name of an op or transfer: ``mm``, ``add.Tensor``, ``mylib::op.overload``, ``all_gather``."""
    if target in transfers.BY_FUNCTION:
        return transfers.BY_FUNCTION[target].name
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", repr(target))
    space, _, name = target.name().partition("::")  # without the overload name "default"
    bare = space == "aten" and name not in transfers.TRANSFERS
    return name if bare else f"{space}::{name}"


def _results(program: ProgramData, node: fx.Node, record: Record) -> list[str]:
    operand = _Operands(node, record)
    written = [operand(value) for value in operands(node)]
    kinds = [result.kind for result in record.results]
    leaves = [text for text, kind in zip(written, kinds, strict=True) if kind == "return"]
    lines = []
    if program.tree:
        lines.append("  return " + program.tree[0] + "".join(map("".join, zip(leaves, program.tree[1:], strict=True))))
    for text, result in zip(written, record.results, strict=True):
        if result.kind == "grad" or (result.kind == "state" and " as " in text):
            lines.append(f"  {result.kind} {result.of} = {text}")
    return lines


def print_type(value: ValueType) -> str:
    """Return a type as text, ``f32[32/dp 64] +tp @s1``; a tuple of them for ops with several results."""
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"({', '.join(map(print_type, value))})"
    return _print_tensor(value)


@lru_cache(maxsize=65536)
def _print_tensor(type: TensorType) -> str:
    return DTYPE_NAMES[type.dtype] + _placed(type.shape, type.attr, None if type.layout is None else type.layout.mesh)


def print_requirement(need: Requirement, value: TensorType) -> str:
    """Return the text after ``as``: the dtype only if it differs from the value's.

    At the level ``traced`` the dtype is alone.
    """
    if need.layout is None:
        return DTYPE_NAMES[need.dtype]
    dtype = "" if need.dtype == value.dtype else DTYPE_NAMES[need.dtype]
    return dtype + _placed(value.shape, need.layout.attr, need.layout.mesh)


def _placed(shape: Sequence[int], attr: DistAttr, mesh: Mesh | None) -> str:
    stage = "" if mesh is None or mesh.name is None else f" @{mesh.name}"
    return f"[{print_dims(shape, attr)}]{print_pending(attr)}{stage}"


def print_dims(shape: Sequence[int], attr: DistAttr) -> str:
    """Return the dims as text: ``32/dp (4 128/tp)``."""
    out = []
    for size, dim in zip(shape, attr.dims, strict=True):
        parts = ["/".join([str(size if part is None else part), *axes]) for part, axes in dim]
        out.append(parts[0] if len(parts) == 1 else f"({' '.join(parts)})")
    return " ".join(out)


def print_pending(attr: DistAttr) -> str:
    """Return the pending axes as text: `` +tp`` or `` +max:tp``."""
    return "".join(f" +{axis}" if kind == "sum" else f" +{kind}:{axis}" for axis, kind in attr.pending)
