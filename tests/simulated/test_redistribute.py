"""``autopar.redistribute`` gives the pieces of the same value, on simulated ranks and on processes; errors name the
remedy."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import redistributions
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ranks
from redistributions import addends_of, chunked
from strategies import attrs, meshes, shapes
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import autopar
from autopar import DistAttr, Mesh, PlanError, TransitionError
from autopar.errors import SimulationError
from autopar.ir.dtensor import placements_of

MESH = Mesh(dp=2, tp=2)


def forms(attr: DistAttr, mesh: Mesh, shape: tuple[int, ...]) -> list[Any]:
    """All ways in which a layout can be given."""
    found: list[Any] = [attr]
    if not attr.pending:
        found.append(tuple(axes or None for ((_, axes),) in attr.dims))
    with contextlib.suppress(ValueError):  # axes in another order than the mesh
        found.append(placements_of(attr, mesh, shape))
    return found


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_pieces_are_those_of_the_same_value(data: st.DataObject) -> None:
    """From and to splits and partial sums, even or not; the oracle cuts the full tensor with ``torch.chunk``."""
    mesh, shape = data.draw(meshes(max_ranks=8)), data.draw(shapes())
    source, target = (data.draw(attrs(mesh, shape, max_parts=1)) for _ in range(2))
    whole, pieces = addends_of(source, mesh, torch.randn(mesh.size, *shape, dtype=torch.float64).unbind())
    given_, wanted = (data.draw(st.sampled_from(forms(attr, mesh, shape))) for attr in (source, target))
    even = all(piece.shape == pieces[0].shape for piece in pieces)
    size = None if even and data.draw(st.booleans()) else shape
    made = autopar.redistribute(pieces, mesh, given_, wanted, shape=size)
    by_rank = autopar.redistribute(dict(zip(mesh.ranks, pieces, strict=True)), mesh, given_, wanted, shape=size)
    assert isinstance(made, list) and all(map(torch.equal, by_rank.values(), made))
    assert list(by_rank) == list(mesh.ranks)
    sums = {}  # of the pieces that differ only along the pending axes
    for rank, piece in zip(mesh.ranks, made, strict=True):
        at = {axis: k for axis, k in mesh.coordinates(rank).items() if axis not in dict(target.pending)}
        sums[tuple(at.items())] = sums.get(tuple(at.items()), 0) + piece
        assert piece.shape == chunked(whole, target, mesh, rank).shape and piece.is_contiguous()
    for rank in mesh.ranks:
        at = {axis: k for axis, k in mesh.coordinates(rank).items() if axis not in dict(target.pending)}
        assert torch.allclose(sums[tuple(at.items())], chunked(whole, target, mesh, rank), rtol=1e-12, atol=1e-12)


def test_what_is_given_comes_back_in_its_type() -> None:
    rows = [torch.full((1, 2), float(k)) for k in range(2)]
    mesh = Mesh({"tp": 2}, ranks=[3, 5])
    assert isinstance(autopar.redistribute(tuple(rows), mesh, ("tp",), (None, "tp")), tuple)
    assert list(autopar.redistribute({5: rows[1], 3: rows[0]}, mesh, ("tp",), (None, "tp"))) == [5, 3]
    (alone,) = autopar.redistribute([rows[0]], Mesh(tp=1), ("tp",), (None, "tp"))
    assert torch.equal(alone, rows[0])
    assert torch.equal(autopar.redistribute(rows[0], Mesh(tp=1), ("tp",), (None, "tp")), rows[0])


def test_a_merged_dim_has_its_size_in_the_layout() -> None:
    whole = torch.arange(30.0).reshape(15, 2)
    pieces = [whole[:9], whole[9:]]
    for merged in (("(5/dp 3)", None), DistAttr((((5, ("dp",)), (3, ())), ((None, ()),)))):
        made = autopar.redistribute(pieces, Mesh(dp=2), merged, ("dp", None))
        assert torch.equal(made[0], whole[:8]) and torch.equal(made[1], whole[8:])


def test_gradients_flow_through() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    made = autopar.redistribute([x, y], Mesh(dp=2), (Partial(),), (Shard(0),))
    weights = torch.randn(4, 3, dtype=torch.float64)
    (torch.cat(made) * weights).sum().backward()
    assert torch.equal(x.grad, weights) and torch.equal(y.grad, weights)


W = torch.arange(20.0).reshape(5, 4)
UNEVEN = [W[:3], W[:3], W[3:], W[3:]]
REFUSED = {
    "uneven": (
        (UNEVEN, MESH, ("dp", None), (None, "dp")),
        {},
        ValueError,
        "the piece of rank 2 is [3, 4], torch.float32 of f32[6/dp 4], but got [2, 4], torch.float32; the global shape "
        "is taken from the piece, as if all pieces were equal; give shape= where they are uneven",
    ),
    "another shape": (
        (UNEVEN, MESH, ("dp", None), (None, "dp")),
        {"shape": (6, 4)},
        ValueError,
        "give the piece that source says, or another shape=",
    ),
    "another number of dims": (
        (UNEVEN, MESH, ("dp", None), (None, "dp")),
        {"shape": (5,)},
        ValueError,
        "shape=(5,) has 1 dim, but the piece is [3, 4]; give the global shape",
    ),
    "no shape": (
        (UNEVEN, MESH, ("dp", None), (None, "dp")),
        {"shape": 5},
        TypeError,
        "shape=5 is not the global shape, a tuple of sizes, as in shape=(5, 4)",
    ),
    "another dtype": (
        ([W, W.double(), W, W], MESH, (None, None), ("dp", None)),
        {},
        ValueError,
        "give all pieces in one dtype",
    ),
    "an unknown axis": (
        (UNEVEN, MESH, ("dp", None), ("pt", None)),
        {"shape": (5, 4)},
        PlanError,
        "target=('pt', None): the mesh (dp=2 tp=2) has no axis 'pt'; its axes are dp, tp; did you mean 'tp'?",
    ),
    "an unknown axis of a DistAttr": (
        ([W] * 4, MESH, DistAttr.split("pt", None), (None, None)),
        {},
        PlanError,
        "source: the mesh (dp=2 tp=2) has no axis 'pt'",
    ),
    "an axis twice": (
        ([W] * 4, MESH, DistAttr.split("dp", "dp"), (None, None)),
        {},
        PlanError,
        "source uses the axis 'dp' twice",
    ),
    "too few dims": (
        ([W] * 4, MESH, DistAttr.split("dp"), (None, None)),
        {},
        PlanError,
        "source is a DistAttr of 1 dim, but the piece has 2; give one entry for each dim",
    ),
    "too many dims": (
        ([W] * 4, MESH, ("dp", None, "tp"), (None, None)),
        {},
        PlanError,
        "splits dim 2, but the value has the shape [10, 4] and only 2 dims",
    ),
    "a placement of no dim": (
        ([W] * 4, MESH, (Shard(2), Replicate()), (None, None)),
        {},
        PlanError,
        "use Replicate() or an existing dim",
    ),
    "too few placements": (
        ([W] * 4, MESH, (Shard(0),), (None, None)),
        {},
        PlanError,
        "1 placements for the axes dp, tp; give one for each axis of the mesh",
    ),
    "no tuple": (
        ([W] * 4, MESH, "dp", (None, None)),
        {},
        PlanError,
        "source='dp' is not a tuple with an axis or None for each dim",
    ),
    "another kind": (
        ([W] * 4, MESH, (Partial("max"), Replicate()), (Partial("sum"), Replicate())),
        {},
        TransitionError,
        "reduce the value over dp first",
    ),
    "too few ranks": (
        (UNEVEN[:3], MESH, ("dp", None), (None, None)),
        {},
        ValueError,
        "redistribute got 3 pieces, but the mesh (dp=2 tp=2) has 4 ranks; give a piece for each, in the order of "
        "mesh.ranks",
    ),
    "other ranks": (
        (dict(enumerate(UNEVEN[:3])), MESH, ("dp", None), (None, None)),
        {},
        ValueError,
        "redistribute got pieces of the ranks [0, 1, 2], but the mesh (dp=2 tp=2) has the ranks [0, 1, 2, 3]",
    ),
    "one piece": (
        (W, MESH, ("dp", None), (None, None)),
        {},
        ValueError,
        "this process is alone and the mesh (dp=2 tp=2) has 4 ranks; give the pieces of all ranks, as a list or a "
        "dict by rank, or start a process for each, as with torchrun --nproc-per-node 4",
    ),
    "no piece": (
        (3, MESH, ("dp", None), (None, None)),
        {},
        TypeError,
        "takes this rank's piece, a tensor, or the pieces of all ranks, a list or a dict by rank, not an int",
    ),
    "no tensor": (
        ([W, W, W, 3], MESH, (None, None), (None, None)),
        {},
        TypeError,
        "the piece of rank 3 is an int; redistribute takes plain tensors",
    ),
    "no mesh": (
        ([W], 4, (None, None), (None, None)),
        {},
        TypeError,
        "redistribute takes an autopar.Mesh, as in Mesh(dp=2, tp=2), not int",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    args, kwargs, kind, said = REFUSED[name]
    with pytest.raises(kind, match=re.escape(said)):
        autopar.redistribute(*args, **kwargs)


def even(attr: DistAttr, shape: tuple[int, ...]) -> Any:
    return addends_of(attr, MESH, torch.randn(4, *shape, dtype=torch.float64).unbind())


PROCESS_CASES: list[tuple[DistAttr, Any, Any, tuple[int, ...], bool]] = [  # before; as given; after; shape, given
    (DistAttr.split("dp", "tp"), ("dp", "tp"), ("tp", "dp"), (8, 4), False),
    (DistAttr.split("dp", None), ("dp", None), (None, "tp"), (5, 3), True),
    (DistAttr.split(None, None, pending=("tp",)), (Replicate(), Partial()), (Shard(1), Shard(0)), (5, 3), False),
    (DistAttr.split("dp", None, pending=("tp",)), (Shard(0), Partial()), (Replicate(), Replicate()), (7, 2), True),
    (DistAttr.split(None, None), (None,), DistAttr.split("tp", None, pending=("dp",)), (6, 2), False),
]


@pytest.mark.processes
def test_on_processes_as_simulated() -> None:
    cases, wanted = [], []
    for attr, source, target, shape, given_ in PROCESS_CASES:
        _, pieces = even(attr, shape)
        size = shape if given_ else None
        own = [piece.clone().requires_grad_() for piece in pieces]
        made = autopar.redistribute(own, MESH, source, target, shape=size)
        gradients = torch.autograd.grad(made, own, [torch.full_like(piece, 3) for piece in made])
        cases.append((pieces, source, target, size))
        wanted.append((made, gradients))
    cases += cases[:1]  # again, with functions that are compiled already
    wanted += wanted[:1]
    found = ranks(4).run(redistributions.called, MESH, cases)
    for rank, results in enumerate(found):
        for case, (made, gradients), (ours, back) in zip(cases, wanted, results, strict=True):
            assert torch.equal(ours, made[rank]) and torch.equal(back, gradients[rank]), (case[1:], rank)


@pytest.mark.processes
def test_processes_that_differ_all_get_an_error() -> None:
    """Of uneven pieces without a shape, of a piece that is wrong on one rank, and of another target; then they go
    on."""
    fit = [W[:3], W[:3], W[3:], W[3:]]
    cases = [
        (fit, ("dp", None), (None, "dp"), None),
        ([*fit[:3], W[:1]], ("dp", None), (None, "dp"), (5, 4)),
        ([W, W, W, W], ("dp", None), (None, "dp"), (5, 4)),
        (fit, ("dp", None), (None, "dp"), (5, 4)),
    ]
    for rank, (uneven, wrong, all_wrong, good) in enumerate(ranks(4).run(redistributions.called, MESH, cases)):
        assert uneven[0] == "RuntimeError" and "ranks 0 1: redistribute f32[6/dp 4] to f32[6 4/dp]" in uneven[1]
        assert "ranks 2 3: redistribute f32[4/dp 4]" in uneven[1] and "give shape= where they are uneven" in uneven[1]
        assert (
            wrong[0] == "RuntimeError"
            and "rank 3: redistribute f32[5/dp 4] to f32[5 4/dp], but the piece of rank 3 is [2, 4]" in wrong[1]
        )
        assert all_wrong[0] in ("ValueError", "RuntimeError") and f"the piece of rank {rank} is" in all_wrong[1]
        assert torch.equal(good[0], W[:, :2] if rank < 2 else W[:, 2:])
    said = ranks(4).run(redistributions.pieces_of_all, fit, MESH)
    assert all("each rank gives its own piece, a tensor" in text for text in said)


def test_a_dtensor_redistributes_itself() -> None:
    class Wrapped(torch.Tensor):
        placements = (Replicate(),)

    assert hasattr(DTensor, "placements")
    with pytest.raises(TypeError, match=re.escape("a DTensor, which redistributes itself: piece.redistribute(")):
        autopar.redistribute(torch.ones(2).as_subclass(Wrapped), Mesh(tp=1), (None,), (None,))


def test_replicas_that_differ_are_refused() -> None:
    """Alone, all pieces are there to be compared; the addends of a partial sum differ."""
    x = torch.arange(8.0)
    with pytest.raises(SimulationError, match="the value"):
        autopar.redistribute([x, x + 1], Mesh(dp=2), (None,), ("dp",))
    first, last = autopar.redistribute([x, x], Mesh(dp=2), (None,), ("dp",))
    assert torch.equal(torch.cat([first, last]), x)
    made = autopar.redistribute([x, x + 1], Mesh(dp=2), (Partial(),), (Replicate(),))
    assert torch.equal(made[0], 2 * x + 1)
