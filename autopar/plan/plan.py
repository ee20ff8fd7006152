"""Resolve the user's plan: from globs over names to the layout of each value.

A plan is a dict such as ``{"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}``. A glob is matched against the
name and against ``"." + name``, so that ``*.up.weight`` matches a top-level ``up`` too. A name is that of a parameter,
a buffer or an input; a name with ``()`` at the end is a module and stands for the value that it returns:
``"*.embed()"``. The class of a module may follow its name: ``"*.c_fc:Conv1D.weight"``. ``autopar.plan.spec`` describes
the layouts. A plan may also be the name of a preset, or a list of dicts and presets, in which later entries override
earlier ones.

``"search"``, alone or in such a list, asks for the cheapest plan. The other entries are then constraints: a value that
they name has that layout, dims with ``"?"`` are open, and so is all else.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import PlanError, class_of, shown
from autopar.ir.layout import UNDECIDED, DistAttr
from autopar.ir.mesh import EXPERTS, PIPELINE, SEQUENCE, Mesh
from autopar.plan.presets import PRESETS
from autopar.plan.spec import Spec, attr_of, axes_of, dims_of
from autopar.report.decisions import preset_notes, unmatched_names

if TYPE_CHECKING:
    from autopar.capture.naming import Part

Plan = Mapping[str, Spec] | str | Sequence[Mapping[str, Spec] | str]

SEARCH = "search"  # the entry of a plan that asks for the cheapest one
BY_DEFAULT = "megatron"  # the preset of a mesh with an axis tp, without a plan
NOT_BATCH = ("tp", PIPELINE, SEQUENCE, EXPERTS)  # axes that are never the first to split the batch by default


@dataclass
class Constraints:
    """A plan that is resolved for a model.

    Attributes:
        attrs: name → DistAttr.
        notes: decisions that were made for the user.
        preset: whether a preset matched something.
        unmatched: names of presets that match nothing.
        search: whether the layouts of all other values are searched; dims with ``?`` are then open.
    """

    attrs: dict[str, DistAttr] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    preset: bool = False
    unmatched: list[str] = field(default_factory=list)
    search: bool = False


def searches(plan: object) -> bool:
    """Return whether a plan asks for a search."""
    return SEARCH in (plan if isinstance(plan, (list, tuple)) else [plan])


def without_search(plan: Plan | None) -> Plan | None:
    """Return a plan without its entry ``"search"``: its constraints, and the defaults for inputs."""
    if not searches(plan):
        return plan
    return [entry for entry in plan if entry != SEARCH] if isinstance(plan, (list, tuple)) else []


@dataclass(frozen=True)
class _Layer:
    """One dict of a plan. The dict of a preset has a name, and its globs need not match or fit.

    Attributes:
        requested: whether the user named the preset; else it is the default.
    """

    globs: dict[str, Spec]
    preset: str = ""
    requested: bool = True


@dataclass(frozen=True)
class _Choice:
    """The layout that one dict gives a tensor: the glob, and the tensor's names that it matches.

    It also holds whether these names leave wrappers out.
    """

    attr: DistAttr
    glob: str
    names: list[str]
    through: bool


def resolve(
    plan: Plan | None,
    mesh: Mesh,
    parameters: Mapping[str, Sequence[int]],
    inputs: Mapping[str, Sequence[int]] | None,
    aliases: Mapping[str, str] | None = None,
    outputs: Mapping[str, Sequence[int]] | None = None,
    *,
    through: Sequence[tuple[str, str]] = (),
    parts: Sequence[Part] = (),
    calls: bool = True,
) -> Constraints:
    """Match a plan against names and shapes.

    Args:
        parameters: name → shape, parameters and buffers.
        inputs: name → shape of the tensor inputs; ``None`` if they are not known yet (globs that match no
            parameter are then accepted).
        aliases: other names of a tensor → its listed name; also names with the classes of modules. A glob may
            match any of them; the result has the listed name.
        outputs: ``module()`` → shape of the value that it returns.
        through: names without wrappers, each with a listed name that it may mean. A glob may match them too; within one
            dict, a glob that matches one of the other names has precedence.
        parts: tensors that are split as another tensor is, unless a dict of the user names them.
        calls: whether outputs are known; if not, globs over them are accepted.

    In a search, no default applies: the batch is not split, and parts follow no base.

    Raises:
        PlanError: the value is no plan, or has an unknown preset or axis, a glob without a match, an axis that is used
            twice, a dim that does not exist, or two globs in one dict that split one value differently (in a preset the
            later one is used).
    """
    shapes = {**parameters, **(inputs or {}), **(outputs or {})}
    resolved = Constraints(search=searches(plan))
    matcher = _Matcher(mesh, shapes, aliases or {}, through, {part.name for part in parts}, resolved.search)
    named = _match(matcher, _layers(plan, mesh), resolved, inputs is not None, calls)
    if resolved.search:
        return resolved
    _follow_bases(resolved, [part for part in parts if part.name not in named], {*parameters, *(outputs or {})})
    input_axes = _axes_of_inputs(plan, mesh, {name: len(shape) for name, shape in (inputs or {}).items()})
    if inputs and not any(map(any, input_axes.values())):
        _split_batch(resolved, mesh, {name: shape for name, shape in inputs.items() if name not in input_axes})
    return resolved


def _match(
    matcher: _Matcher, layers: Sequence[_Layer], resolved: Constraints, with_inputs: bool, with_calls: bool
) -> set[str]:
    """Give ``resolved`` the layouts of all dicts; later ones override earlier ones. Returns the names of the values
    that dicts of the user split.

    Args:
        with_inputs, with_calls: whether inputs and outputs are known; a glob without a match may mean an unknown one.
    """
    named: set[str] = set()
    for layer in layers:
        misfits: dict[str, str] = {}
        choices = matcher.choices(layer, misfits, lambda glob: with_inputs and (with_calls or not glob.endswith("()")))
        if not layer.preset:
            named |= choices.keys()
        elif with_inputs:
            _note_preset(resolved, layer, choices, misfits)
        resolved.attrs |= {name: choice.attr for name, choice in choices.items()}
    return named


def _follow_bases(resolved: Constraints, parts: Sequence[Part], known: Collection[str]) -> None:
    """Split tensors as the tensors that they are parts of."""
    for part in parts:
        if part.base in resolved.attrs and part.name in known:
            resolved.attrs[part.name] = part.attr(resolved.attrs[part.base])


@dataclass(frozen=True)
class _Matcher:
    """Matches the dicts of a plan against the names of values.

    Attributes:
        shapes: listed name → shape.
        aliases, through: as for ``resolve``.
        parts: listed names of tensors that follow another; presets do not match them.
        open_: whether dims of parameters and inputs may be undecided.
    """

    mesh: Mesh
    shapes: Mapping[str, Sequence[int]]
    aliases: Mapping[str, str]
    through: Sequence[tuple[str, str]]
    parts: set[str]
    open_: bool = False

    def choices(self, layer: _Layer, misfits: dict[str, str], is_known: Callable[[str], bool]) -> dict[str, _Choice]:
        """Return the layout that a dict gives each value that it matches.

        ``misfits`` receives the globs of a preset that do not fit.
        """
        chosen: dict[str, _Choice] = {}
        for glob, spec in layer.globs.items():
            subject = f"the plan's {glob!r}: {_show(spec)}"
            matches = [*self._matches(glob, layer)]
            if not matches and not layer.preset:
                if is_known(glob):
                    raise PlanError(_no_match(glob, [name for name, _, _ in self._names()]))
                dims_of(subject, spec, None, self.mesh, open_=self.open_ or glob.endswith("()"))
            for listed, names, through in matches:
                try:
                    name = listed if ":" in names[0] else names[0]
                    attr = attr_of(subject, spec, name, self.shapes[listed], self.mesh, open_=self.open_)
                except PlanError as error:
                    if not layer.preset:
                        raise
                    misfits.setdefault(
                        glob,
                        f"of the preset {layer.preset}, {glob!r} does not fit {names[0]}, which stays as it is: "
                        f"{error}",
                    )
                    continue
                before = chosen.get(listed)
                if before is not None and before.through < through:
                    continue
                if before is not None and before.attr != attr and before.through == through and not layer.preset:
                    raise _contradiction(layer.globs, before, glob, names)
                chosen[listed] = _Choice(attr, glob, names, through)
        return chosen

    def _names(self) -> Iterator[tuple[str, str, bool]]:
        """Yield each name, its listed name, and whether it leaves wrappers out."""
        yield from ((name, name, False) for name in self.shapes)
        yield from ((name, listed, False) for name, listed in self.aliases.items())
        yield from ((name, listed, True) for name, listed in self.through if listed in self.shapes)

    def _matches(self, glob: str, layer: _Layer) -> Iterator[tuple[str, list[str], bool]]:
        """Yield each value that a glob matches, its names that match, and whether all of these leave wrappers out."""
        matching: dict[str, tuple[list[str], list[str]]] = {}
        for name, listed, through in self._names():
            if not (layer.preset and listed in self.parts) and _matches(glob, name):
                matching.setdefault(listed, ([], []))[through].append(name)
        for listed, (names, without_wrappers) in matching.items():
            yield listed, names or without_wrappers, not names


def of_the_batch(plan: Plan | None, mesh: Mesh, inputs: Mapping[str, int]) -> dict[str, bool]:
    """Map each input that a plan names to whether its dim 0 is the batch.

    It is if an axis of the batch splits it; an axis of size one counts. The result is empty on a mesh without such an
    axis. Inputs whose dim 0 is open are left out.

    Args:
        inputs: name → number of dims.
    """
    batch = set(batch_axes(mesh))
    return (
        {
            name: bool(dims and dims[0] & batch)
            for name, dims in _axes_of_inputs(plan, mesh, inputs).items()
            if not (dims and UNDECIDED in dims[0])
        }
        if batch
        else {}
    )


def batch_axes(mesh: Mesh) -> list[str]:
    """Return the axes that may split the batch."""
    return [name for name in mesh.names if name not in NOT_BATCH or name == EXPERTS]


def _axes_of_inputs(plan: Plan | None, mesh: Mesh, inputs: Mapping[str, int]) -> dict[str, list[frozenset[str]]]:
    """Map each input that a plan names to the axes of each dim."""
    globs = [(glob, spec) for layer in _layers(plan, mesh) for glob, spec in layer.globs.items()]
    return {
        name: axes_of(spec, ndim, mesh) for glob, spec in globs for name, ndim in inputs.items() if _matches(glob, name)
    }


def _layers(plan: object, mesh: Mesh) -> list[_Layer]:
    if plan is None:
        return [_Layer(PRESETS[BY_DEFAULT], BY_DEFAULT, requested=False)] if "tp" in mesh.names else []
    entries = plan if isinstance(plan, (list, tuple)) else [plan]
    return [_layer(entry, mesh) for entry in entries if entry != SEARCH]


def _layer(plan: object, mesh: Mesh) -> _Layer:
    if isinstance(plan, str):
        if plan not in PRESETS:
            near = difflib.get_close_matches(plan.lower(), [*PRESETS, SEARCH], n=1)
            raise PlanError(
                f'no preset {shown(plan)}; presets are {", ".join(PRESETS)}, "search" finds the cheapest plan, and a '
                f"plan of your own is a dict from globs" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        if PRESETS[plan] and "tp" not in mesh.names:
            raise PlanError(
                f"the preset {shown(plan)} splits over an axis named tp, and the mesh ({mesh}) has none; name one so: "
                f"Mesh(tp=2)"
            )
        return _Layer(PRESETS[plan], plan)
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"a plan is a dict from globs to an axis or None for each dim, as in "
            f'{{"*.up.weight": ("tp", None)}}, the name of a preset, "search", or a list of these, not '
            f"{class_of(plan)}: "
            f"{shown(plan)}"
        )
    for glob in plan:
        if not isinstance(glob, str):
            raise PlanError(
                f"the plan's key {shown(glob)} is not a string; a key is a glob over the names of parameters and "
                f"inputs, "
                f'as in "*.up.weight"'
            )
    return _Layer(dict(plan))


def _note_preset(
    resolved: Constraints, layer: _Layer, choices: Mapping[str, _Choice], misfits: Mapping[str, str]
) -> None:
    """Note what a preset matched."""
    matched = [(choice.glob, not choice.attr.is_replicated) for choice in choices.values()]
    resolved.notes += [
        *preset_notes(
            layer.preset,
            layer.requested,
            matched,
            unmatched := unmatched_names(layer.globs, matched),
            search=resolved.search,
        ),
        *misfits.values(),
    ]
    resolved.preset |= bool(choices)
    resolved.unmatched += unmatched


def _contradiction(globs: Mapping[str, Spec], before: _Choice, glob: str, names: list[str]) -> PlanError:
    shared = [name for name in names if name in before.names]
    both = shared[0] if shared else f"one tensor with the names {before.names[0]} and {names[0]}"
    return PlanError(
        f"the plan contradicts itself on {both}: {before.glob!r} says {_show(globs[before.glob])}, {glob!r} says "
        f"{_show(globs[glob])}; " + ("make the globs disjoint" if shared else "split it alike under both names")
    )


def _matches(glob: str, name: str) -> bool:
    if glob.endswith("()") != name.endswith("()") or (":" in glob) != (":" in name):
        return False
    if ":" in glob:  # a module without a class in the glob may have any class
        *modules, parameter = glob.split(".")
        glob = ".".join([part if ":" in part or not part.strip("*") else f"{part}:*" for part in modules] + [parameter])
    return fnmatch.fnmatchcase("." + name, glob) or fnmatch.fnmatchcase(name, glob)


_ORIGINAL = re.compile(r"(.*)\bparametrizations\.(\w+)\.original\d*")


def _no_match(glob: str, names: list[str]) -> str:
    originals = [name for name in names if (match := _ORIGINAL.fullmatch(name)) and _matches(glob, match[1] + match[2])]
    if originals:
        return (
            f"the plan's glob {glob!r} names a tensor that a parametrization computes from parts of other shapes, so "
            f"the layouts of the parts are not known; name the parts: {', '.join(originals[:4])}"
        )
    calls = glob.endswith("()")
    names = [name for name in names if name.endswith("()") == calls and (":" in name) == (":" in glob)]
    near = difflib.get_close_matches(glob.lstrip("*."), names, n=3, cutoff=0.3) or names[:3]
    kind = "module that is called and returns one tensor, which the step needs" if calls else "parameter or input"
    return f"the plan's glob {glob!r} matches no {kind}; near it: {', '.join(near) or 'the model has none'}"


def _show(spec: object) -> str:
    return shown(tuple(spec) if isinstance(spec, list) else spec)


def _split_batch(resolved: Constraints, mesh: Mesh, inputs: Mapping[str, Sequence[int]]) -> None:
    """Split inputs by default, if the plan splits none.

    The batch is split over ``ep`` and over the first axis without another meaning, the sequence over ``cp``. Inputs
    that the plan names are left out.
    """
    first = next((shape for shape in inputs.values() if len(shape)), None)
    if first is None:
        return
    batch = [
        *[name for name in mesh.names if name not in NOT_BATCH][:1],
        *[name for name in mesh.names if name == EXPERTS],
    ]
    sequence = [SEQUENCE] if SEQUENCE in mesh.names and len(first) > 1 else []
    decisions: list[str] = []
    split: dict[str, tuple[tuple[str, ...] | None, ...]] = dict.fromkeys(inputs, ())
    for dim, axes, meaning in ((0, batch, "batch"), (1, sequence, "sequence")):
        alike = [
            name
            for name, shape in inputs.items()
            if axes and len(shape) > dim and tuple(shape[: dim + 1]) == tuple(first[: dim + 1])
        ]
        for name in alike:
            split[name] = (*split[name], *[None] * (dim - len(split[name])), tuple(axes))
        if alike:
            decisions.append(
                f"{' and '.join(axes)} split{'s' * (len(axes) == 1)} dim {dim} of the inputs {', '.join(alike)} (the "
                f"{meaning}, {first[dim]})"
            )
    for name, dims in split.items():
        if dims:
            resolved.attrs[name] = DistAttr.split(*dims, *[None] * (len(inputs[name]) - len(dims))).normalize(
                inputs[name], mesh
            )
    if decisions:
        whole = [name for name, dims in split.items() if not dims]
        resolved.notes.append(
            f"{'; '.join(decisions)}{'; ' * bool(whole)}{', '.join(whole)}{' stay whole' * bool(whole)}; name inputs "
            f"in the plan to change it"
        )
