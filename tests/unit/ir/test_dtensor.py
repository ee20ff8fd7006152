"""DTensor's placements: round trips, refusals, and pieces that are DTensor's own, on four gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import strategies
import torch
from equality import check_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Block
from processes import ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

import autopar
from autopar import Mesh, PlanError
from autopar.ir.dtensor import attr_of, device_mesh_of, edge_of, mesh_of, placements_of
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.record import TensorType
from autopar.runtime.simulation.pieces import cut

MESH = Mesh(dp=2, tp=2)


def placements(mesh: Mesh, ndim: int) -> st.SearchStrategy[tuple[Placement, ...]]:
    one = st.sampled_from([Replicate(), Partial(), *(Shard(d) for d in range(ndim))])
    return st.tuples(*(one if mesh.sizes[axis] > 1 else st.just(Replicate()) for axis in mesh.names))


@pytest.mark.simulated
@settings(deadline=None)
@given(data=st.data())
def test_round_trip(data: st.DataObject) -> None:
    mesh, shape = data.draw(strategies.meshes()), data.draw(strategies.shapes())
    wanted = data.draw(placements(mesh, len(shape)))
    assert placements_of(attr_of(wanted, mesh, shape), mesh, shape) == wanted


def test_what_placements_say() -> None:
    assert attr_of((Shard(0), Shard(-1)), MESH, (8, 4)) == DistAttr.split("dp", "tp")
    assert attr_of((Shard(1), Shard(1)), MESH, (8, 4)) == DistAttr.split(None, ("dp", "tp"))
    for theirs, ours in (("sum", "sum"), ("max", "max"), ("min", "min"), ("avg", "avg"), ("product", "prod")):
        assert attr_of((Replicate(), Partial(theirs)), MESH, (8,)) == DistAttr.split(None, pending={"tp": ours})
        assert placements_of(DistAttr.split(None, pending={"tp": ours}), MESH, (8,)) == (Replicate(), Partial(theirs))
    ones = Mesh(one=1, tp=2)
    assert placements_of(DistAttr.split(("tp", "one")), ones, (8,)) == (Replicate(), Shard(0))
    assert placements_of(DistAttr((((4, ("dp",)), (2, ())),)), MESH, (8,)) == (Shard(0), Replicate())


class Strided(Shard):
    """As torch's own, which says more than a dim."""


