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
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.errors import PlanError, class_of, shown
from autopar.ir.layout import UNDECIDED, DistAttr
from autopar.ir.mesh import EXPERTS, SEQUENCE, Mesh
from autopar.plan.batch import batch_axes, data_axes, split_batch
from autopar.plan.matching import Choice, Layer, Matcher, is_of_parameter, matches
from autopar.plan.presets import PRESETS
from autopar.plan.spec import Spec, axes_of

if TYPE_CHECKING:
    from autopar.capture.naming import Part


# -- decisions ---------------------------------------------------------------------------------------------------------
#
# Describe the decisions made for the user.
#
# Which of a preset's names matched, which values stay whole, and which axes split nothing.


SHOWN = 8  # the most names in a sentence

USED_BY = {  # axis → what uses it; all other axes split the batch
    "tp": "a plan that names it, or a preset with the names of the model's layers, uses it",
    SEQUENCE: "it splits dim 1 of the inputs, where the first has one",
    EXPERTS: "it splits dim 0 of the inputs, and the values for which a plan names it",
}
OTHERS_USED_BY = 'a plan that names it for an input or a parameter uses it, as in {{"*.weight": ("{axis}", None)}}'


def layer_of(glob: str) -> str:
    """Return the layer that a preset's glob names: ``attn.c_proj:Conv1D`` for ``*.attn.c_proj:Conv1D.weight``."""
    layer, _, parameter = glob.removeprefix("*.").rpartition(".")
    return layer if layer and parameter in ("weight", "bias") else glob.removeprefix("*.")


def unmatched_names(globs: Iterable[str], matched: Collection[tuple[str, bool]]) -> list[str]:
    """Return the layers that no glob of a preset has matched."""
    matched_layers = {layer_of(glob) for glob, _ in matched}
    return [layer for layer in dict.fromkeys(map(layer_of, globs)) if layer not in matched_layers]


def preset_notes(
    preset: str, asked: bool, matched: Collection[tuple[str, bool]], unmatched: Sequence[str], *, search: bool = False
) -> list[str]:
    """Return a note with each of a preset's names and how many parameters it matched.

    Args:
        asked: whether the user chose the preset.
        matched: for each value the glob that decided it, and whether that splits it.
        search: whether the preset constrains a search.
    """
    why = "" if asked else "without a plan, "
    if not matched and search:
        return [f"the model has none of the names of the preset {preset}, so it does not constrain the search"] * bool(
            unmatched
        )
    if not matched:
        return [
            f"{why}the preset {preset} is for this mesh, but the model has none of its names: every rank of tp does "
            f"the same work; give a plan"
        ] * bool(unmatched)
    counts = Counter(layer_of(glob) for glob, split in matched if split and not glob.endswith("()"))
    outputs = sum(glob.endswith("()") for glob, _ in matched)
    matched_text = _parameters(counts.total()) + f" and {outputs} module output{'s' * (outputs > 1)}" * bool(outputs)
    named = ", ".join(f"{layer} {count}" for layer, count in counts.items())
    unmatched_text = f'; {len(unmatched)} other names of it match nothing (reports["capture"].unmatched)'
    return [
        f"{why}the preset {preset} splits {matched_text} over tp: {named}{unmatched_text * bool(unmatched)}"
        + "; give a plan to change it" * (not asked)
    ]


def sharded_note(preset: str, count: int, parameters: int, axes: Sequence[str]) -> str:
    """Return a note about parameters that a preset splits by their shapes over the last of the axes of the batch."""
    copies = f", with copies over {' and '.join(axes[:-1])}" * (len(axes) > 1)
    return f"the preset {preset} splits {count} of {_parameters(parameters)} over {axes[-1]}, as the batch{copies}"


def whole_note(whole: Sequence[str]) -> list[str]:
    """Return a note about parameters with two dims or more that a preset leaves whole on every rank of tp."""
    if not whole:
        return []
    counts = Counter(".".join(part for part in name.split(".")[-3:] if not part.isdigit()) for name in whole)
    shown = ", ".join(
        f"{name} {count}" for name, count in [*counts.items()][:SHOWN]
    ) + f" and {len(counts) - SHOWN} more names" * (len(counts) > SHOWN)
    return [
        f"whole on every rank of tp: {_parameters(len(whole))} of two dims or more: {shown}; name them in a plan to "
        f"split them"
    ]


def parts_note(kinds: Sequence[str]) -> list[str]:
    """Return a note about parts of adapters and parametrizations that are split like the weights they belong to."""
    counted = ", ".join(f"{kind} {count}" for kind, count in Counter(kinds).items())
    return [f"parts of adapters and parametrizations are split as the weights that they belong to: {counted}"] * bool(
        kinds
    )


