"""Makes a whole batch of pieces of unlike sizes, which ranks bring with ``inputs="local"``: the last batch of a sampler has 3 rows here, 2 there.

Before a call the ranks compare the shapes of their pieces. Where they are alike, nothing else happens. Else the pieces go to all ranks, are
joined in the order of the mesh, and the call is one of the whole batch.
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
from autopar.model.dtensor_parameters import is_dtensor
from autopar.runtime.processes.agreement import Agreement, other_values

Split = list[tuple[int, tuple[str, ...]]]  # the dims that axes split, with these
Layouts = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, DistAttr]]


class _Facts(NamedTuple):
    """What a rank tells of its piece."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}" + " with gradients" * self.requires_grad

    @property
    def alike(self) -> tuple[torch.dtype, int, bool]:
        """What is the same on all ranks."""
        return self.dtype, len(self.shape), self.requires_grad


def with_like_pieces(arguments: Arguments, mesh: Mesh, agreement: Agreement, layouts: Layouts) -> Arguments:
    """The arguments of a call, where the pieces of all ranks have one size; else those of the whole batch. All ranks call it.

    A gradient of the whole goes back to each rank's own piece.

    Args:
        layouts: what the plan says of inputs of such shapes.

    Raises:
        RuntimeError: the ranks make different calls; their pieces do not fit together; ranks that have the same piece bring different values.
    """
    plain = {name: tensor for name, tensor in zip(arguments.names, arguments.tensors, strict=True) if not is_dtensor(tensor)}
    if not plain:
        return arguments
    shapes = {name: tuple(tensor.shape) for name, tensor in plain.items()}
    if not agreement.differ(f"a call with pieces of {', '.join(plain)}", repr(shapes)):
        return arguments
    facts: list[dict[str, _Facts]] = agreement.gathered({name: _Facts(tensor.dtype, shapes[name], tensor.requires_grad) for name, tensor in plain.items()})
    splits = _splits(facts, layouts)
    for name, split in splits.items():
        _refuse_misfits(name, [of_rank[name] for of_rank in facts], split, mesh)
    pieces = agreement.gathered({name: plain[name].detach().cpu().clone() for name, split in splits.items() if split})  # a view brings its storage
    whole = {}
    for name, split in splits.items():
        if split:
            whole[name] = _joined(name, [of_rank[name].to(plain[name].device) for of_rank in pieces], split, mesh, agreement.rank, plain[name])
    names = iter(arguments.names)
    flat = [whole.get(next(names), value) if isinstance(value, torch.Tensor) else value for value in arguments.flat]
    return replace(arguments.with_leaves(flat), whole=True)


def _splits(facts: Sequence[Mapping[str, _Facts]], layouts: Layouts) -> dict[str, Split]:
    """Of each input the dims that are split on all ranks: where the batch of one rank is by chance as long as another tensor, that is not."""
    of_ranks = {tuple(of_rank.items()): layouts({name: fact.shape for name, fact in of_rank.items()}) for of_rank in facts}
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
    """Those that split a dim."""
    if name not in attrs or dim >= len(attrs[name].dims):
        return ()
    parts = attrs[name].dims[dim]
    if len(parts) > 1:
        raise ValueError(f'the plan splits the parts of a merged dim of {name}, which ranks cannot bring as pieces; use inputs="global"')
    return parts[0][1]


def _refuse_misfits(name: str, facts: Sequence[_Facts], split: Split, mesh: Mesh) -> None:
    """Pieces have one dtype and number of dims, and one length of each dim but along the axes that split a dim."""
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
    remedy = f"they may differ in the length of {free}" if free else "it is the same on all ranks, for the plan does not split it"
    return f"the pieces of {name} do not fit together: {facts[a]} on rank {a}, {facts[b]} on rank {b}\n  {remedy}"


def _joined(name: str, pieces: Sequence[torch.Tensor], split: Split, mesh: Mesh, rank: int, own: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor, of the pieces of all ranks; this rank's is the tensor itself, which then receives its gradient."""
    axes = tuple(axis for _, some in split for axis in some)
    places = [tuple(mesh.coordinates(one)[axis] for axis in axes) for one in range(len(pieces))]
    first: dict[tuple[int, ...], int] = {}
    for other, (place, piece) in enumerate(zip(places, pieces, strict=True)):
        if not _same(piece, pieces[first.setdefault(place, other)]):
            raise RuntimeError(other_values([name], axes, first[place], other, mesh))
    return _behind({place: pieces[k] for place, k in first.items()} | {places[rank]: own}, (), split, mesh)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, equal_nan=True) if a.is_floating_point() or a.is_complex() else torch.equal(a, b)


def _behind(pieces: Mapping[tuple[int, ...], torch.Tensor], at: tuple[int, ...], split: Split, mesh: Mesh) -> torch.Tensor:
    """The pieces at coordinates that begin like this, joined."""
    if not split:
        return pieces[at]
    (dim, axes), *rest = split
    return torch.cat([_behind(pieces, (*at, *index), rest, mesh) for index in itertools.product(*(range(mesh.sizes[axis]) for axis in axes))], dim)
