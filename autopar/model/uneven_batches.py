"""Join the pieces of a batch that ranks bring with ``inputs="local"``, if their sizes differ.

Before a call the ranks compare the shapes of their pieces. If they are equal, nothing else happens. Else all ranks
gather the pieces and join them in the order of the mesh, and the call takes the whole batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from autopar.capture.arguments import Arguments
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.model.inputs import axes_of
from autopar.runtime.dtensors import is_dtensor
from autopar.runtime.processes.agreement import Agreement, other_values

Split = list[tuple[int, tuple[str, ...]]]  # (dim, the axes that shard it), of each sharded dim
Layouts = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, DistAttr]]


class _Facts(NamedTuple):
    """The facts of its piece that a rank sends to the others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}" + " with gradients" * self.requires_grad

    @property
    def alike(self) -> tuple[torch.dtype, int, bool]:
        """The facts that must be equal on all ranks: dtype, number of dims, whether it requires a gradient."""
        return self.dtype, len(self.shape), self.requires_grad


def with_like_pieces(arguments: Arguments, mesh: Mesh, agreement: Agreement, layouts: Layouts) -> Arguments:
    """Return the arguments of a call; those of the whole batch if the ranks' pieces differ in size.

    All ranks call it. The gradient of the whole batch goes back to each rank's own piece.

    Args:
        layouts: returns the plan's layouts of inputs of such shapes.

    Raises:
        RuntimeError: the ranks make different calls; their pieces do not fit together; ranks that have the same piece
            bring different values.
    """
    plain = {
        name: tensor for name, tensor in zip(arguments.names, arguments.tensors, strict=True) if not is_dtensor(tensor)
    }
    if not plain:
        return arguments
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    if not agreement.differ(f"a call with pieces of {', '.join(plain)}", repr(shapes)):
        return arguments
    facts: list[dict[str, _Facts]] = agreement.gathered(
        {name: _Facts(tensor.dtype, shapes[name], tensor.requires_grad) for name, tensor in plain.items()}
    )
    splits = _splits(facts, layouts)
    for name, split in splits.items():
        _refuse_misfits(name, [of_rank[name] for of_rank in facts], split, mesh)
    # a view would be sent with its whole storage
    pieces = agreement.gathered({name: plain[name].detach().cpu().clone() for name, split in splits.items() if split})
    whole = {}
    for name, split in splits.items():
        if split:
            whole[name] = _joined(
                name,
                [of_rank[name].to(plain[name].device) for of_rank in pieces],
                split,
                mesh,
                agreement.rank,
                plain[name],
            )
    names = iter(arguments.names)
    flat = [whole.get(next(names), value) if isinstance(value, torch.Tensor) else value for value in arguments.flat]
    return replace(arguments.with_leaves(flat), whole=True)


def _splits(facts: Sequence[Mapping[str, _Facts]], layouts: Layouts) -> dict[str, Split]:
    """Return for each input the dims that the plan shards on all ranks.

    On one rank alone a dim may by chance be as long as the batch; it does not count.
    """
    of_ranks = {
        tuple(of_rank.items()): layouts({name: fact.shape for name, fact in of_rank.items()}) for of_rank in facts
    }
    return {
        name: [
            (d, axes)
            for d in range(len(fact.shape))
            for axes in [_axes(next(iter(of_ranks.values())), name, d)]
            if axes and all(_axes(attrs, name, d) == axes for attrs in of_ranks.values())
        ]
        for name, fact in facts[0].items()
    }


def _axes(attrs: Mapping[str, DistAttr], name: str, dim: int) -> tuple[str, ...]:
    """Return the axes that shard a dim."""
    if name not in attrs or dim >= len(attrs[name].dims):
        return ()
    return axes_of(attrs[name], name, dim)


def _refuse_misfits(name: str, facts: Sequence[_Facts], split: Split, mesh: Mesh) -> None:
    """Raise ``RuntimeError`` unless the pieces have one dtype and number of dims, and fit together.

    They fit if their lengths are equal, except along the axes that shard a dim.
    """
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    over = dict(split)
    for rank, fact in enumerate(facts):
        at = mesh.coordinates(rank)
        if fact.alike != facts[0].alike:
            raise RuntimeError(_misfit(name, 0, rank, facts, over))
        for d, length in enumerate(fact.shape):
            other = first.setdefault((d, tuple(at[axis] for axis in over.get(d, ()))), rank)
            if facts[other].shape[d] != length:
                raise RuntimeError(_misfit(name, other, rank, facts, over))


def _misfit(name: str, a: int, b: int, facts: Sequence[_Facts], over: Mapping[int, tuple[str, ...]]) -> str:
    free = ", and ".join(f"dim {d}, along {' and '.join(axes)}" for d, axes in over.items())
    remedy = (
        f"they may differ in the length of {free}"
        if free
        else "it must be the same on all ranks, because the plan does not split it"
    )
    return f"the pieces of {name} do not fit together: {facts[a]} on rank {a}, {facts[b]} on rank {b}\n  {remedy}"


def _joined(
    name: str, pieces: Sequence[torch.Tensor], split: Split, mesh: Mesh, rank: int, own: torch.Tensor
) -> torch.Tensor:
    """Return the full tensor of the pieces of all ranks. ``own`` is this rank's piece, and receives its gradient."""
    axes = tuple(axis for _, dim_axes in split for axis in dim_axes)
    places = [tuple(mesh.coordinates(other)[axis] for axis in axes) for other in range(len(pieces))]
    first: dict[tuple[int, ...], int] = {}
    for other, (place, piece) in enumerate(zip(places, pieces, strict=True)):
        if not _same(piece, pieces[first.setdefault(place, other)]):
            raise RuntimeError(other_values([name], axes, first[place], other, mesh))
    return _concatenated({place: pieces[k] for place, k in first.items()} | {places[rank]: own}, (), split, mesh)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, equal_nan=True) if a.is_floating_point() or a.is_complex() else torch.equal(a, b)


def _concatenated(
    pieces: Mapping[tuple[int, ...], torch.Tensor], at: tuple[int, ...], split: Split, mesh: Mesh
) -> torch.Tensor:
    """Concatenate the pieces whose coordinates begin with ``at``."""
    if not split:
        return pieces[at]
    (dim, axes), *other_dims = split
    return torch.cat(
        [
            _concatenated(pieces, (*at, *index), other_dims, mesh)
            for index in itertools.product(*(range(mesh.sizes[axis]) for axis in axes))
        ],
        dim,
    )
