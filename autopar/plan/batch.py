"""Split the batch, and shard parameters over its axis: what presets and the default of a plan do to all values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ir.layout import DistAttr
from autopar.ir.mesh import EXPERTS, PIPELINE, SEQUENCE, Mesh

NOT_BATCH = ("tp", PIPELINE, SEQUENCE, EXPERTS)  # axes that are never the first to split the batch by default


def batch_axes(mesh: Mesh) -> list[str]:
    """Return the axes that may split the batch."""
    return [name for name in mesh.names if name not in NOT_BATCH or name == EXPERTS]


def data_axes(mesh: Mesh) -> list[str]:
    """Return the axes without another meaning, in the order of the mesh. By default the first splits the batch.

    With HSDP the first two split it: the first has copies of the parameters, and the second splits them.
    """
    return [name for name in mesh.names if name not in NOT_BATCH]


def axes_of_rows(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which a plan splits the batch if it names no input, major first.

    Raises:
        ValueError: the mesh has several data axes, over which plans split differently.
    """
    of_data = [axis for axis in data_axes(mesh) if mesh.sizes[axis] > 1]
    if len(of_data) > 1:
        raise ValueError(
            f"the mesh ({mesh}) has several data axes, {' and '.join(of_data)}; name those over which the plan "
            f"splits the batch: axes={tuple(of_data)} with the preset hsdp, axes=({data_axes(mesh)[0]!r},) without it"
        )
    return (*data_axes(mesh)[:1], *[axis for axis in mesh.names if axis == EXPERTS])


def split_over(attr: DistAttr, shape: Sequence[int], mesh: Mesh, axis: str) -> DistAttr:
    """Return ``attr`` with one more dim sharded over ``axis``.

    It is the first unsharded dim that ``axis`` divides, else the longest unsharded dim. The layout stays as it is if
    every unsharded dim has fewer elements than ``axis`` has ranks, or if ``axis`` shards a dim already.
    """
    if axis in attr.axes or mesh.sizes[axis] == 1:
        return attr
    whole = attr.normalize(tuple(shape), mesh)
    free = [d for d, dim in enumerate(whole.dims) if len(dim) == 1 and not dim[0][1] and shape[d] >= mesh.sizes[axis]]
    if not free:
        return attr
    chosen = next((d for d in free if shape[d] % mesh.sizes[axis] == 0), max(free, key=lambda d: shape[d]))
    dims = list(whole.dims)
    dims[chosen] = ((dims[chosen][0][0], (axis,)),)
    return replace(whole, dims=tuple(dims)).normalize(tuple(shape), mesh)


def split_batch(
    mesh: Mesh, inputs: Mapping[str, Sequence[int]], count: int = 1
) -> tuple[dict[str, DistAttr], list[str]]:
    """Return the layouts of inputs whose batch and sequence are split by default, and notes.

    The batch is split over ``ep`` and over the first axes without another meaning, the sequence over ``cp``.

    Args:
        inputs: name → shape, without the inputs that the plan names.
        count: how many of the axes without another meaning split the batch.
    """
    first = next((shape for shape in inputs.values() if len(shape)), None)
    if first is None:
        return {}, []
    batch = [*data_axes(mesh)[:count], *[name for name in mesh.names if name == EXPERTS]]
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
    attrs = {
        name: DistAttr.split(*dims, *[None] * (len(inputs[name]) - len(dims))).normalize(inputs[name], mesh)
        for name, dims in split.items()
        if dims
    }
    whole = [name for name, dims in split.items() if not dims]
    note = (
        f"{'; '.join(decisions)}{'; ' * bool(whole)}{', '.join(whole)}{' stay whole' * bool(whole)}; name inputs in "
        f"the plan to change it"
    )
    return attrs, [note] * bool(decisions)