REFUSED = {
    "1 placements for the axes dp, tp; give one for each axis of the mesh, in order": (Shard(0),),
    "Shard(dim=0) is no tuple; give one placement for each axis of the mesh: dp, tp": Shard(0),
    "Shard(dim=2) over dp splits dim 2 of a value of 2; use Replicate() or an existing dim": (Shard(2), Replicate()),
    "Shard(dim=-3) over tp splits dim -3 of a value of 2; use Replicate() or an existing dim": (Replicate(), Shard(-3)),
    "over tp is neither Shard, Replicate nor Partial; give the axes of each dim instead": (Replicate(), Strided(0)),
    "over dp has a reduction that autopar does not have; reduce by one of sum, max, min, product, avg": (
        Partial("bor"),
        Replicate(),
    ),
    "is partial in two ways at once; the order of the reductions would matter": (Partial("max"), Partial("sum")),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        attr_of(REFUSED[text], MESH, (8, 4))
    assert text in str(caught.value)


def test_what_placements_cannot_say() -> None:
    with pytest.raises(
        ValueError, match="dim 0 is split over tp/dp; placements have axes in the order of the mesh, dp/tp"
    ):
        placements_of(DistAttr.split(("tp", "dp")), MESH, (8,))
    with pytest.raises(ValueError, match="dim 0 is split in parts, which placements cannot express"):
        placements_of(DistAttr((((3, ("dp",)), (4, ("tp",))),)), MESH, (12,))
    with pytest.raises(ValueError, match="dim 0 is split in parts, which placements cannot express"):
        placements_of(DistAttr((((3, ()), (5, ("tp",))),)), MESH, (15,))


def test_equal_parts_that_are_split_evenly_have_a_placement() -> None:
    """A fused qkv weight: torch's own, which optimizers and full_tensor know."""
    attr = DistAttr((((3, ()), (4, ("tp",))),))
    (whole, strided) = placements_of(attr, MESH, (12,))
    assert whole == Replicate() and (strided.dim, strided.split_factor) == (0, 3)
    assert attr_of((whole, strided), MESH, (12,)) == attr
    with pytest.raises(ValueError, match="splits dim 0 of 10 unevenly; use Shard"):
        attr_of((whole, strided), MESH, (10,))
    with pytest.raises(ValueError, match="splits dim 0 and parts of it; use Shard for both"):
        attr_of((Shard(0), strided), MESH, (12,))


def test_the_nearest_that_placements_say() -> None:
    """Of parameters at the edge of a program: dims that have no placement are whole."""
    for attr, edge in {
        DistAttr.split(("tp", "dp"), None): DistAttr.replicated(2),
        DistAttr.split(("dp", "tp"), None, pending=()): DistAttr.split(("dp", "tp"), None),
        DistAttr.split("dp", None, pending=["tp"]): DistAttr.split("dp", None),
        DistAttr((((3, ()), (4, ("tp",))), ((None, ("dp",)),))): DistAttr(
            (((3, ()), (4, ("tp",))), ((None, ("dp",)),))
        ),
        DistAttr((((3, ("tp",)), (4, ("dp",))), ((None, ()),))): DistAttr.replicated(2),
    }.items():
        assert edge_of(attr, MESH, (12, 8), strided=True) == edge
    assert edge_of(DistAttr((((3, ()), (4, ("tp",))),)), MESH, (12,)) == DistAttr.replicated(1)


def test_a_parameter_without_a_placement_is_relaid() -> None:
    """It is whole at the edge, and split where it is used; the numbers are the same."""
    model = Block().double()
    plan = {"up.weight": (("tp", "dp"), None), "down.weight": ("(2/tp 4/dp)", None)}
    check_equal(model, MESH, plan, (torch.randn(6, 8, dtype=torch.float64),))


def test_a_plan_of_placements() -> None:
    """And it is the same plan as one of axes."""
    model, x = Block().double(), torch.randn(6, 8, dtype=torch.float64)
    column, row = (Replicate(), Shard(0)), [Replicate(), Shard(1)]
    parallel = check_equal(model, MESH, {"up.weight": column, "up.bias": column, "down.weight": row}, (x,))
    axes = autopar.parallelize(model, MESH, {"up.*": ("tp",), "down.weight": (None, "tp")}, example=(x,))
    assert str(parallel.program) == str(axes.program)


def test_plans_that_are_refused() -> None:
    def refused(spec: Any) -> str:
        with pytest.raises(PlanError) as caught:
            autopar.parallelize(Block(), MESH, {"up.weight": spec})
        return str(caught.value)

    assert refused((Shard(2), Replicate())).endswith(
        "Shard(dim=2) over dp splits dim 2 of a value of 2; use Replicate() or an existing dim, on up.weight with the "
        "shape [12, 8]"
    )
    assert "Shard(dim=0) is no tuple; give one placement for each axis of the mesh: dp, tp" in refused(Shard(0))
    assert refused((Replicate(), Partial())).endswith(
        "is pending, but up.weight is no partial sum; only Shard and Replicate are allowed"
    )


def test_device_meshes_need_processes_and_names() -> None:
    with pytest.raises(RuntimeError, match="start them with torchrun"):
        device_mesh_of(MESH)
    with pytest.raises(TypeError, match=r"parallelize takes an autopar\.Mesh"):
        autopar.parallelize(Block(), "dp=2")


SHAPES = [(8, 8), (5, 7), (3, 1), (2, 9), (0, 4)]


def on_each_rank() -> None:
    rank = distributed.get_rank()
    for mesh in (Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(dp=2, tp=2, ranks=[0, 2, 1, 3])):
        theirs = device_mesh_of(mesh)
        assert mesh_of(theirs) == mesh
        model = Block()
        assert autopar.parallelize(model, theirs, "megatron", example=(torch.randn(4, 8),)).mesh == mesh
        for shape in SHAPES:
            whole = torch.arange(shape[0] * shape[1]).reshape(shape)
            choices = [Replicate(), Shard(0), Shard(1)]
            for said in ([a] if len(mesh.names) == 1 else [a, b] for a in choices for b in choices):
                piece = distribute_tensor(whole, theirs, said).to_local()
                type = TensorType(shape, whole.dtype, Layout(mesh, attr_of(said, mesh, shape)))
                assert torch.equal(piece, cut(whole, type, mesh.coordinates(rank))), (rank, shape, said)
    with pytest.raises(ValueError, match="mesh_dim_names"):
        mesh_of(init_device_mesh("cpu", (4,)))


@pytest.mark.processes
def test_pieces_are_those_of_dtensor() -> None:
    ranks(4).run(on_each_rank)