def needed_whole_note(names: Sequence[str]) -> list[str]:
    """Return a note about originals of parametrizations that stay whole, although the computed weight is split."""
    shown = ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
    return [
        f"whole on every rank: {shown}; each element that the parametrization computes depends on all of it, and the "
        f"result is split"
    ] * bool(names)


def _parameters(count: int) -> str:
    return f"{count} parameter{'s' * (count != 1)}"


def unused_axes(mesh: Mesh, used: Collection[str], noted: Collection[str] = ()) -> list[str]:
    """Return a note for each axis of more than one rank that splits nothing.

    The axes ``noted`` are left out, because they have another note.
    """
    return [
        f"the axis {axis} splits nothing: its {size} ranks do the same work; "
        f"{USED_BY.get(axis) or OTHERS_USED_BY.format(axis=axis)}"
        for axis, size in mesh.axes
        if size > 1 and axis not in used and axis not in noted
    ]


# -- plan --------------------------------------------------------------------------------------------------------------


Plan = Mapping[str, Spec] | str | Sequence[Mapping[str, Spec] | str]

SEARCH = "search"  # the entry of a plan that asks for the cheapest one
BY_DEFAULT = "megatron"  # the preset of a mesh with an axis tp, without a plan


@dataclass
class Constraints:
    """A plan that is resolved for a model.

    Attributes:
        attrs: name → DistAttr.
        notes: decisions that were made for the user.
        preset: whether a preset matched something.
        unmatched: names of presets that match nothing.
        search: whether the layouts of all other values are searched; dims with ``?`` are then open.
        named: the values that dicts of the user name.
    """

    attrs: dict[str, DistAttr] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    preset: bool = False
    unmatched: list[str] = field(default_factory=list)
    search: bool = False
    named: set[str] = field(default_factory=set)


def searches(plan: object) -> bool:
    """Return whether a plan asks for a search."""
    return SEARCH in (plan if isinstance(plan, (list, tuple)) else [plan])


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
    buffers: Collection[str] = (),
    calls: bool = True,
) -> Constraints:
    """Match a plan against names and shapes.

    Args:
        parameters: name → shape, parameters and buffers.
        inputs: name → shape of the tensor inputs; ``None`` if they are not known yet (globs that match no
            parameter are then accepted, unless they end as the name of one does).
        aliases: other names of a tensor → its listed name; also names with the classes of modules. A glob may
            match any of them; the result has the listed name.
        outputs: ``module()`` → shape of the value that it returns.
        through: names without wrappers, each with a listed name that it may mean. A glob may match them too; within one
            dict, a glob that matches one of the other names has precedence.
        parts: tensors that are split as another tensor is, unless a dict of the user names them.
        buffers: names among ``parameters`` of what is no parameter; presets split it by its name only.
        calls: whether outputs are known; if not, globs over them are accepted.

    In a search, no default applies: only a preset splits the batch, and parts follow no base.

    Raises:
        PlanError: the value is no plan, or has an unknown preset or axis, a glob without a match, an axis that is used
            twice, a dim that does not exist, or two globs in one dict that split one value differently (in a preset the
            later one is used).
    """
    shapes = {**parameters, **(inputs or {}), **(outputs or {})}
    resolved = Constraints(search=searches(plan))
    matcher = Matcher(mesh, shapes, aliases or {}, through, {part.name for part in parts}, resolved.search)
    layers, sharded = _layers(plan, mesh), {n: shape for n, shape in parameters.items() if n not in buffers}
    named = _match(matcher, layers, resolved, sharded, inputs is not None, calls)
    resolved.named = named
    if not resolved.search:
        following = [part for part in parts if part.name not in named]
        _follow_bases(resolved, following, {*parameters, *(outputs or {})})
        for layer in layers:
            _shard(resolved, layer, mesh, {p.name: sharded[p.name] for p in following if p.name in sharded})
    input_axes = _axes_of_inputs(plan, mesh, {name: len(shape) for name, shape in (inputs or {}).items()})
    axes = max((PRESETS[layer.preset].batch for layer in layers if layer.preset), default=0)
    axes = axes or int(not resolved.search)
    if axes and inputs and not any(map(any, input_axes.values())):
        others = {name: shape for name, shape in inputs.items() if name not in input_axes}
        attrs, notes = split_batch(mesh, others, axes)
        resolved.attrs |= attrs
        resolved.notes += notes
    return resolved


