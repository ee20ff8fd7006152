"""Make the loader of a rank from a dataset and a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from autopar.data.loader import RowLoader, ShardedLoader
from autopar.data.order import Order
from autopar.data.place import WHOLE, place_of
from autopar.data.rows import Collate, Rows
from autopar.data.seeding import SEEDS
from autopar.data.stream import StreamLoader
from autopar.errors import class_of, shown
from autopar.ir.dtensor import is_device_mesh, mesh_of
from autopar.ir.mesh import Mesh, integer
from autopar.model.inputs import INPUTS, Inputs
from autopar.model.proxy import Passed, passed_by
from autopar.parallel import Parallel

DECIDED = {  # options of DataLoader that this module decides: what to use in their place
    "sampler": "shuffle= and seed=, or give the dataset in another order (torch.utils.data.Subset)",
    "batch_sampler": "batch_size=, the rows of a global batch",
    "generator": "seed=",
    "in_order": "num_workers= alone: batches come in the order of the rows, for all ranks take pieces of one batch",
}


def sharded(
    dataset: Dataset[Any] | Sequence[Any],
    mesh: Mesh | Parallel | Any,
    batch_size: int = 1,
    shuffle: bool = False,
    *,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    inputs: Inputs | None = None,
    axes: str | Sequence[str] | None = None,
    rank: int | None = None,
    seed_rows: bool = True,
    **options: Any,
) -> ShardedLoader:
    """Return a loader with the rows of each global batch that belong to this rank.

    The order of rows depends on ``seed`` and the epoch alone: not on the mesh, the number of ranks or workers. No row
    is repeated or left out; if a last batch has fewer rows, ranks have pieces of unequal sizes, or none.
    ``state_dict`` is the position: a loader on any other mesh goes on with the next row.

    Args:
        dataset: a dataset with ``__getitem__`` and ``__len__``; or an ``IterableDataset``, which each rank reads as a
            whole, in one order (it needs torchdata, the extra ``data``).
        mesh: the mesh (an ``autopar.Mesh`` or a ``DeviceMesh``); or what ``parallelize`` returned: then the loader
            gives what it takes, and its ranks compare their data and positions at the beginning of each loop.
        batch_size: the rows of a *global* batch, over all ranks.
        shuffle, num_workers, collate_fn, drop_last: as those of ``DataLoader``.
        seed: of the order (epoch ``e`` takes ``seed + e``, as ``DistributedSampler`` does), and of ``seed_rows``.
        inputs: ``"local"``: the rows of this rank, for ``parallelize(…, inputs="local")``; ``"global"``: the whole
            batch on each rank, in the same order. By default that of the model, or ``"local"`` for a mesh.
        axes: the axes over which the plan splits the batch, major first; by default those of the plan of ``parallel``;
            without one, or where it names inputs, the data axis and ``ep``.
        rank: this process's rank; by default that of the job. A process that is alone takes whole batches, as
            ``simulate`` does.
        seed_rows: whether Python's, NumPy's and torch's generators are seeded before each row, so that what a dataset
            draws in ``__getitem__``, or a stream in ``__iter__``, depends on seed, epoch and row alone (of a stream
            also on the worker). With ``False``, ``__getitems__`` of the dataset fetches whole batches.
        options: other options of ``DataLoader``, such as ``pin_memory``.

    Raises:
        ValueError: sizes below one, axes or a rank that the mesh does not have, axes that are not those of the plan, or
            a mesh with several data axes and no ``axes``.
        TypeError: a dataset without length, or an option of ``DataLoader`` that is decided here.
        ImportError: an ``IterableDataset`` without torchdata.
    """
    parallel, mesh = (mesh, mesh.mesh) if isinstance(mesh, Parallel) else (None, mesh)
    whole = mesh_of(mesh) if is_device_mesh(mesh) else mesh
    if not isinstance(whole, Mesh):
        raise TypeError(
            f"sharded takes an autopar.Mesh, a DeviceMesh or what parallelize returned, not {class_of(mesh)}"
        )
    batch_size, seed = _checked(batch_size, seed, inputs, options)
    passed = Passed("local", None, None) if parallel is None else passed_by(parallel)
    inputs, compare = inputs or passed.inputs, passed.compare
    if rank is None:
        rank = _rank()
    elif integer(rank) is None:
        raise ValueError(f"rank={shown(rank)} is not an integer; it is a rank of the mesh")
    else:
        compare = None  # the caller asks for the rows of any rank
    place = WHOLE
    if inputs == "local" and rank is not None and whole.size > 1:
        place = place_of(whole, rank, axes if passed.axes is None else _of_plan(axes, passed.axes, whole))
    collate = collate_fn or default_collate
    loading: dict[str, Any] = {"num_workers": num_workers, "generator": torch.Generator().manual_seed(seed), **options}
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError("shuffle=True needs rows with numbers; an IterableDataset shuffles its own rows")
        loading |= {"batch_size": batch_size, "drop_last": drop_last}
        return StreamLoader(dataset, seed if seed_rows else None, Collate(collate, place), loading, compare)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        inner = "; pass its .dataset" if isinstance(dataset, DataLoader) else ""
        raise TypeError(
            f"the dataset is {class_of(dataset)}; it needs __len__ and __getitem__, or be an IterableDataset{inner}"
        )
    sized: Any = dataset
    order = Order(len(sized), batch_size, shuffle, seed, drop_last, place)
    rows = Rows(dataset, seed if seed_rows else None)
    loader: DataLoader[Any] = DataLoader(rows, batch_sampler=order, collate_fn=Collate(collate), **loading)
    return RowLoader(order, loader, compare)


def _checked(batch_size: Any, seed: Any, inputs: str | None, options: dict[str, Any]) -> tuple[int, int]:
    """Return the size and the seed as integers of Python."""
    size, number = integer(batch_size), integer(seed)
    if size is None or size < 1:
        raise ValueError(f"batch_size={shown(batch_size)} is not an integer ≥ 1; it counts the rows of a global batch")
    if number is None:
        raise ValueError(f"seed={shown(seed)} is not an integer; all ranks give the same one")
    if inputs is not None and inputs not in INPUTS:
        raise ValueError(f"inputs={shown(inputs)} is unknown; there are {' and '.join(map(repr, INPUTS))}")
    for name, instead in DECIDED.items():
        if name in options and not (name == "in_order" and options[name] is True):
            raise TypeError(f"sharded decides {name} of DataLoader; use {instead}")
    return size, number % SEEDS


def _of_plan(given: str | Sequence[str] | None, planned: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which the plan splits the batch. ``ValueError`` if others are given."""
    named = planned if given is None else (given,) if isinstance(given, str) else tuple(given)
    axes = tuple(axis for axis in map(mesh.check_axis, named) if mesh.sizes[axis] > 1)
    if axes != planned:
        raise ValueError(
            f"axes={axes}, and the plan splits the batch over {planned}: rows would count several times, or not at "
            f"all; leave axes= out, which takes those of the plan"
        )
    return axes


def _rank() -> int | None:
    """Return the rank of this process in its job; ``None`` if it is alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() and "WORLD_SIZE" in os.environ else None
