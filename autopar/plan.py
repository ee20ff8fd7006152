"""The user's plan: globs over the names of parameters and inputs → how each is split.

``{"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}``. A glob is matched against ``"." + name``, so that
``*.up.weight`` finds a top-level ``up`` too, and against the name itself. For each dim a value gives the axis that
splits it, a tuple of axes (major first), or ``None``; missing dims at the end are whole.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.layout import DistAttr
from autopar.mesh import Mesh

DimSpec = str | None | Sequence[str]
Plan = Mapping[str, Sequence[DimSpec]]

NOT_BATCH = ("tp", "pp")  # axes that never split the batch by default


@dataclass
class Constraints:
    """A plan applied to a model: name → DistAttr, and what was decided for the user."""

    attrs: dict[str, DistAttr] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def resolve(
    plan: Plan | None,
    mesh: Mesh,
    parameters: Mapping[str, Sequence[int]],
    inputs: Mapping[str, Sequence[int]] | None,
) -> Constraints:
    """Match a plan against names and shapes.

    Args:
        parameters: name → shape, parameters and buffers.
        inputs: name → shape of the tensor inputs; ``None`` when they are not known yet (globs that match no
            parameter are then left for later).

    Raises:
        PlanError: an unknown axis, a glob without a match, an axis used twice, a dim that is not there, two globs that
            split one value differently.
    """
    plan = dict(plan or {})
    found = Constraints()
    chosen: dict[str, str] = {}
    named_input = False
    shapes = {**parameters, **(inputs or {})}
    for glob, spec in plan.items():
        matches = [name for name in shapes if _matches(glob, name)]
        if not matches:
            if inputs is None:
                continue
            raise PlanError(_no_match(glob, list(shapes)))
        named_input |= any(name not in parameters for name in matches)
        for name in matches:
            attr = _attr(glob, spec, name, shapes[name], mesh)
            if name in found.attrs and found.attrs[name] != attr:
                raise PlanError(
                    f"the plan contradicts itself on {name}: {chosen[name]!r} says {_show(plan[chosen[name]])}, "
                    f"{glob!r} says {_show(spec)}; make the globs disjoint"
                )
            found.attrs[name], chosen[name] = attr, glob
    if inputs and not named_input:
        _split_batch(found, mesh, inputs)
    return found


def _matches(glob: str, name: str) -> bool:
    return fnmatch.fnmatchcase("." + name, glob) or fnmatch.fnmatchcase(name, glob)


def _no_match(glob: str, names: list[str]) -> str:
    near = difflib.get_close_matches(glob.lstrip("*."), names, n=3, cutoff=0.3) or names[:3]
    return f"the plan's glob {glob!r} matches no parameter or input; near it: {', '.join(near) or 'the model has none'}"


def _attr(glob: str, spec: Sequence[DimSpec], name: str, shape: Sequence[int], mesh: Mesh) -> DistAttr:
    what = f"the plan's {glob!r}: {_show(spec)}"
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise PlanError(f'{what} is not a tuple with an axis or None for each dim, as in ("tp", None)')
    if len(spec) > len(shape):
        raise PlanError(
            f"{what} splits dim {len(spec) - 1}, but {name} has the shape {list(shape)} and only {len(shape)} dim{'s' * (len(shape) != 1)}"
            + ("; a value without dims cannot be split" if not shape else "")
        )
    used: list[str] = []
    dims: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is not None and not isinstance(entry, (str, Sequence)):
            raise PlanError(f"{what} has {entry!r} where an axis, a tuple of axes or None belongs")
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            try:
                used.append(mesh.check_axis(axis))
            except ValueError as error:
                raise PlanError(f"{what}: {error}") from None
        dims.append(axes)
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        raise PlanError(f"{what} uses the axis {twice[0]!r} twice on {name}; an axis splits one dim of a value once")
    dims += [()] * (len(shape) - len(dims))
    return DistAttr.split(*dims).normalize(shape, mesh)


def _show(spec: object) -> str:
    return repr(tuple(spec)) if isinstance(spec, list) else repr(spec)


def _split_batch(found: Constraints, mesh: Mesh, inputs: Mapping[str, Sequence[int]]) -> None:
    """The default for inputs the plan does not name: dim 0 over the first axis that is not tp, where it is the batch."""
    axis = next((name for name in mesh.names if name not in NOT_BATCH), None)
    first = next((shape for shape in inputs.values() if len(shape)), None)
    if axis is None or first is None:
        return
    split = [name for name, shape in inputs.items() if len(shape) and shape[0] == first[0]]
    for name in split:
        found.attrs[name] = DistAttr.split(axis, *[None] * (len(inputs[name]) - 1)).normalize(inputs[name], mesh)
    whole = [name for name in inputs if name not in split]
    found.notes.append(
        f"{axis} splits dim 0 of the inputs {', '.join(split)} (the batch, {first[0]})"
        + (f"; {', '.join(whole)} stay whole" if whole else "")
        + "; name inputs in the plan to change it"
    )
