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
from autopar.data.stream import StreamLoader
from autopar.errors import class_of, shown
from autopar.ir.dtensor import is_device_mesh, mesh_of
from autopar.ir.mesh import Mesh, integer
from autopar.model.inputs import INPUTS, Inputs
from autopar.model.proxy import passed_by
from autopar.parallel import Parallel

DECIDED = {  # options of DataLoader that this module decides: what to use in their place
    "sampler": "shuffle= and seed=, or give the dataset in another order (torch.utils.data.Subset)",
    "batch_sampler": "batch_size=, the rows of a global batch",
    "generator": "seed=",
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
            whole (it needs torchdata, the extra ``data``).
        mesh: the mesh (an ``autopar.Mesh`` or a ``DeviceMesh``); or what ``parallelize`` returned: then the loader
            gives what it takes, and its ranks compare their data and positions at the beginning of each loop.
        batch_size: the rows of a *global* batch, over all ranks.
        shuffle, num_workers, collate_fn, drop_last: as those of ``DataLoader``.
        seed: of the order (epoch ``e`` takes ``seed + e``, as ``DistributedSampler`` does), and of ``seed_rows``.
        inputs: ``"local"``: the rows of this rank, for ``parallelize(…, inputs="local")``; ``"global"``: the whole
            batch on each rank, in the same order. By default that of the model, or ``"local"`` for a mesh.
        axes: the axes over which the plan splits the batch, major first; by default the axis of data and ``ep``, as in
            a plan that names no inputs.
        rank: this process's rank; by default that of the job. A process that is alone takes whole batches, as
            ``simulate`` does.
        seed_rows: whether Python's, NumPy's and torch's generators are seeded before each row, so that what a dataset
            draws in ``__getitem__`` depends on seed, epoch and row alone. With ``False``, ``__getitems__`` of the
            dataset fetches whole batches.
        options: other options of ``DataLoader``, such as ``pin_memory``.

    Raises:
        ValueError: sizes below one, axes or a rank that the mesh does not have, or a mesh with several axes of data and
            no ``axes``.
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
    passed, compare = ("local", None) if parallel is None else passed_by(parallel)
    inputs = inputs or passed
    if rank is None:
        rank = _rank()
    else:
        compare = None  # the caller asks for the rows of any rank
    place = WHOLE
    if inputs == "local" and rank is not None and whole.size > 1:
        place = place_of(whole, rank, axes)
    collate = collate_fn or default_collate
    loading: dict[str, Any] = {"num_workers": num_workers, "generator": torch.Generator().manual_seed(seed), **options}
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError("shuffle=True needs rows with numbers; an IterableDataset shuffles its own rows")
        loading |= {"batch_size": batch_size, "drop_last": drop_last}
        return StreamLoader(dataset, Collate(collate, place), loading, compare)
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
        if name in options:
            raise TypeError(f"sharded decides {name} of DataLoader; use {instead}")
    return size, number


def _rank() -> int | None:
    """Return the rank of this process in its job; ``None`` if it is alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() and "WORLD_SIZE" in os.environ else None
