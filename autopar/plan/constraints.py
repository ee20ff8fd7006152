"""Apply a plan to a captured step: translate layouts of names into layouts of the program's values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from autopar.capture import Captured
from autopar.capture.naming import Names, Part, names_of
from autopar.errors import PlanError, shown
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, record_of
from autopar.ir.record import TensorType, ValueType
from autopar.ir.text.printer import print_dims, print_type
from autopar.plan.boundary import OPEN, UserConstraints, agreed, filled
from autopar.plan.plan import (
    Constraints,
    Plan,
    needed_whole_note,
    parts_note,
    resolve,
    searches,
    unused_axes,
    whole_note,
)
from autopar.plan.spec import attr_of


def layouts_of(
    plan: Plan | None, model: torch.nn.Module, mesh: Mesh, inputs: Mapping[str, Sequence[int]] | None = None
) -> dict[str, DistAttr]:
    """Return name → DistAttr for parameters, buffers and ``inputs`` (name → shape).

    Values without a layout are replicated. ``PlanError`` as for ``resolve``.
    """
    names = names_of(model)
    return resolve(
        plan,
        mesh,
        names.shapes,
        inputs,
        names.aliases,
        through=names.through,
        parts=names.parts,
        buffers=names.shapes.keys() - names.parameters,
        calls=False,
    ).attrs


def layouts_without_search(
    plan: Plan | None, model: torch.nn.Module, mesh: Mesh, inputs: Mapping[str, Sequence[int]]
) -> dict[str, DistAttr]:
    """Return input → DistAttr for ``inputs`` that are not searched: as the plan names them, or else the defaults.

    Dims that the plan leaves to the search are open.
    """
    attrs = {name: attr for name, attr in layouts_of(plan, model, mesh, inputs).items() if name in inputs}
    if searches(plan) and not any(attr.axes for attr in attrs.values()):
        others = {name: shape for name, shape in inputs.items() if name not in attrs}
        attrs |= {name: attr for name, attr in layouts_of([], model, mesh, others).items() if name in others}
    return attrs


class Decisions(NamedTuple):
    """The notes of a report about a plan.

    Attributes:
        notes: decisions that were made for the user.
        unmatched: names of presets that match nothing.
        search: whether the layouts of all values without a constraint are searched.
    """

    notes: tuple[str, ...]
    unmatched: tuple[str, ...]
    search: bool = False


def constraints(plan: Plan | None, model: torch.nn.Module, mesh: Mesh, captured: Captured,
                layouts: Mapping[str, DistAttr] | None = None,
                names: Names | None = None) -> tuple[UserConstraints, Decisions]:  # fmt: skip
    """Return node → DistAttr for placeholders and for values that modules return, and notes of decisions.

    The decisions were made for the user. In a search, dims of placeholders may be undecided, too.

    Args:
        layouts: the layouts of parameters and inputs that are decided without the plan.
        names: the names of the model's tensors, where they are known.

    Raises:
        PlanError: the plan is wrong, or it gives two layouts to one value that two modules return.
    """
    records = {node.name: record_of(node) for node in captured.program.placeholders}
    names = names_of(model) if names is None else names
    users = {
        placeholder: placeholder if r.role == "input" and r.name in names.shapes else r.name or placeholder
        for placeholder, r in records.items()
        if r.role not in ("tangent", "seed")
    }
    inputs = {users[p]: _shape(r.type) for p, r in records.items() if r.role == "input"}
    types = {node.name: record_of(node).type for node in captured.program.nodes}
    returned = [
        (f"{path}()", name) for path, values in captured.modules.items() for name in values if name not in records
    ]
    outputs = {call: _shape(types[name]) for call, name in reversed(returned)}
    through = [*names.through, *((f"{spelled}()", f"{path}()") for path, spelled in names.paths.items())]
    parts = [
        part
        for part in names.parts
        if outputs.get(part.name, names.shapes[part.base]) == names.shapes[part.base] or part.name in names.shapes
    ]
    buffers = names.shapes.keys() - names.parameters
    resolved = resolve(
        plan, mesh, names.shapes, inputs, names.aliases, outputs, through=through, parts=parts, buffers=buffers
    )
    layouts_by_name = {**resolved.attrs, **(layouts or {})}
    attrs = {placeholder: layouts_by_name[name] for placeholder, name in users.items() if name in layouts_by_name}
    named = {placeholder: users[placeholder] for placeholder in attrs}
    for call, name in returned:
        attr = resolved.attrs.get(call)
        if attr is None:
            continue
        line = f"{name} : {print_type(types[name])}"
        if _shape(types[name]) != outputs[call]:
            raise PlanError(
                f"the plan's layout of {call} does not fit all values that it returns: {line}; leave {call} out of the "
                f"plan, or name another module that returns it"
            )
        before, other = named.setdefault(name, call), attrs.get(name, attr)
        if (both := agreed(other, attr)) is None:
            shape = _shape(types[name])
            raise PlanError(
                f"the plan contradicts itself on {line}, which {before} and {call} both return: {before} is "
                f"[{print_dims(shape, other)}], {call} is [{print_dims(shape, attr)}]; leave one of them out of the "
                f"plan"
            )
        attrs[name] = both
    decided = {p for p, name in users.items() if resolved.search or name in resolved.named or name in (layouts or {})}
    _constrain(captured, mesh, attrs, named, decided)
    if not resolved.search:  # a search finds what is cheapest
        _spread(captured, mesh, attrs, decided)
    unmatched = tuple(resolved.unmatched)
    named_attrs = UserConstraints(attrs, named)
    if resolved.search:
        return named_attrs, Decisions(tuple(resolved.notes), unmatched, search=True)
    parameters = {users[p]: _shape(r.type) for p, r in records.items() if r.role == "param"}
    whole = _left_whole(resolved, parameters, parts) if resolved.preset else []
    follow = [
        part.kind
        for part in parts
        if part.name in parameters and part.name in resolved.attrs and not resolved.attrs[part.name].is_replicated
    ]
    split = {name for name, attr in resolved.attrs.items() if not attr.is_replicated}
    needed = [p.name for p in parts if p.base in split and p.kind.startswith("original")
              and not any(d is not None for d in p.dims)
              and math.prod(parameters.get(p.name, ())) > 1]  # fmt: skip
    # another note explains a preset that matches nothing
    explained = {"tp"} if resolved.unmatched and not resolved.preset else set()
    unused = unused_axes(mesh, {axis for attr in attrs.values() for axis in attr.axes}, explained)
    return named_attrs, Decisions(
        (*resolved.notes, *parts_note(follow), *needed_whole_note(needed), *whole_note(whole), *unused), unmatched
    )


def _constrain(
    captured: Captured, mesh: Mesh, attrs: dict[str, DistAttr], named: dict[str, str], decided: Collection[str]
) -> None:
    """Add the layouts that forward itself gives to values.

    Args:
        decided: the placeholders whose layouts are no default.

    Raises:
        PlanError: forward constrains a parameter or a buffer, contradicts the plan or itself, or a layout does not fit.
    """
    for value, spec, source, _ in (one for one in captured.constrained if not one.axis):
        node = captured.program.node(value)
        type, role = record_of(node).type, record_of(node).role
        said, shape = f"constrain at {source}", _shape(type)
        if node.op != "call_function" and role != "input":
            raise PlanError(
                f"{said} has {'the parameter' if role == 'param' else 'the tensor'} {name_of(node)}, which no op of "
                f"forward computes; give it a layout in the plan"
            )
        attr = attr_of(f"constrain({value}, {shown(spec)}) at {source}", spec, value, shape, mesh, open_=True)
        other = attrs.get(value, attr)
        if role == "input" and value not in decided:
            attrs[value] = filled(attr, other if OPEN not in other.dims else DistAttr.replicated(len(shape)))
        elif (both := agreed(other, attr)) is not None:
            attrs[value] = both
        else:
            raise PlanError(
                f"two constraints contradict each other on {value} : {print_type(type)}: {named[value]} says "
                f"[{print_dims(shape, other)}], {said} says [{print_dims(shape, attr)}]; leave one of them out"
            )
        named.setdefault(value, said)


def _spread(captured: Captured, mesh: Mesh, attrs: dict[str, DistAttr], decided: Collection[str]) -> None:
    """Split values over the axis that is meant for them, if the mesh has it and nothing else gives them a layout.

    Args:
        decided: the placeholders whose layouts are no default.
    """
    for value, spec, *_ in (one for one in captured.constrained if one.axis in mesh.names):
        node = captured.program.node(value)
        shape = _shape(record_of(node).type)
        if value not in decided and (value not in attrs or attrs[value].is_replicated):
            attr = attr_of(value, spec, value, shape, mesh, open_=True)
            attrs[value] = attr if node.op == "call_function" else filled(attr, DistAttr.replicated(len(shape)))


def _left_whole(resolved: Constraints, parameters: Mapping[str, Sequence[int]], parts: Sequence[Part]) -> list[str]:
    """Return the parameters with two dims or more that are not split over tp, and are no part of another tensor."""
    follow = {part.name for part in parts}
    large = (name for name, shape in parameters.items() if len(shape) > 1 and name not in follow)
    return [name for name in large if name not in resolved.attrs or "tp" not in resolved.attrs[name].axes]


def _shape(type: ValueType) -> tuple[int, ...]:
    """Return the shape of a placeholder, or of a value that a module returns."""
    assert isinstance(type, TensorType)
    return type.shape
