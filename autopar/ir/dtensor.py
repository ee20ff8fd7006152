"""Convert between autopar's layouts and meshes and DTensor's placements and device meshes.

DTensor has one placement for each axis of the mesh (``Shard(0)``, ``Replicate()``, ``Partial()``); a DistAttr has for
each dim the axes that split it. Where several axes split one dim, DTensor splits in the order of the mesh, major first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

from autopar.errors import shown
from autopar.ir.layout import WHOLE, Dim, DistAttr, Layout
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.torch_private import device_mesh_of_others, is_strided_shard, strided_shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

# reduction of Partial → kind of pending value
KINDS = {"sum": "sum", "max": "max", "min": "min", "product": "prod", "avg": "avg"}


def attr_of(placements: Sequence[Placement], mesh: Mesh, shape: Sequence[int]) -> DistAttr:
    """Return the DistAttr of some placements: ``(Shard(0), Replicate())`` on dp=2 tp=2 is ``[32/dp 64]``.

    Raises:
        ValueError: the number of placements is not that of the axes, a dim does not exist, or a placement is not
            public.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    check_count(placements, mesh)
    dims: list[list[str]] = [[] for _ in shape]
    merged: dict[int, Dim] = {}
    pending: dict[str, str] = {}
    mesh = with_an_axis(mesh)
    for axis, placement in zip(mesh.names, placements, strict=True):
        kind = type(placement)  # exact classes only: subclasses have another meaning
        if isinstance(placement, Shard) and kind is Shard:
            if not -len(shape) <= placement.dim < len(shape):
                raise ValueError(
                    f"{shown(placement)} over {axis} splits dim {placement.dim} of a value of {len(shape)}; use "
                    f"Replicate() or an existing dim"
                )
            dims[placement.dim].append(axis)
        elif is_strided_shard(placement):
            d, parts = placement.dim, placement.split_factor
            if shape[d] % (parts * mesh.sizes[axis]):
                raise ValueError(f"{shown(placement)} over {axis} splits dim {d} of {shape[d]} unevenly; use Shard")
            merged[d] = ((parts, ()), (shape[d] // parts, (axis,)))
        elif isinstance(placement, Partial) and kind is Partial:
            if placement.reduce_op not in KINDS:
                raise ValueError(
                    f"{shown(placement)} over {axis} has a reduction that autopar does not have; reduce by one of "
                    f"{', '.join(KINDS)}"
                )
            pending[axis] = KINDS[placement.reduce_op]
        elif kind is not Replicate:
            raise ValueError(
                f"{shown(placement)} over {axis} is neither Shard, Replicate nor Partial; give the axes of each dim "
                f"instead"
            )
    if len(set(pending.values())) > 1:
        raise ValueError(
            f"{shown(tuple(placements))} is partial in two ways at once; the order of the reductions would matter"
        )
    if both := [d for d in merged if dims[d]]:
        raise ValueError(f"{shown(tuple(placements))} splits dim {both[0]} and parts of it; use Shard for both")
    attr = DistAttr.split(*dims, pending=pending)
    return replace(attr, dims=tuple(merged.get(d, dim) for d, dim in enumerate(attr.dims))).normalize(shape, mesh)


def check_count(placements: Sequence[Placement], mesh: Mesh) -> None:
    """Check that there is one placement for each axis; ``ValueError`` otherwise."""
    if not isinstance(placements, Sequence):
        raise ValueError(
            f"{shown(placements)} is no tuple; give one placement for each axis of the mesh: {', '.join(mesh.names)}"
        )
    if len(placements) != len(with_an_axis(mesh).names):
        raise ValueError(
            f"{len(placements)} placements for the axes {', '.join(mesh.names)}; give one for each axis of the mesh, "
            f"in order"
        )


def placements_of(attr: DistAttr, mesh: Mesh, shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return the placements of a value of this shape with the attribute ``attr``; axes of size one replicate.

    Raises:
        ValueError: a dim is merged, or has its axes in another order than the mesh. Such values are converted to
            another Layout at the edge of a program.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    placements: dict[str, Placement] = {}
    for d, dim in enumerate(attr.normalize(shape, mesh).dims):
        if strided := _strided(dim, mesh):
            placements[strided[0]] = strided_shard(d, strided[1])
            continue
        if len(dim) > 1:
            raise ValueError(
                f"dim {d} is split in parts, which placements cannot express; gather it, or split the whole dim"
            )
        axes = dim[0][1]
        if list(axes) != sorted(axes, key=mesh.names.index):
            raise ValueError(
                f"dim {d} is split over {'/'.join(axes)}; placements have axes in the order of the mesh, "
                f"{'/'.join(mesh.names)}"
            )
        placements |= {axis: Shard(d) for axis in axes}
    reduce = {ours: theirs for theirs, ours in KINDS.items()}
    placements |= {axis: Partial(reduce[kind]) for axis, kind in attr.pending if mesh.sizes[axis] > 1}
    return tuple(placements.get(axis, Replicate()) for axis in with_an_axis(mesh).names)


def edge_of(attr: DistAttr, mesh: Mesh, shape: Sequence[int], *, strided: bool = False) -> DistAttr:
    """Return the nearest attribute that placements can express: nothing pending, and every other dim gathered.

    ``strided``: keep a dim of equal parts that are split evenly, such as a fused qkv weight's ``(3 4096/tp)``.
    """
    order = {axis: k for k, axis in enumerate(mesh.names)}
    dims = tuple(
        dim
        if (len(dim) == 1 and list(dim[0][1]) == sorted(dim[0][1], key=order.__getitem__))
        or (strided and _strided(dim, mesh))
        else WHOLE
        for dim in attr.normalize(shape, mesh).dims
    )
    return DistAttr(dims).normalize(shape, mesh)


def _strided(dim: Dim, mesh: Mesh) -> tuple[str, int] | None:
    """Return the axis and the number of parts of a dim such as ``(3 4096/tp)``; ``None`` for other dims."""
    if len(dim) != 2 or dim[0][1] or len(dim[1][1]) != 1:
        return None
    (parts, _), (size, (axis,)) = dim
    return (axis, parts) if parts is not None and size is not None and size % mesh.sizes[axis] == 0 else None


def with_an_axis(mesh: Mesh) -> Mesh:
    """Return the mesh; one without axes, such as a stage of one rank, gets one, as torch's meshes have at least one."""
    return mesh if mesh.axes else Mesh({PIPELINE: 1}, ranks=mesh.ranks, name=mesh.name)


def layout_of_dtensor(tensor: DTensor) -> Layout:
    """Return the Layout of a DTensor, on a mesh of the same ranks.

    The axes have the names of the device mesh. Where it has none that are identifiers, they are ``axis0``, ``axis1``, …

    Raises:
        ValueError: autopar does not know one of the placements.
    """
    device_mesh = tensor.device_mesh
    names = device_mesh.mesh_dim_names or ()
    if not names or not all(map(str.isidentifier, names)):
        names = tuple(f"axis{k}" for k in range(device_mesh.ndim))
    mesh = Mesh(dict(zip(names, device_mesh.shape, strict=True)), ranks=device_mesh.mesh.flatten().tolist())
    return Layout(mesh, attr_of(tensor.placements, mesh, tuple(tensor.shape)))


def is_device_mesh(value: object) -> TypeGuard[DeviceMesh]:
    """Return whether a value is torch's DeviceMesh, without importing that class."""
    return any(
        base.__name__ == "DeviceMesh" and base.__module__.startswith("torch.distributed")
        for base in type(value).__mro__
    )


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Return autopar's mesh of the same ranks.

    Raises:
        ValueError: a dim of the device mesh has no name, or one that is no identifier.
    """
    names = device_mesh.mesh_dim_names
    if not names:
        raise ValueError('the device mesh has no names for its dims; make it with mesh_dim_names=("dp", "tp")')
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(
            f"the device mesh has a dim called {wrong[0]!r}, which is no identifier; choose another name in "
            f"mesh_dim_names"
        )
    sizes = dict(zip(names, device_mesh.mesh.shape, strict=True))
    return Mesh(sizes, ranks=device_mesh.mesh.flatten().tolist())


def device_mesh_of(mesh: Mesh, device_type: str = "cpu", groups: Sequence[ProcessGroup] | None = None) -> DeviceMesh:
    """Return torch's device mesh of the same ranks and names. All ranks must call it.

    Args:
        groups: the process group of this rank along each axis, none where it is not on the mesh; ``None``: torch makes
            groups.

    Raises:
        RuntimeError: no process group has been initialised.
    """
    import torch
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "a device mesh needs processes: start them with torchrun and call torch.distributed.init_process_group() "
            "first"
        )
    from torch.distributed.device_mesh import DeviceMesh

    mesh = with_an_axis(mesh)
    ranks = torch.tensor(list(mesh.ranks)).reshape(list(mesh.sizes.values()))
    if groups is None:
        return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(mesh.names))
    if distributed.get_rank() not in mesh:
        return device_mesh_of_others(device_type, ranks, tuple(mesh.names))
    return DeviceMesh.from_group(list(groups), device_type, ranks, mesh_dim_names=tuple(mesh.names))
