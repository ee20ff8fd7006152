"""Give the layouts of each preset under each assignment of the mesh's axes to its roles, for a search to start from.

Presets speak of axes by their roles: ``dp`` splits the batch, ``tp`` the matrix products, ``cp`` the sequence. On the
mesh ``a=8 b=8``, ``megatron`` may split over ``a``, over ``b``, or over both, and the batch over what is left. (``ep``
splits the batch as ``dp`` does, and no preset splits anything else over it.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from autopar.capture import Captured
from autopar.capture.naming import Names, names_of
from autopar.errors import PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import SEQUENCE, Mesh
from autopar.ir.nodes import tensor_type
from autopar.plan.constraints import constraints
from autopar.plan.presets import PRESETS, Preset

BATCH, COLUMNS = "dp", "tp"
ROLES = (BATCH, COLUMNS, SEQUENCE)
BY_BATCH = "ddp"  # the preset that splits the batch alone

Assignment = dict[str, tuple[str, ...]]  # role → the axes that have it, in the order of the mesh


def assignments(mesh: Mesh) -> list[Assignment]:
    """Return each assignment of axes to roles once, those that use most axes first, and fewest roles among these.

    An axis has one role or none; axes of one rank have none.
    """
    axes = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    found = []
    for chosen in itertools.product((*ROLES, ""), repeat=len(axes)):
        roles = {role: tuple(axis for axis, its in zip(axes, chosen, strict=True) if its == role) for role in ROLES}
        found.append({role: its for role, its in roles.items() if its})
    return sorted(
        filter(None, found), key=lambda roles: (-sum(map(len, roles.values())), SEQUENCE in roles, len(roles))
    )


def on_fewer_axes(mesh: Mesh) -> list[Assignment]:
    """Return one assignment of the batch for each number of ranks that some axes have, the most ranks first.

    Other axes are idle: where links are slow, fewer ranks may be faster. Of several axes with so many ranks, the last
    of the mesh are taken, whose ranks are nearest to each other.
    """
    of_batch = [roles for roles in assignments(mesh) if roles.keys() == {BATCH}]
    of_batch.sort(key=lambda roles: [mesh.names.index(axis) for axis in roles[BATCH]])
    found = {mesh.count(roles[BATCH]): roles for roles in of_batch}
    return [found[ranks] for ranks in sorted(found, reverse=True)]


def starting_points(
    model: torch.nn.Module, captured: Captured, mesh: Mesh
) -> Iterator[tuple[str, dict[str, DistAttr]]]:
    """Yield the layouts of each preset under each assignment, as node → DistAttr of a captured call.

    Those of ``on_fewer_axes`` come first, so that a short time limit has looked at them. Layouts that another preset or
    assignment has given are left out. The name says both: ``megatron, tp=a dp=b``.
    """
    captured = replace(captured, constrained=())  # constraints of the user have the axes of the mesh itself
    tensors = names_of(model)
    seen: set[frozenset[tuple[str, DistAttr]]] = set()
    known: dict[tuple[str, Mesh], Mapping[str, DistAttr] | None] = {}  # axes of equal sizes share them
    first = [(roles, [BY_BATCH]) for roles in on_fewer_axes(mesh)]
    for roles, names in (*first, *((roles, [*PRESETS]) for roles in assignments(mesh))):
        of_roles = Mesh({role: mesh.count(axes) for role, axes in roles.items()})
        for name in names:
            if not _uses(PRESETS[name], roles):
                continue
            if (name, of_roles) not in known:
                known[name, of_roles] = _layouts(name, model, of_roles, captured, tensors)
            attrs = known[name, of_roles]
            if attrs is None:
                continue
            on_axes = {
                node: _renamed(attr, roles).normalize(tensor_type(captured.program.node(node)).shape, mesh)
                for node, attr in attrs.items()
            }
            layouts = frozenset((node, attr) for node, attr in on_axes.items() if not attr.is_replicated)
            if layouts not in seen:
                seen.add(layouts)
                yield f"{name}, {' '.join(f'{role}={chr(43).join(axes)}' for role, axes in roles.items())}", on_axes


def _layouts(
    name: str, model: torch.nn.Module, mesh: Mesh, captured: Captured, names: Names
) -> Mapping[str, DistAttr] | None:
    """Return the layouts of a preset; ``None`` if a module of the preset's returns values of several shapes.

    Also ``None`` for ``hsdp``, whose batch has two axes, and here it has one.
    """
    try:
        return constraints(name, model, mesh, captured, names=names)[0]
    except PlanError:
        return None


def _uses(preset: Preset, roles: Mapping[str, object]) -> bool:
    """Return whether a preset needs these roles, and uses all of them."""
    needs = {COLUMNS} if preset.globs else set()
    needs |= {BATCH} if preset.of_shape is not None else set()
    return needs <= roles.keys() and (COLUMNS not in roles or COLUMNS in needs)


def _renamed(attr: DistAttr, roles: Assignment) -> DistAttr:
    """Return an attribute with the axes of each role in its place; an undecided axis stays."""
    return DistAttr(
        tuple(
            tuple((size, tuple(axis for role in axes for axis in roles.get(role, (role,)))) for size, axes in dim)
            for dim in attr.dims
        )
    )
