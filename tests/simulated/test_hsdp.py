"""The preset ``hsdp``: the batch is split over two axes, parameters over the second, with copies over the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import check_equal
from hsdp_on_ranks import MESH, Pair, batches, eager, made
from models import Block

import autopar
from autopar import Mesh, PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import name_of, record_of, tensor_type
from autopar.report.transfers import bytes_per_axis

BOTH = "the preset 'hsdp' splits the batch over two axes, with copies of the parameters over the first, and pieces of "


def homes(program: Any) -> dict[str, DistAttr]:
    return {name_of(n): tensor_type(n).attr for n in program.placeholders if record_of(n).role in ("param", "input")}


@pytest.mark.long
@pytest.mark.parametrize("mesh", [MESH, Mesh(dp=2, fsdp=3), Mesh(replica=2, shard=2, tp=2)], ids=str)
def test_the_numbers_are_those_of_a_single_device(mesh: Mesh) -> None:
    """Also beside megatron; the first axis has copies, whatever the names of the axes are."""
    plan = ["megatron", "hsdp"] if "tp" in mesh.names else "hsdp"
    x = torch.randn(6, 6, 8, dtype=torch.float64).requires_grad_()
    parallel = check_equal(Block().double(), mesh, plan, (x,))
    copies, pieces = mesh.names[:2]
    attrs = homes(parallel.program)
    assert attrs.pop("x") == DistAttr.split((copies, pieces), None, None)
    assert all(pieces in attr.axes and copies not in attr.axes for attr in attrs.values())


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (2, 3), (3, 2)])
def test_the_bytes_of_each_axis(replicas: int, shards: int) -> None:
    """A rank receives (s-1)/s of the parameters for each gather and for the reduce-scatter, and adds up pieces of
    gradients over the replicas: 2 (r-1)/r of a piece."""
    mesh, model = Mesh(replica=replicas, shard=shards), torch.nn.Linear(12, 12, bias=False).double()
    x = torch.randn(12, 12, dtype=torch.float64)
    parallel = check_equal(model, mesh, "hsdp", (x,))
    size = 12 * 12 * 8
    assert bytes_per_axis(parallel.program) == {
        "shard": 2 * size * (shards - 1) / shards,
        "replica": 2 * size / shards * (replicas - 1) / replicas,
    }
    kinds = [(row.transfer, row.axis, row.phase) for row in parallel.transfers if row.bytes]
    assert kinds == [
        ("all_gather", "shard", "forward"), ("reduce_scatter", "shard", "backward"),
        ("all_reduce", "replica", "backward"),
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_adds_up_pieces_over_the_replicas_once(zero: int) -> None:
    """With two micro-batches: reduce-scatters in each, and one all-reduce of each piece in the update. ZeRO has the
    axis of the pieces, and nothing more to split."""
    model = made()
    parallel = autopar.parallelize(model, MESH, "hsdp")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = parallel.train_step(optimizer, microbatches=2, zero=zero, clip_norm=0.5)
    losses = [step.simulate(x).item() for x in batches()]
    expected, parameters = eager(clip=0.5)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(dict(model.named_parameters()), parameters)
    micro, _, update = str(step.program).partition("update program")
    lines = [line.split(" = ")[1] for line in (*micro.splitlines(), *update.splitlines()) if "_replica :" in line]
    assert all("up_weight : f64[12/shard 8] =" in text for text in (micro, update))
    assert "up_weight_exp_avg : f64[12/shard 8] =" in update and "up_weight_grad : f64[12/shard 8] +replica =" in micro
    assert micro.count("reduce_scatter(") == 4 and "all_reduce(up" not in micro
    assert [line for line in lines if line.endswith("_grad, replica)")] == [
        f"all_reduce({name}_grad, replica)" for name in ("up_weight", "down_weight", "odd_weight", "odd_bias")
    ]


def test_the_notes_name_both_axes() -> None:
    parallel = autopar.parallelize(Pair().double(), MESH, "hsdp", example=(batches()[0],))
    assert parallel.reports["capture"].notes == (
        "the preset hsdp splits 4 of 4 parameters over shard, as the batch, with copies over replica",
        "replica and shard split dim 0 of the inputs x (the batch, 8); name inputs in the plan to change it",
    )


@pytest.mark.parametrize("mesh", [Mesh(dp=4), Mesh(dp=2, tp=2)], ids=str)
def test_a_mesh_with_one_axis_of_the_batch(mesh: Mesh) -> None:
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(Pair(), mesh, "hsdp")
    assert str(caught.value) == (
        f"{BOTH}them over the second, and the mesh ({mesh}) has no two such axes; name them so: Mesh(replica=2, "
        f'shard=2), or take "fsdp", which needs one'
    )


@pytest.mark.long
def test_in_a_search_it_fixes_the_batch_and_the_parameters() -> None:
    x = batches()[0]
    model = Pair().double()
    parallel = autopar.parallelize(model, MESH, ["search", "hsdp"], example=(x,))
    attrs = homes(parallel.program)
    assert attrs["x"] == DistAttr.split(("replica", "shard"), None)
    assert attrs["up.weight"] == DistAttr.split("shard", None)
    torch.testing.assert_close(parallel.simulate(x), model(x))
