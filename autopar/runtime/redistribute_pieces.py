"""Redistribute the pieces of a plain tensor from one layout to another, as ``DTensor.redistribute`` does with DTensors.

It reads the two layouts, finds the global shape, checks the pieces, and runs the transfers: on the processes of a job
for this rank's piece, else for the pieces of all ranks on simulated ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import distributed

from autopar.errors import PlanError, class_of, shown
from autopar.ir import dtensor
from autopar.ir.dense import require_dense
from autopar.ir.layout import UNDECIDED, WHOLE, Dim, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.plan import spec
from autopar.runtime.processes.job import LAUNCHED, Job, job_of
from autopar.runtime.redistribute import Redistribution, RedistributionOnRank
from autopar.runtime.simulation.pieces import join

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyLayout = spec.Spec | DistAttr | Sequence[Any]  # a plan's tuple, a DistAttr, or placements
Pieces = torch.Tensor | Sequence[torch.Tensor] | Mapping[int, torch.Tensor]  # this rank's piece, or those of all ranks
Given = TypeVar("Given", bound=Pieces)

EVEN = "the global shape is taken from the piece, as if all pieces were equal; give shape= where they are uneven"
TIMEOUT = 60.0  # seconds, as parallelize has


def redistribute(
    piece: Given, mesh: Mesh | DeviceMesh, source: AnyLayout, target: AnyLayout, *, shape: Sequence[int] | None = None
) -> Given:
    """Bring a tensor from one layout on ``mesh`` to another.

    It uses the transfers in which the worst rank receives the fewest bytes.

    >>> rows = autopar.redistribute(columns, mesh, (None, "tp"), ("tp", None))  # each rank gives its piece

    On the processes of a job (``torchrun``, or an initialised process group) each rank gives its piece and gets its new
    one. All ranks call it alike, and compare their calls before anything is sent. In a process that is alone, give the
    pieces of all ranks; then all ranks are simulated.

    Args:
        piece: this rank's piece, a plain tensor. In a process that is alone: the pieces of all ranks, as a sequence in
            the order of ``mesh.ranks``, or as a dict by rank. Where a value is replicated, each rank has all of it;
            where it is a partial sum, its own addend.
        mesh: ``autopar.Mesh(dp=2, tp=2)``, or a ``DeviceMesh`` whose dims have names.
        source: the layout of the pieces: an axis, a tuple of axes or ``None`` for each dim, as in a plan; DTensor's
            placements; or a ``DistAttr``. The last two can be partial sums.
        target: the wanted layout, in any of these forms. It can be a partial sum, too.
        shape: the global shape. It can be left out if all pieces are of one size. Uneven pieces follow
            ``torch.chunk``: 5 rows over 2 ranks are 3 and 2.

    Returns:
        What was given for ``piece``: one tensor, a list or a tuple, or a dict by rank. The dtype stays. It is
        differentiable, except from and to a partial maximum, minimum or product: the gradient of an addend is that of
        the sum, and each rank that holds a replicated value has the same gradient of it.

    Raises:
        PlanError: a layout names an unknown axis or one axis twice, or does not fit the value.
        TransitionError: one kind of partial result would become another.
        ValueError: a piece does not have the shape of the rank's piece in ``source``, or the number of pieces or of
            processes is not that of the ranks.
        RuntimeError: the ranks make different calls.
        SimulationError: in a process that is alone, two ranks hold the same piece with different values. On processes
            values are not compared.
        TypeError: a piece is no plain tensor.
    """
    device_mesh: DeviceMesh | None = None
    if dtensor.is_device_mesh(mesh):
        device_mesh, mesh = mesh, dtensor.mesh_of(mesh)
    if not isinstance(mesh, Mesh):
        raise TypeError(f"redistribute takes an autopar.Mesh, as in Mesh(dp=2, tp=2), not {type(mesh).__name__}")
    if isinstance(piece, torch.Tensor):
        return cast(Given, _of_one_rank(piece, mesh, device_mesh, source, target, shape))
    if _on_processes():
        raise TypeError(
            f"redistribute got {class_of(piece)} on one of several processes; each rank gives its own piece, a "
            f"tensor, and the pieces of all ranks are simulated in a process that is alone"
        )
    by_rank = _by_rank(piece, mesh)
    made = _simulated(by_rank, mesh, source, target, shape)
    if isinstance(piece, Mapping):
        return cast(Given, {rank: made[rank] for rank in piece})
    in_order = [made[rank] for rank in mesh.ranks]
    return cast(Given, tuple(in_order) if isinstance(piece, tuple) else in_order)


# -- on simulated ranks ------------------------------------------------------------------------------------------------


def _simulated(
    pieces: Mapping[int, torch.Tensor], mesh: Mesh, source: AnyLayout, target: AnyLayout, shape: Sequence[int] | None
) -> dict[int, torch.Tensor]:
    redistribution = _redistribution(*_ends(pieces[mesh.ranks[0]], mesh, source, target, shape))
    for rank in mesh.ranks:
        _check(redistribution, rank, pieces[rank], shape)
    if not redistribution.source.attr.pending:  # addends differ
        join({rank: piece.detach() for rank, piece in pieces.items()}, redistribution.source, "the value")
    return redistribution.simulate(pieces)


def _by_rank(pieces: Any, mesh: Mesh) -> dict[int, torch.Tensor]:
    """The pieces by rank."""
    ranks = list(mesh.ranks)
    if isinstance(pieces, Mapping):
        if sorted(pieces, key=str) != sorted(ranks, key=str):
            raise ValueError(
                f"redistribute got pieces of the ranks {list(pieces)}, but the mesh ({mesh}) has the ranks {ranks}; "
                f"give a piece for each"
            )
        by_rank = {rank: pieces[rank] for rank in ranks}
    elif isinstance(pieces, Sequence) and not isinstance(pieces, str):
        if len(pieces) != len(ranks):
            raise ValueError(
                f"redistribute got {len(pieces)} piece{'s' * (len(pieces) != 1)}, but the mesh ({mesh}) has "
                f"{len(ranks)} rank{'s' * (len(ranks) != 1)}; give a piece for each, in the order of mesh.ranks"
            )
        by_rank = dict(zip(ranks, pieces, strict=True))
    else:
        raise TypeError(
            f"redistribute takes this rank's piece, a tensor, or the pieces of all ranks, a list or a dict by rank, "
            f"not {class_of(pieces)}"
        )
    for rank, piece in by_rank.items():
        _check_plain(piece, f"the piece of rank {rank}")
    return by_rank


# -- on processes ------------------------------------------------------------------------------------------------------


def _on_processes() -> bool:
    """Whether this process is one of several."""
    if not distributed.is_available():
        return False
    if distributed.is_initialized():
        return distributed.get_world_size() > 1
    return all(os.environ.get(name) for name in LAUNCHED) and os.environ["WORLD_SIZE"] != "1"


def _of_one_rank(
    piece: torch.Tensor, mesh: Mesh, device_mesh: DeviceMesh | None, source: AnyLayout, target: AnyLayout,
    shape: Sequence[int] | None,
) -> torch.Tensor:  # fmt: skip
    _check_plain(piece, "the piece")
    if not _on_processes():
        if mesh.size > 1:
            raise ValueError(
                f"redistribute got one piece, but this process is alone and the mesh ({mesh}) has {mesh.size} ranks; "
                f"give the pieces of all ranks, as a list or a dict by rank, or start a process for each, as with "
                f"torchrun --nproc-per-node {mesh.size}"
            )
        return _simulated({mesh.ranks[0]: piece}, mesh, source, target, shape)[mesh.ranks[0]]
    redistribution = _redistribution(*_ends(piece, mesh, source, target, shape))
    wrong: ValueError | None = None
    try:
        if distributed.is_initialized() and distributed.get_rank() in mesh:
            _check(redistribution, distributed.get_rank(), piece, shape)
    except ValueError as error:  # the other ranks get the error too, so that they do not wait for this one
        wrong = error
    words = f"redistribute {print_type(redistribution.source)} to {print_type(redistribution.target)}"
    words += f" ({EVEN})" * (shape is None) + f", but {wrong}" * (wrong is not None)
    job = job_of(mesh, torch.device(piece.device.type), device_mesh, TIMEOUT, words)
    assert job is not None
    _check(redistribution, job.rank, piece, shape)
    made = _on_rank(redistribution, job)(piece)
    assert made is not None
    return made


_compiled: WeakKeyDictionary[Job, dict[Redistribution, RedistributionOnRank]] = WeakKeyDictionary()


def _on_rank(redistribution: Redistribution, job: Job) -> RedistributionOnRank:
    """The redistribution as functions of this rank, which are compiled once in a job."""
    made = _compiled.setdefault(job, {})
    if redistribution not in made:
        made[redistribution] = redistribution.on(job.rank, job.groups, job.device)
    return made[redistribution]


# -- layouts and shapes ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _redistribution(source: TensorType, target: TensorType) -> Redistribution:
    return Redistribution(source, target)


def _ends(
    piece: torch.Tensor, mesh: Mesh, source: AnyLayout, target: AnyLayout, shape: Sequence[int] | None
) -> tuple[TensorType, TensorType]:
    """The types of the value before and after."""
    whole = _shape_of(source, piece, mesh) if shape is None else _checked_shape(shape, piece)
    before, after = (
        TensorType(whole, piece.dtype, Layout(mesh, _attr(subject, given, whole, mesh)))
        for subject, given in (("source", source), ("target", target))
    )
    return before, after


def _checked_shape(shape: Any, piece: torch.Tensor) -> tuple[int, ...]:
    if (
        not isinstance(shape, Sequence)
        or isinstance(shape, str)
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape)
    ):
        raise TypeError(f"shape={shown(shape)} is not the global shape, a tuple of sizes, as in shape=(5, 4)")
    if len(shape) != piece.dim():
        raise ValueError(
            f"shape={shown(tuple(shape))} has {len(shape)} dim{'s' * (len(shape) != 1)}, but the piece is "
            f"{list(piece.shape)}; give the global shape of the value that it is a piece of"
        )
    return tuple(shape)


def _shape_of(source: AnyLayout, piece: torch.Tensor, mesh: Mesh) -> tuple[int, ...]:
    """The global shape, if all pieces have the size of this one. The sizes of a merged dim's parts are global."""
    if isinstance(source, DistAttr):
        _check_attr("source", source, piece.dim(), mesh)
        dims: Sequence[Dim] = source.dims
    elif spec.is_placements(source):
        _attr("source", source, [0] * piece.dim(), mesh)  # refuses dims that the value lacks
        axes = spec.axes_of(source, piece.dim(), mesh)
        dims = [((None, tuple(some)),) for some in axes]
    else:
        dims = spec.dims_of(_subject("source", source), source, piece.dim(), mesh)
        dims = [*dims, *[WHOLE] * (piece.dim() - len(dims))][: piece.dim()]  # more dims are refused with the layout
    return tuple(_size_of(dim, n, mesh) for dim, n in zip(dims, piece.shape, strict=True))


