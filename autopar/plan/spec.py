"""Parse a plan's layout of one value: for each dim, the axes that split it.

==================  ============================================================================================
``"tp"``            the axis that splits the dim
``("dp", "tp")``    several, major first
``None``            the dim is whole; so are dims at the end that are left out
``"(3 -1/tp)"``     a merged dim, split part by part; one size may be ``-1`` (a fused qkv weight)
``"?"``             for a module's output, and in a search: the layout of the dim is free
==================  ============================================================================================

DTensor's placements, one for each axis of the mesh, are accepted too: ``(Shard(0), Replicate())``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from autopar.errors import PlanError, shown
from autopar.ir.layout import UNDECIDED, WHOLE, Dim, DistAttr
from autopar.ir.mesh import PIPELINE, Mesh

DimSpec = str | None | Sequence[str]
Spec = Sequence[DimSpec]

MERGED = re.compile(r"\((\s*(-1|\d+)(/\w+)*)+\s*\)")


def attr_of(
    subject: str, spec: Spec, name: str, shape: Sequence[int], mesh: Mesh, *, pending: bool = False, open_: bool = False
) -> DistAttr:
    """Return the DistAttr of the value ``name``.

    Args:
        subject: errors begin with it.
        pending: whether the value may be a partial sum.
        open_: whether dims may be undecided; those of a module's output always may.
    """
    if is_placements(spec):
        from autopar.ir import dtensor

        try:
            attr = dtensor.attr_of(spec, mesh, shape)
        except ValueError as error:
            raise PlanError(f"{subject}: {error}, on {name} with the shape {list(shape)}") from None
        if attr.pending and not pending:
            raise PlanError(f"{subject} is pending, but {name} is no partial sum; only Shard and Replicate are allowed")
        return attr
    dims = dims_of(subject, spec, len(shape), mesh, open_=open_ or name.endswith("()"))
    if len(spec) > len(shape):
        beyond = next((d for d, dim in enumerate(dims) if d >= len(shape) and any(axes for _, axes in dim)), None)
        says = f"has {len(spec)} entries" if beyond is None else f"splits dim {beyond}"
        raise PlanError(
            f"{subject} {says}, but {name} has the shape {list(shape)} and only {len(shape)} "
            f"dim{'s' * (len(shape) != 1)}" + ("; a value without dims cannot be split" if not shape else "")
        )
    used = [axis for dim in dims for _, axes in dim for axis in axes if axis != UNDECIDED]
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        in_one = any(sum(twice[0] in axes for _, axes in dim) > 1 for dim in dims)
        raise PlanError(
            f"{subject} uses the axis {twice[0]!r} twice on {name}; "
            + (f'write parts of one size once, as in "(3 -1/{twice[0]})"; if the parts have different sizes, split '
               f'the dim as one, "{twice[0]}": '
               f"the parts are moved where an op separates "
               f"them" if in_one else "an axis splits one dim of a value once")
        )  # fmt: skip
    sized = [_sized(subject, dim, name, size) for dim, size in zip(dims, shape, strict=False)]
    return DistAttr((*sized, *[WHOLE] * (len(shape) - len(dims)))).normalize(shape, mesh)


def dims_of(subject: str, spec: Spec, ndim: int | None, mesh: Mesh, *, open_: bool = False) -> list[Dim]:
    """Return the dims that the plan names; ``ndim`` is the number of dims of the value, if it is known."""
    if is_placements(spec):
        from autopar.ir import dtensor

        try:
            dtensor.check_count(spec, mesh)
        except ValueError as error:
            raise PlanError(f"{subject}: {error}") from None
        return []  # their meaning depends on the value
    if not _is_list(spec):
        first = spec if isinstance(spec, str) else "tp"
        remedy = [f'"{first}"', *["None"] * ((ndim or 1) - 1)] if ndim != 0 else []
        shown = f"({', '.join(remedy)}{',' * (len(remedy) == 1)})"
        raise PlanError(f"{subject} is not a tuple with an axis or None for each dim, as in {shown}")
    return [_dim(subject, entry, mesh, open_) for entry in spec]


def axes_of(spec: Spec, ndim: int, mesh: Mesh) -> list[frozenset[str]]:
    """Return the axes of each dim, with axes of size one, which a DistAttr does not have; ``?`` for an open dim."""
    if is_placements(spec):
        return [
            frozenset(
                axis
                for axis, placement in zip(mesh.names, spec, strict=True)
                if getattr(placement, "dim", None) in (d, d - ndim)
            )
            for d in range(ndim)
        ]
    dims = dims_of("", spec, ndim, mesh, open_=True)
    named = [frozenset(axis for _, axes in dim for axis in axes) for dim in dims]
    return [*named, *[frozenset()] * (ndim - len(named))]


def _dim(subject: str, entry: Any, mesh: Mesh, open_: bool) -> Dim:
    if not (entry is None or isinstance(entry, str) or _is_list(entry)):
        raise PlanError(f"{subject} has {shown(entry)} where an axis, a tuple of axes or None belongs")
    if isinstance(entry, str) and entry.lstrip().startswith("("):
        if not MERGED.fullmatch(entry.strip()):
            raise PlanError(
                f'{subject} has {shown(entry)}, which is no merged dim; write sizes and axes, as in "(3 -1/tp)"'
            )
        parts = [part.split("/") for part in entry.strip()[1:-1].split()]
        return tuple((int(size), _axes(subject, entry, axes, mesh)) for size, *axes in parts)
    if entry == UNDECIDED:
        if not open_:
            raise PlanError(
                f"{subject} leaves a dim undecided ('?'), which only a module's output may be, unless the plan is "
                f'searched, as in ["search", {{…}}]; give an axis or None'
            )
        return ((None, (UNDECIDED,)),)
    return (
        (
            None,
            _axes(subject, entry, () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry), mesh),
        ),
    )


def _axes(subject: str, entry: object, axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    for axis in axes:
        if not isinstance(axis, str):  # a plan is the user's
            raise PlanError(
                f'{subject} has {shown(axis)} in {shown(entry)}, where only axes belong, as in ("dp", "tp")'
            )
        if axis == PIPELINE and axis not in mesh.sizes:
            raise PlanError(
                f"{subject} is split over pp, which is no axis of layouts: the stages of a pipeline lie along it, each "
                f"with other parameters; leave it out, and cut the model with train_step(schedule=, stages=)"
            )
        try:
            mesh.check_axis(axis)
        except ValueError as error:
            raise PlanError(f"{subject}: {error}") from None
    return tuple(axes)


def _sized(subject: str, dim: Dim, name: str, size: int) -> Dim:
    """Return a merged dim with ``-1`` replaced by the remaining size."""
    if len(dim) == 1 and dim[0][0] is None:
        return dim
    known = math.prod([part for part, _ in dim if part is not None and part != -1])
    left = sum(part == -1 for part, _ in dim)
    if left > 1 or (size % known if left and known else known != size):
        raise PlanError(
            f"{subject}: the parts do not make up a dim of {size}, as {name} has it"
            + "; leave one size open" * (left > 1)
        )
    return tuple((size // known if part == -1 else part, axes) for part, axes in dim)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def is_placements(spec: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a spec is a sequence of placements, without importing torch for plans that have none."""
    entries: Sequence[object] = spec if _is_list(spec) else [spec]
    bases = (base for entry in entries for base in type(entry).__mro__)
    return any(base.__name__ == "Placement" and base.__module__.startswith("torch.distributed") for base in bases)
