"""The plan applied to a captured step: what it says of names, said of the program's values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from autopar.capture import Captured
from autopar.capture.naming import Part, names_of
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import record_of
from autopar.ir.text.printer import print_type
from autopar.plan.plan import Constraints, Plan, resolve
from autopar.report.decisions import needed_whole_note, parts_note, unused_axes, whole_note


def layouts_of(plan: Plan | None, model: torch.nn.Module, mesh: Mesh, inputs: Mapping[str, Sequence[int]] | None = None) -> dict[str, DistAttr]:
    """Name → DistAttr, of parameters and buffers, and of ``inputs`` with these shapes; ``PlanError``. Others are whole."""
    names = names_of(model)
    return resolve(plan, mesh, names.shapes, inputs, names.aliases, through=names.through, parts=names.parts, calls=False).attrs


class Decisions(NamedTuple):
    """What a report says of a plan.

    Attributes:
        notes: what was decided for the user.
        unmatched: names of presets that match nothing.
    """

    notes: tuple[str, ...]
    unmatched: tuple[str, ...]


def constraints(plan: Plan | None, model: torch.nn.Module, mesh: Mesh, captured: Captured,
                layouts: Mapping[str, DistAttr] | None = None) -> tuple[dict[str, DistAttr], Decisions]:  # fmt: skip
    """Node → DistAttr, of placeholders and of what modules return; and what was decided for the user.

    ``layouts``: of parameters and inputs for which they are decided without the plan.

    Raises:
        PlanError: the plan, or one value that two modules return is said to lie in two ways.
    """
    records = {node.name: record_of(node) for node in captured.program.placeholders}
    names = names_of(model)
    users = {
        placeholder: placeholder if r.role == "input" and r.name in names.shapes else r.name or placeholder
        for placeholder, r in records.items()
        if r.role not in ("tangent", "seed")
    }
    inputs = {users[p]: r.type.shape for p, r in records.items() if r.role == "input"}  # type: ignore[union-attr]
    types = {node.name: record_of(node).type for node in captured.program.nodes}
    returned = [(f"{path}()", name) for path, values in captured.modules.items() for name in values if name not in records]
    outputs = {call: types[name].shape for call, name in reversed(returned)}  # type: ignore[union-attr]
    through = [*names.through, *((f"{seen}()", f"{path}()") for path, seen in names.paths.items())]
    parts = [part for part in names.parts if outputs.get(part.name, names.shapes[part.base]) == names.shapes[part.base] or part.name in names.shapes]
    found = resolve(plan, mesh, names.shapes, inputs, names.aliases, outputs, through=through, parts=parts)
    decided = {**found.attrs, **(layouts or {})}
    attrs = {placeholder: decided[name] for placeholder, name in users.items() if name in decided}
    for call, name in returned:
        attr = found.attrs.get(call)
        if attr is not None and (types[name].shape != outputs[call] or attrs.setdefault(name, attr) != attr):  # type: ignore[union-attr]
            raise PlanError(
                f"what the plan says of {call} does not fit all that it returns, or another module that returns the same: "
                f"{name} : {print_type(types[name])}; leave {call} out of the plan, or name another module around what it returns"
            )
    parameters = {users[p]: r.type.shape for p, r in records.items() if r.role == "param"}  # type: ignore[union-attr]
    whole = _left_whole(found, parameters, parts) if found.preset else []
    follow = [part.kind for part in parts if part.name in parameters and part.name in found.attrs and not found.attrs[part.name].is_replicated]
    split = {name for name, attr in found.attrs.items() if not attr.is_replicated}
    needed = [p.name for p in parts if p.base in split and p.kind.startswith("original") and not any(d is not None for d in p.dims)
              and math.prod(parameters.get(p.name, ())) > 1]  # fmt: skip
    told = {"tp"} if found.unmatched and not found.preset else set()  # a preset that matches nothing
    unused = unused_axes(mesh, {axis for attr in attrs.values() for axis in attr.axes}, told)
    return attrs, Decisions((*found.notes, *parts_note(follow), *needed_whole_note(needed), *whole_note(whole), *unused), tuple(found.unmatched))


def _left_whole(found: Constraints, parameters: Mapping[str, Sequence[int]], parts: Sequence[Part]) -> list[str]:
    """Parameters with two dims or more that are whole over tp, and are no part of another tensor."""
    follow = {part.name for part in parts}
    large = (name for name, shape in parameters.items() if len(shape) > 1 and name not in follow)
    return [name for name in large if name not in found.attrs or "tp" not in found.attrs[name].axes]
