"""Be one rank of a large job in a process that is alone: collectives return at once, and exchange nothing.

The process group has torch's backend ``fake``. All that a rank does beside communication happens: its programs, its
pieces, its memory and its order of communication are those of the real job, and the numbers mean nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from autopar.errors import shown
from autopar.ir.hosts import Hosts
from autopar.ir.mesh import Mesh
from autopar.torch_private import join_fake_job

FAKE = "fake"  # the backend


@dataclass(frozen=True)
class OneRank:
    """The rank that this process is, without the others.

    Attributes:
        mesh, rank: which rank of which mesh.
        ranks_per_host: how many ranks the job would have on each host.
    """

    mesh: Mesh
    rank: int
    ranks_per_host: int

    @staticmethod
    def fill(module: torch.nn.Module) -> None:
        """Give the tensors of a module values that compute: ``parallel.initialize(rank.fill)``.

        Each rank writes to its pieces alone, so that no whole tensor is needed.
        """
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.fill_(0.01 if tensor.is_floating_point() or tensor.is_complex() else 0)

    @property
    def hosts(self) -> Hosts:
        """The hosts of the job."""
        of_rank = tuple(rank // self.ranks_per_host for rank in range(self.mesh.size))
        return Hosts(tuple(f"host {k}" for k in range(of_rank[-1] + 1)), of_rank)


_now: list[OneRank] = []  # none or one


def alone() -> OneRank | None:
    """Return the rank that this process is without the others; ``None`` in a real job, and where there is none."""
    is_fake = distributed.is_available() and distributed.is_initialized() and distributed.get_backend() == FAKE
    return _now[0] if _now and is_fake else None


@contextlib.contextmanager
def one_rank(mesh: Mesh, rank: int, *, ranks_per_host: int | None = None) -> Iterator[OneRank]:
    """Let this process be one rank of a mesh in the ``with`` block, without any other process.

    ``parallelize`` and ``train_step`` make what that rank has: a model on meta stays small, and
    ``parallel.initialize(rank.fill)`` gives its pieces storage. Steps run the rank's functions. Collectives return at
    once and exchange nothing, so that no number means anything. ``step.rank_report(batch)`` says what the rank does.

    Args:
        mesh: the mesh of the job; its ranks are ``0 … size - 1``.
        rank: the rank that this process is.
        ranks_per_host: how many ranks a host has; by default, all ranks share one.

    Raises:
        ValueError: the rank is not on the mesh, or a host has no rank.
        RuntimeError: this process belongs to a job already.
    """
    mesh.coordinates(rank)
    if mesh.ranks != tuple(range(mesh.size)):
        raise ValueError(
            f"one_rank takes a mesh with the ranks 0 … {mesh.size - 1}, as a job has them; leave ranks= out"
        )
    per_host: Any = mesh.size if ranks_per_host is None else ranks_per_host
    if isinstance(per_host, bool) or not isinstance(per_host, int) or per_host < 1:
        raise ValueError(f"ranks_per_host={shown(ranks_per_host)} is no number of ranks above 0")
    if distributed.is_initialized():
        raise RuntimeError(
            "this process belongs to a job already; one_rank is for a process of its own, before init_process_group"
        )
    join_fake_job(rank, mesh.size)
    _now.append(OneRank(mesh, rank, per_host))
    try:
        yield _now[0]
    finally:
        _now.clear()
        distributed.destroy_process_group()
