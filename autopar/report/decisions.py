"""Describe the decisions made for the user.

Which of a preset's names matched, which values stay whole, and which axes split nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from autopar.ir.mesh import EXPERTS, SEQUENCE, Mesh

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
