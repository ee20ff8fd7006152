"""Make process groups, and exchange data on them."""

from __future__ import annotations

from typing import Any, cast

import torch

FUNCTIONAL = torch.ops._c10d_functional  # tried on 2.11 to 2.15: collectives that return a tensor to wait for


def store_of_processes() -> torch.distributed.Store:
    """Return the store of the default process group, however it was initialised. Tried on 2.11 to 2.15."""
    return torch.distributed.distributed_c10d._get_default_store()


def start_gather(piece: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Start ``[n …] → [ranks · n …]``; wait for the result as for those of ``FUNCTIONAL``.

    On gloo this does not use ``all_gather_into_tensor``: that is a coalesced gather. Where several
    small ones ran at once (some 30 of 16 to 128 bytes) it was seen to crash ("malloc(): unaligned tcache chunk
    detected") or to hang, seldom, and the cause is not known (profiling/results/heap.txt). The gather of
    ``torch.distributed`` did not. Tried on 2.11 to 2.15.
    """
    if piece.device.type != "cpu":
        return FUNCTIONAL.all_gather_into_tensor(piece, ranks, group)
    from torch import distributed

    gather = (
        getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    )  # the name is new in 2.13
    gathered = piece.new_empty((ranks * piece.shape[0], *piece.shape[1:]))
    register_work(gathered, gather(gathered, piece, group=group_named(group), async_op=True))
    return gathered


def group_named(group: str) -> torch.distributed.ProcessGroup:
    """Return the process group of a name. ``RuntimeError`` if there is none. Tried on 2.11 to 2.15."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast(Any, group))


def register_work(tensor: torch.Tensor, work: Any) -> None:
    """Let ``FUNCTIONAL.wait_tensor`` wait for the work that writes a tensor. Tried on 2.11 to 2.15."""
    from torch._C._distributed_c10d import _register_work  # tried on 2.11 to 2.15

    _register_work(tensor, work)


def gloo_group(options: Any) -> Any:
    """Make a gloo process group that torch does not list, from the options that a backend is made from.
    Tried on 2.11 to 2.15.

    All its members make it, and wait for each other.
    """
    from torch.distributed import distributed_c10d

    group = distributed_c10d.ProcessGroup(options.store, options.group_rank, options.group_size)
    gloo = distributed_c10d.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )
    kind = distributed_c10d.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_group_name(options.group_id)
    gloo._set_sequence_number_for_group()
    return group


def all_reduce_options(op: str) -> Any:
    """Return the options of an all-reduce by the name of its reduction, as in ``FUNCTIONAL``. Tried on 2.11 to 2.15."""
    from torch import distributed

    options = distributed.AllreduceOptions()
    options.reduceOp = getattr(distributed.ReduceOp, op.upper())
    return options


def reduction_options(kind: str, scatter: Any, root: int = 0) -> Any:
    """Return the options of the ``all_reduce`` or ``reduce`` that a reduce-scatter consists of. Tried on 2.11 to 2.15.

    ``scatter``: the options of the reduce-scatter; ``None`` for torch's own.
    """
    from torch import distributed

    options: Any = distributed.AllreduceOptions() if kind == "all_reduce" else distributed.ReduceOptions()
    scatter = distributed.ReduceScatterOptions() if scatter is None else scatter
    options.reduceOp, options.timeout = scatter.reduceOp, scatter.timeout
    if kind == "reduce":
        options.rootRank = root
    return options


def source_rank_of(work: Any) -> int:
    """Return the rank, in its group, from which a receive has got its message. Tried on 2.11 to 2.15."""
    return work._source_rank()


def join_fake_job(rank: int, size: int) -> None:
    """Initialize the default process group as one rank of a job that has no other processes. Tried on 2.11 to 2.15.

    Its collectives return at once, and exchange nothing.
    """
    from torch import distributed

    # tried on 2.11 to 2.15: it registers the backend, too
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
