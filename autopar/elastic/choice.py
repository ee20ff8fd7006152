"""Choose the mesh of the ranks that are there, and so many micro-batches that the global batch stays as it is."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.elastic.pattern import Pattern, pattern_of
from autopar.elastic.torchrun import check_stores
from autopar.errors import shown
from autopar.ir.mesh import Mesh
from autopar.plan.batch import axes_of_rows


@dataclass(frozen=True)
class Choice:
    """The mesh of this job, and the micro-batches of a step on it.

    Attributes:
        mesh: for ``autopar.parallelize``.
        microbatches: for ``parallel.train_step``.
        global_batch: the rows of a step on all ranks together; the same on each mesh.
        micro_batch: the rows that a rank computes at a time; the same on each mesh.
    """

    mesh: Mesh
    microbatches: int
    global_batch: int
    micro_batch: int

    def __str__(self) -> str:
        return (
            f"{self.mesh}: {self.global_batch} rows a step in {self.microbatches} micro-batch"
            f"{'es' * (self.microbatches != 1)} of {self.micro_batch} row{'s' * (self.micro_batch != 1)} a rank"
        )


def choose(
    *meshes: str | Mesh,
    global_batch: int,
    micro_batch: int,
    axes: Sequence[str] | None = None,
    ranks: int | None = None,
) -> Choice:
    """Return the first of these meshes that has as many ranks as the job, and its number of micro-batches.

    ``global_batch = micro_batch × ranks that split the batch × micro-batches``. With fewer ranks there are more
    micro-batches, so a step computes the same rows, and a rank needs no more memory for activations.

    Args:
        meshes: the allowed meshes, the best first: ``"dp=2,tp=2"``, an ``autopar.Mesh``, or ``"dp=*,tp=2"``, in which
            the size of ``dp`` follows from the number of ranks.
        global_batch: the rows of a step on all ranks together.
        micro_batch: the rows that a rank computes at a time.
        axes: the axes that split the batch; by default the data axis and ``ep``, as in a plan that names no inputs.
        ranks: the number of ranks; by default that of the job (``WORLD_SIZE``). In a process that no launcher has
            started, the first mesh is chosen, for ``simulate``.

    Raises:
        TypeError, ValueError: a mesh is none, or a size is no number of rows, or of ranks.
        ValueError: no mesh has as many ranks as the job; or the micro-batches of a mesh do not add up to the global
            batch: all meshes are checked before anything starts, because a mesh that fails when a host was lost is of
            no use; or torchrun has a setting under which the job would hang when a host comes back.
    """
    _check_count("global_batch", global_batch, "rows")
    _check_count("micro_batch", micro_batch, "rows")
    if ranks is not None:
        _check_count("ranks", ranks, "ranks")
    patterns = [pattern_of(given) for given in meshes]
    if not patterns:
        raise ValueError("no mesh is allowed; name one or more, as in choose('dp=2,tp=2', 'tp=2', …)")
    for pattern in patterns:
        if not pattern.is_open:
            mesh = pattern.mesh(pattern.fixed)
            assert mesh is not None
            microbatches_on(mesh, global_batch, micro_batch, axes)
    check_stores()
    if ranks is None and not os.environ.get("WORLD_SIZE"):
        ranks = patterns[0].fixed
    mesh = mesh_of_ranks(patterns, int(os.environ["WORLD_SIZE"]) if ranks is None else ranks)
    return Choice(mesh, microbatches_on(mesh, global_batch, micro_batch, axes), global_batch, micro_batch)


def mesh_of_ranks(patterns: Sequence[Pattern], ranks: int, environment: Mapping[str, str] = os.environ) -> Mesh:
    """Return the first mesh of so many ranks.

    Raises:
        ValueError: there is none; says what torchrun can do about it.
    """
    found = next((mesh for pattern in patterns if (mesh := pattern.mesh(ranks)) is not None), None)
    if found is not None:
        return found
    fitting = "; ".join(f"{pattern} has {pattern.ranks}" for pattern in patterns)
    raise ValueError(
        f"the job has {ranks} rank{'s' * (ranks != 1)}, and no allowed mesh has as many: {fitting}\n"
        f"  {_remedy(patterns, ranks, int(environment.get('LOCAL_WORLD_SIZE') or 1))}"
    )


def _remedy(patterns: Sequence[Pattern], ranks: int, local: int) -> str:
    allow = f"allow a mesh of {ranks}"
    sizes = sorted(pattern.fixed for pattern in patterns)
    if any(pattern.is_open for pattern in patterns) or sizes[0] < ranks < sizes[-1]:
        return f"{allow}, or leave out hosts"
    least, most = (max(1, math.ceil(size / local)) for size in (sizes[0], sizes[-1]))
    if ranks > sizes[-1]:
        return (
            f"{allow}; or start with torchrun --nnodes {least}:{most}: further hosts wait, and step in when one is lost"
        )
    return f"{allow}; or start with torchrun --nnodes {least}:{most}: the hosts that are left wait for another one"


def microbatches_on(mesh: Mesh, global_batch: int, micro_batch: int, axes: Sequence[str] | None = None) -> int:
    """Return the number of micro-batches of a step on a mesh.

    Raises:
        ValueError: the mesh has no such axis, or the micro-batches do not add up to the global batch.
    """
    splitting = axes_of_rows(mesh) if axes is None else [mesh.check_axis(axis) for axis in axes]
    pieces = math.prod(mesh.sizes[axis] for axis in splitting)
    if global_batch % (pieces * micro_batch) == 0:
        return global_batch // (pieces * micro_batch)
    rows = global_batch // pieces
    less = next((n for n in range(min(micro_batch, rows), 0, -1) if global_batch % (pieces * n) == 0), None)
    batch = round(global_batch / (pieces * micro_batch)) or 1
    remedy = f"micro_batch={less}, or " if less is not None else ""
    raise ValueError(
        f"on the mesh ({mesh}) {pieces} rank{'s' * (pieces != 1)} split the batch, and {pieces} × {micro_batch} rows "
        f"do not divide the global batch of {global_batch}; use {remedy}global_batch={batch * pieces * micro_batch}, "
        f"or leave this mesh out"
    )


def _check_count(name: str, count: int, of: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{name}={shown(count)} is no number of {of}; give 1 or more")
