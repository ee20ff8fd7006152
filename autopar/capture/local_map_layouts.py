"""Say in which layouts a function on the pieces of each rank runs, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.capture.regions import REGIONS, Placements, Region, tried
from autopar.errors import RuleError, shown
from autopar.ir.dtensor import attr_of, placements_of, with_an_axis
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import ROWS, Mesh
from autopar.ir.ops import local_map as ops
from autopar.ir.record import TensorType
from autopar.rules.registry import RULES, Rule, op_name

Layouts = tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]
Types = Sequence[TensorType]


def _forward(args: Sequence[Any], results: Types, mesh: Mesh) -> Layouts:
    """Return the layouts that the region takes and gives."""
    operands, name = args
    region = REGIONS[name] if mesh.names != (ROWS,) else _of_rows(REGIONS[name])
    needs = tuple(_attr(region, p, x, mesh) for p, x in zip(region.operands, operands, strict=True))
    gives = tuple(_attr(region, p, y, mesh) for p, y in zip(region.results, results, strict=True))
    for axis in mesh.names:
        if any(axis in dict(attr.pending) for attr in needs) and not all(axis in dict(a.pending) for a in gives):
            raise RuleError(
                f"{region.name} takes a Partial operand over {axis}, and not all of its results are Partial\n"
                f"    {region.source}\n  let a function that is not additive take Replicate() or Shard()"
            )
    _check_pieces(region, ops.FUNCTIONS[name], operands, results, needs, gives, mesh)
    ops.ALIKE[ops.local_map, name, mesh] = tuple(_alike(attr, mesh) for attr in gives)
    return needs, gives


def _backward(args: Sequence[Any], results: Types, mesh: Mesh) -> Layouts:
    """Return the layouts that the gradients of a region take and have.

    Along an axis on which ranks compute different parts, the gradient of a replicated operand is a partial sum of what
    the ranks find; that of a partial sum is the same on each rank; and that of a replicated result counts once.
    """
    operands, gradients, name, wanted = args
    region = REGIONS[name]
    needs = [_attr(region, p, x, mesh) for p, x in zip(region.operands, operands, strict=True)]
    # results such as positions have no gradients
    floating = _floating(name, operands)
    places = [p for p, floats in zip(region.results, floating, strict=True) if floats]
    of_results = [_attr(region, p, y, mesh) for p, y in zip(places, gradients, strict=True)]
    parted = [axis for axis in mesh.names if any(_lies(attr, axis) for attr in (*needs, *of_results))]
    taken = tuple(_transposed(attr, parted) for attr in of_results)
    given = tuple(_transposed(attr, parted) for attr in needs)
    for k, placements in enumerate(region.gradients or ()):
        if placements is not None and wanted[k] and _attr(region, placements, operands[k], mesh) != given[k]:
            found = shown(placements_of(given[k], mesh, operands[k].shape))
            raise RuleError(
                f"in_grad_placements of {region.name} says {shown(placements)} of argument {k}, and its gradient is "
                f"{found} on ({mesh})\n    {region.source}\n"
                f"  leave in_grad_placements out: it follows from the others"
            )
    made = tuple(attr for attr, want in zip(given, wanted, strict=True) if want)
    ops.ALIKE[ops.local_map_backward, name, tuple(wanted), mesh] = tuple(_alike(attr, mesh) for attr in made)
    return (*needs, *taken), made


def _alike(attr: DistAttr, mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis, size in mesh.sizes.items() if size > 1 and not _lies(attr, axis))


def _lies(attr: DistAttr, axis: str) -> bool:
    return axis in attr.axes or axis in dict(attr.pending)


def _transposed(attr: DistAttr, parted: Sequence[str]) -> DistAttr:
    """Return the layout of a gradient: splits stay, replicated is pending, and pending is replicated."""
    pending = tuple((axis, "sum") for axis in sorted(parted) if not _lies(attr, axis))
    return DistAttr(attr.dims, pending)


def _floating(name: str, operands: Types) -> list[bool]:
    made = tried(name, ops.FUNCTIONS[name], [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in operands])
    return [y.is_floating_point() or y.is_complex() for y in made]


def _attr(region: Region, placements: Placements, type: TensorType, mesh: Mesh) -> DistAttr:
    """Return placements of a value as a layout on the mesh."""
    from torch.distributed.tensor import Replicate

    if isinstance(placements, Mapping):
        if missing := [axis for axis in placements if axis not in mesh.sizes]:
            raise RuleError(
                f"{region.name} has a placement for the axis {missing[0]}, and the mesh ({mesh}) has none of that "
                f"name\n    {region.source}"
            )
        placements = [placements.get(axis, Replicate()) for axis in with_an_axis(mesh).names]
    try:
        attr = attr_of(placements, mesh, type.shape)
    except ValueError as error:
        raise RuleError(f"{region.name}: {error}\n    {region.source}") from None
    if any(kind != "sum" for _, kind in attr.pending):
        raise RuleError(
            f"{region.name}: {shown(placements)}: a partial result of local_map is a sum\n    {region.source}"
        )
    pending = tuple((axis, kind) for axis, kind in attr.pending if mesh.sizes[axis] > 1)
    return DistAttr(attr.dims, pending)


def _of_rows(region: Region) -> Region:
    """Return the region on the mesh of the rows of a batch: split as on its axis that splits dim 0 of an operand."""

    def on(placements: Placements, axis: Any) -> Placements:
        each = placements.get(axis) if isinstance(placements, Mapping) else placements[axis]
        return {} if each is None else {ROWS: each}

    axes = [
        (axis, each)
        for placed in region.operands
        for axis, each in (placed.items() if isinstance(placed, Mapping) else enumerate(placed))
    ]
    own = next((axis for axis, each in axes if getattr(each, "dim", None) == 0), None)
    whole: Placements = {}
    return replace(
        region,
        operands=tuple(whole if own is None else on(placed, own) for placed in region.operands),
        results=tuple(whole if own is None else on(placed, own) for placed in region.results),
    )


def _check_pieces(
    region: Region, function: ops.Function, operands: Types, results: Types, needs: Sequence[DistAttr],
    gives: Sequence[DistAttr], mesh: Mesh,
) -> None:  # fmt: skip
    """Check the shapes of the pieces that the function makes on each rank."""
    seen = set()
    for at in mesh.points():
        shapes = [attr.local_shape(x.shape, mesh, at) for attr, x in zip(needs, operands, strict=True)]
        wanted = [attr.local_shape(y.shape, mesh, at) for attr, y in zip(gives, results, strict=True)]
        if (row := (*map(tuple, shapes), *map(tuple, wanted))) in seen:
            continue
        seen.add(row)
        pieces = [torch.empty(s, dtype=x.dtype, device="meta") for s, x in zip(shapes, operands, strict=True)]
        made = [tuple(y.shape) for y in tried(region.name, function, pieces)]
        if made != [tuple(shape) for shape in wanted]:
            raise RuleError(
                f"{region.name} makes pieces of {', '.join(map(str, map(list, made)))} on the rank at {dict(at)}, and "
                f"its out_placements say {', '.join(map(str, map(list, wanted)))}\n    {region.source}\n  correct the "
                f"placements, or the function"
            )


for _op, _layouts in ((ops.local_map, _forward), (ops.local_map_backward, _backward)):
    RULES[_op] = Rule(op_name(_op), lambda *args, **kwargs: None, layouts=_layouts)
