"""The presets ``fsdp`` and ``fsdp+tp``: each parameter is split as the batch, and gathered for its use."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from equality import check_equal
from models import Block
from torch import nn

import autopar
from autopar import Mesh, PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import name_of, record_of, tensor_type

X = torch.randn(4, 6, 8, dtype=torch.float64)
DP, BOTH = Mesh(dp=2), Mesh(dp=2, tp=2)


class Normed(nn.Module):
    """A buffer, a scalar, a dim that two ranks do not divide, and names of Megatron's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(6), nn.Parameter(torch.tensor(2.0))
        self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(12, 8)
        self.odd = nn.Parameter(torch.randn(5, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(self.norm(x)))) * self.scale + self.odd.sum(0)


def homes(parallel: Any) -> dict[str, DistAttr]:
    return {
        name_of(n): tensor_type(n).attr
        for n in parallel.program.placeholders
        if record_of(n).role not in ("input", "tangent")
    }


@pytest.mark.long
@pytest.mark.parametrize("mesh", [DP, BOTH, Mesh(tp=2, dp=3), Mesh(dp=2, ep=2), Mesh(dp=2, cp=2)], ids=str)
@pytest.mark.parametrize("preset", ["fsdp", "fsdp+tp"])
@pytest.mark.parametrize("model", [Block, Normed])
def test_the_numbers_are_those_of_a_single_device(model: Any, preset: str, mesh: Mesh) -> None:
    if preset == "fsdp+tp" and "tp" not in mesh.names:
        return
    parallel = check_equal(model().double(), mesh, preset, (X.clone().requires_grad_(),))
    split = [name for name, attr in homes(parallel).items() if "dp" in attr.axes]
    large = {name for name, p in model().named_parameters() if max(p.shape, default=0) >= mesh.sizes["dp"]}
    by_columns = {"up_proj.bias"} if preset == "fsdp+tp" else set()  # tp splits its only dim
    assert set(split) == large - by_columns and len(split) > 1


@pytest.mark.long
def test_where_the_parameters_lie() -> None:
    parallel = check_equal(Normed().double(), BOTH, "fsdp+tp", (X,))
    attrs = homes(parallel)
    assert attrs["up_proj.weight"] == DistAttr.split("tp", "dp") and attrs["up_proj.bias"] == DistAttr.split("tp")
    assert attrs["down_proj.weight"] == DistAttr.split("dp", "tp") and attrs["down_proj.bias"] == DistAttr.split("dp")
    assert attrs["odd"] == DistAttr.split(None, None, "dp")  # the first dim that two ranks divide
    assert attrs["scale"].is_replicated and attrs["norm.running_mean"].is_replicated


@pytest.mark.long
def test_parameters_are_gathered_where_they_are_used_and_gradients_reduced_to_their_pieces() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(x)))

    parallel = check_equal(Pair().double(), DP, "fsdp", (X,))
    moved: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in parallel.transfers:
        moved[row.transfer, row.phase] += row.times
    assert moved == {("all_gather", "forward"): 2, ("reduce_scatter", "backward"): 2}
    assert parallel.reports["capture"].notes == (
        "the preset fsdp splits 2 of 2 parameters over dp, as the batch",
        "dp splits dim 0 of the inputs x (the batch, 4); name inputs in the plan to change it",
    )


@pytest.mark.long
def test_a_later_plan_has_the_last_word() -> None:
    plan = ["fsdp", {"up_proj.weight": ("tp",), "odd": ()}]
    attrs = homes(check_equal(Normed().double(), BOTH, plan, (X,)))
    assert attrs["up_proj.weight"] == DistAttr.split("tp", None) and attrs["odd"].is_replicated
    assert attrs["down_proj.weight"] == DistAttr.split("dp", None)
    composed = homes(check_equal(Normed().double(), BOTH, ["megatron", "fsdp"], (X,)))
    assert composed == homes(check_equal(Normed().double(), BOTH, "fsdp+tp", (X,)))


@pytest.mark.long
def test_in_a_search_the_presets_fix_the_batch_and_the_parameters() -> None:
    model = Block().double()
    for preset, split in (("ddp", False), ("fsdp", True)):
        parallel = autopar.parallelize(model, DP, ["search", preset], example=(X,))
        text = str(parallel.program)
        assert "x : f64[4/dp 6 8] = input" in text and ("up_weight : f64[12/dp 8] = param" in text) >= split
        torch.testing.assert_close(parallel.simulate(X), model(X))


@pytest.mark.parametrize("preset", ["fsdp", "fsdp+tp"])
def test_a_mesh_without_an_axis_of_the_batch(preset: str) -> None:
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(Block(), Mesh(tp=2), preset)
    assert str(caught.value) == (
        f"the preset '{preset}' splits the batch and parameters over an axis of the batch, and the mesh (tp=2) has "
        f"none; name one so: Mesh(dp=2)"
    )


@pytest.mark.long
def test_training_steps() -> None:
    """The losses and parameters of a single device, after three steps."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Normed()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x).square().mean()

    torch.manual_seed(0)
    model, single = WithLoss().double(), WithLoss().double()
    single.load_state_dict(model.state_dict())
    parallel = autopar.parallelize(model, BOTH, "fsdp+tp")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    step = parallel.train_step(optimizer, zero=1)
    beside = torch.optim.AdamW(single.parameters(), lr=1e-2)
    for _ in range(3):
        loss = step.simulate(X) if hasattr(step, "simulate") else step(X)
        expected = single(X)
        beside.zero_grad()
        expected.backward()
        beside.step()
        torch.testing.assert_close(loss.detach(), expected.detach())
    for one, other in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(one, other)
