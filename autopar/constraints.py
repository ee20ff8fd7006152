"""The plan applied to a captured step: what it says of names, said of the program's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.inventory import inventory
from autopar.layout import DistAttr
from autopar.mesh import Mesh
from autopar.plan import Plan, resolve
from autopar.program import record_of
from autopar.text.printer import print_type


def layouts_of(plan: Plan | None, model: torch.nn.Module, mesh: Mesh, inputs: Mapping[str, Sequence[int]] | None = None) -> dict[str, DistAttr]:
    """Name → DistAttr, of parameters and buffers, and of ``inputs`` with these shapes; ``PlanError``. Others are whole."""
    return resolve(plan, mesh, _shapes(model), inputs, _aliases(model), calls=False).attrs


def constraints(plan: Plan | None, model: torch.nn.Module, mesh: Mesh, captured: Captured,
                laid: Mapping[str, DistAttr] | None = None) -> tuple[dict[str, DistAttr], list[str]]:  # fmt: skip
    """Node → DistAttr, of placeholders and of what modules return; and what was decided for the user.

    ``laid``: how some inputs lie, whatever the plan says.

    Raises:
        PlanError: the plan, or one value that two modules return is said to lie in two ways.
    """
    records = {node.name: record_of(node) for node in captured.program.placeholders}
    own = _shapes(model)
    users = {
        placeholder: placeholder if r.role == "input" and r.name in own else r.name or placeholder
        for placeholder, r in records.items()
        if r.role not in ("tangent", "seed")
    }
    inputs = {users[p]: r.type.shape for p, r in records.items() if r.role == "input"}  # type: ignore[union-attr]
    types = {node.name: record_of(node).type for node in captured.program.nodes}
    returned = [(f"{path}()", name) for path, names in captured.modules.items() for name in names if name not in records]
    outputs = {call: types[name].shape for call, name in reversed(returned)}  # type: ignore[union-attr]
    found = resolve(plan, mesh, own, inputs, _aliases(model), outputs)
    decided = {**found.attrs, **(laid or {})}
    attrs = {placeholder: decided[name] for placeholder, name in users.items() if name in decided}
    for call, name in returned:
        attr = found.attrs.get(call)
        if attr is not None and (types[name].shape != outputs[call] or attrs.setdefault(name, attr) != attr):  # type: ignore[union-attr]
            raise PlanError(
                f"what the plan says of {call} does not fit all that it returns, or another module that returns the same: "
                f"{name} : {print_type(types[name])}; leave {call} out of the plan, or name another module around what it returns"
            )
    return attrs, found.notes


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    own = inventory(model)
    return {name: tuple(tensor.shape) for name, tensor in (*own.parameters, *own.buffers)}


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """The other names of parameters and buffers → the one they are listed under: where they have several, and the names
    in which each module is followed by its class."""
    own = inventory(model)
    every = [*own.all_parameters, *own.all_buffers]
    first: dict[int, str] = {}
    for name, tensor in every:
        first.setdefault(id(tensor), name)
    other = {name: first[id(tensor)] for name, tensor in every if first[id(tensor)] != name}
    classes = {path: type(module).__name__ for path, module in model.named_modules(remove_duplicate=False)}
    for name, tensor in every:
        *modules, last = name.split(".")
        paths = [".".join(modules[: k + 1]) for k in range(len(modules))]
        if paths:
            other[".".join([*(f"{module}:{classes[path]}" for module, path in zip(modules, paths, strict=True)), last])] = first[id(tensor)]
    return other
