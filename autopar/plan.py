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
    aliases: Mapping[str, str] | None = None,
) -> Constraints:
    """Match a plan against names and shapes.

    Args:
        parameters: name → shape, parameters and buffers.
        inputs: name → shape of the tensor inputs; ``None`` when they are not known yet (globs that match no
            parameter are then left for later).
        aliases: other names of a tensor → the name it is listed under. A glob may match any of them; the result has the
            listed one.

    Raises:
        PlanError: what is not a plan, an unknown axis, a glob without a match, an axis used twice, a dim that is not
            there, two globs that split one value differently.
    """
    plan = _checked(plan)
    found = Constraints()
    chosen: dict[str, tuple[str, list[str]]] = {}  # listed name → the glob, and the names of the tensor it matches
    named_input = False
    shapes = {**parameters, **(inputs or {})}
    names = [*((name, name) for name in shapes), *(aliases or {}).items()]
    for glob, spec in plan.items():
        matches: dict[str, list[str]] = {}
        for name, listed in names:
            if _matches(glob, name):
                matches.setdefault(listed, []).append(name)
        if not matches:
            if inputs is None:
                _axes(glob, spec, None, mesh)
                continue
            raise PlanError(_no_match(glob, [name for name, _ in names]))
        named_input |= any(listed not in parameters for listed in matches)
        for listed, here in matches.items():
            attr = _attr(glob, spec, here[0], shapes[listed], mesh)
            if listed in found.attrs and found.attrs[listed] != attr:
                before, there = chosen[listed]
                raise PlanError(
                    f"the plan contradicts itself on {_both(there, here)}: {before!r} says {_show(plan[before])}, "
                    f"{glob!r} says {_show(spec)}; "
                    + ("make the globs disjoint" if set(there) & set(here) else "split it alike under both names")
                )
            found.attrs[listed], chosen[listed] = attr, (glob, here)
    if inputs and not named_input:
        _split_batch(found, mesh, inputs)
    return found


def _checked(plan: object) -> dict[str, Sequence[DimSpec]]:
    if plan is None:
        return {}
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"plan is a dict from globs to an axis or None for each dim, as in "
            f'{{"*.up.weight": ("tp", None)}}, not a {type(plan).__name__}: {plan!r}'
        )
    for glob in plan:
        if not isinstance(glob, str):
            raise PlanError(
                f"the plan's key {glob!r} is not a string; a key is a glob over the names of parameters and inputs, "
                f'as in "*.up.weight"'
            )
    return dict(plan)


def _both(there: list[str], here: list[str]) -> str:
    """The name that two globs share, or a name each found the tensor under."""
    shared = [name for name in here if name in there]
    return shared[0] if shared else f"one tensor with the names {there[0]} and {here[0]}"


def _matches(glob: str, name: str) -> bool:
    return fnmatch.fnmatchcase("." + name, glob) or fnmatch.fnmatchcase(name, glob)


def _no_match(glob: str, names: list[str]) -> str:
    near = difflib.get_close_matches(glob.lstrip("*."), names, n=3, cutoff=0.3) or names[:3]
    return f"the plan's glob {glob!r} matches no parameter or input; near it: {', '.join(near) or 'the model has none'}"


def _attr(glob: str, spec: Sequence[DimSpec], name: str, shape: Sequence[int], mesh: Mesh) -> DistAttr:
    what = f"the plan's {glob!r}: {_show(spec)}"
    dims = _axes(glob, spec, len(shape), mesh)
    if len(spec) > len(shape):
        raise PlanError(
            f"{what} splits dim {len(spec) - 1}, but {name} has the shape {list(shape)} and only {len(shape)} dim{'s' * (len(shape) != 1)}"
            + ("; a value without dims cannot be split" if not shape else "")
        )
    used = [axis for axes in dims for axis in axes]
    if twice := sorted({axis for axis in used if used.count(axis) > 1}):
        raise PlanError(f"{what} uses the axis {twice[0]!r} twice on {name}; an axis splits one dim of a value once")
    dims += [()] * (len(shape) - len(dims))
    return DistAttr.split(*dims).normalize(shape, mesh)


def _axes(glob: str, spec: Sequence[DimSpec], ndim: int | None, mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes of each dim that the plan speaks of; ``ndim`` is that of the value, where it is known."""
    what = f"the plan's {glob!r}: {_show(spec)}"
    if not _is_list(spec):
        first = spec if isinstance(spec, str) else "tp"
        remedy = [f'"{first}"', *["None"] * ((ndim or 1) - 1)] if ndim != 0 else []
        shown = f"({', '.join(remedy)}{',' * (len(remedy) == 1)})"
        raise PlanError(f"{what} is not a tuple with an axis or None for each dim, as in {shown}")
    dims: list[tuple[str, ...]] = []
    for entry in spec:
        if not (entry is None or isinstance(entry, str) or _is_list(entry)):
            raise PlanError(f"{what} has {entry!r} where an axis, a tuple of axes or None belongs")
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if not isinstance(axis, str):
                raise PlanError(f'{what} has {axis!r} in {entry!r}, where only axes belong, as in ("dp", "tp")')
            try:
                mesh.check_axis(axis)
            except ValueError as error:
                raise PlanError(f"{what}: {error}") from None
        dims.append(axes)
    return dims


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


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