def _match(
    matcher: Matcher,
    layers: Sequence[Layer],
    resolved: Constraints,
    sharded: Mapping[str, Sequence[int]],
    with_inputs: bool,
    with_calls: bool,
) -> set[str]:
    """Give ``resolved`` the layouts of all dicts; later ones override earlier ones. Returns the names of the values
    that dicts of the user split.

    Args:
        sharded: name → shape of the parameters that presets shard by their shapes.
        with_inputs, with_calls: whether inputs and outputs are known; a glob without a match may mean an unknown one.
    """
    named: set[str] = set()
    for layer in layers:
        misfits: dict[str, str] = {}
        choices = matcher.choices(
            layer,
            misfits,
            lambda glob: (
                (with_inputs and (with_calls or not glob.endswith("()"))) or is_of_parameter(glob, matcher.shapes)
            ),
        )
        if not layer.preset:
            named |= choices.keys()
        elif with_inputs:
            _note_preset(resolved, layer, choices, misfits)
        resolved.attrs |= {name: choice.attr for name, choice in choices.items()}
        if (count := _shard(resolved, layer, matcher.mesh, sharded)) is not None and with_inputs:
            axes = data_axes(matcher.mesh)[: PRESETS[layer.preset].batch]
            resolved.notes.append(sharded_note(layer.preset, count, len(sharded), axes))
    return named


def _shard(resolved: Constraints, layer: Layer, mesh: Mesh, parameters: Mapping[str, Sequence[int]]) -> int | None:
    """Give parameters the layouts that a preset makes of their shapes.

    Returns how many of them are split over the axis of the batch; ``None`` if the preset does not ask for shapes.
    """
    preset = PRESETS[layer.preset] if layer.preset else None
    if preset is None or preset.of_shape is None:
        return None
    axis = data_axes(mesh)[preset.batch - 1]
    for name, shape in parameters.items():
        before = resolved.attrs.get(name, DistAttr.replicated(len(shape)))
        resolved.attrs[name] = preset.of_shape(before, shape, mesh, axis)
    return sum(axis in resolved.attrs[name].axes for name in parameters)


def _follow_bases(resolved: Constraints, parts: Sequence[Part], known: Collection[str]) -> None:
    """Split tensors as the tensors that they are parts of."""
    for part in parts:
        if part.base in resolved.attrs and part.name in known:
            resolved.attrs[part.name] = part.attr(resolved.attrs[part.base])


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


def sharding_axis(plan: Plan | None, mesh: Mesh) -> str | None:
    """Return the axis over which HSDP splits parameters, where the plan has that preset."""
    for layer in reversed(_layers(plan, mesh)):
        if layer.preset and PRESETS[layer.preset].batch > 1:
            return data_axes(mesh)[PRESETS[layer.preset].batch - 1]
    return None


def _axes_of_inputs(plan: Plan | None, mesh: Mesh, inputs: Mapping[str, int]) -> dict[str, list[frozenset[str]]]:
    """Map each input that a plan names to the axes of each dim."""
    globs = [(glob, spec) for layer in _layers(plan, mesh) for glob, spec in layer.globs.items()]
    return {
        name: axes_of(spec, ndim, mesh) for glob, spec in globs for name, ndim in inputs.items() if matches(glob, name)
    }


def _layers(plan: object, mesh: Mesh) -> list[Layer]:
    if plan is None:
        return [Layer(PRESETS[BY_DEFAULT].globs, BY_DEFAULT, requested=False)] if "tp" in mesh.names else []
    entries = plan if isinstance(plan, (list, tuple)) else [plan]
    return [_layer(entry, mesh) for entry in entries if entry != SEARCH]


def _layer(plan: object, mesh: Mesh) -> Layer:
    if isinstance(plan, str):
        if plan not in PRESETS:
            near = difflib.get_close_matches(plan.lower(), [*PRESETS, SEARCH], n=1)
            raise PlanError(
                f'no preset {shown(plan)}; presets are {", ".join(PRESETS)}, "search" finds the cheapest plan, and a '
                f"plan of your own is a dict from globs" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        preset = PRESETS[plan]
        if preset.batch > 1 and len(data_axes(mesh)) < preset.batch:
            raise PlanError(
                f"the preset {shown(plan)} splits the batch over two axes, with copies of the parameters over the "
                f"first, and pieces of them over the second, and the mesh ({mesh}) has no two such axes; name them so: "
                f'Mesh(replica=2, shard=2), or take "fsdp", which needs one'
            )
        if preset.of_shape is not None and not data_axes(mesh):
            raise PlanError(
                f"the preset {shown(plan)} splits the batch and parameters over an axis of the batch, and the mesh "
                f"({mesh}) has none; name one so: Mesh(dp=2)"
            )
        if preset.globs and "tp" not in mesh.names:
            raise PlanError(
                f"the preset {shown(plan)} splits over an axis named tp, and the mesh ({mesh}) has none; name one so: "
                f"Mesh(tp=2)"
            )
        return Layer(preset.globs, plan)
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
    return Layer(dict(plan))


def _note_preset(
    resolved: Constraints, layer: Layer, choices: Mapping[str, Choice], misfits: Mapping[str, str]
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