def _size_of(dim: Dim, piece: int, mesh: Mesh) -> int:
    sizes = [size for size, _ in dim if size is not None and size >= 0]
    return math.prod(sizes) if len(sizes) == len(dim) else piece * mesh.count(axis for _, axes in dim for axis in axes)


def _attr(subject: str, given: AnyLayout, shape: Sequence[int], mesh: Mesh) -> DistAttr:
    """The DistAttr of a layout that the user gives."""
    if isinstance(given, DistAttr):
        _check_attr(subject, given, len(shape), mesh)
        return given.normalize(shape, mesh)
    return spec.attr_of(_subject(subject, given), given, "the value", shape, mesh, pending=True)


def _subject(subject: str, given: AnyLayout) -> str:
    return f"{subject}={shown(given)}"


def _check_attr(subject: str, attr: DistAttr, ndim: int, mesh: Mesh) -> None:
    """``PlanError`` if a DistAttr does not fit the mesh or the number of dims."""
    if len(attr.dims) != ndim:
        raise PlanError(
            f"{subject} is a DistAttr of {len(attr.dims)} dim{'s' * (len(attr.dims) != 1)}, but the piece has {ndim}; "
            f"give one entry for each dim"
        )
    for axis in attr.axes:
        if axis == UNDECIDED:
            raise PlanError(f"{subject} leaves a dim undecided ('?'); give an axis or None")
        try:
            mesh.check_axis(axis)
        except ValueError as error:
            raise PlanError(f"{subject}: {error}") from None
        if attr.axes.count(axis) > 1:
            raise PlanError(f"{subject} uses the axis {axis!r} twice; it splits one dim once, or is pending once")


# -- pieces ------------------------------------------------------------------------------------------------------------


def _check(redistribution: Redistribution, rank: int, piece: torch.Tensor, shape: Sequence[int] | None) -> None:
    """``ValueError`` if a piece is not the rank's piece of the source."""
    try:
        redistribution.check(rank, piece)
    except ValueError as error:
        remedy = EVEN if shape is None else "give the piece that source says, or another shape="
        raise ValueError(
            f"{error}; {remedy if piece.dtype == redistribution.source.dtype else 'give all pieces in one dtype'}"
        ) from None


def _check_plain(piece: Any, name: str) -> None:
    if not isinstance(piece, torch.Tensor):
        raise TypeError(f"{name} is {class_of(piece)}; redistribute takes plain tensors")
    if hasattr(piece, "placements"):
        raise TypeError(
            f"{name} is a DTensor, which redistributes itself: piece.redistribute(placements=...); or give its piece, "
            f"piece.to_local()"
        )
    require_dense([(name, piece)])
