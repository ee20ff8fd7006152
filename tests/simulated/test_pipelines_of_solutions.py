"""A pipeline on paper of the plans of a model's blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh, PlanError
from autopar.costs.machine import machine
from autopar.costs.prices import price
from autopar.search.devices.block_times import block_of
from autopar.search.devices.stages import best_pipeline
from autopar.search.solutions.artifact import load
from autopar.search.solutions.solution import Solution

pytestmark = pytest.mark.simulated
H100 = machine("NVIDIA H100 80GB HBM3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def planned(model: nn.Module, rows: int, width: int = 512, grad: bool = True) -> Solution:
    x = torch.empty(rows, width, device="meta", requires_grad=grad)
    found = autopar.parallelize(model.to("meta"), Mesh(a=2), example=(x,), machine=H100).solution
    assert found is not None
    return found


def test_the_times_and_bytes_of_a_block() -> None:
    solution = planned(Block(), 4096)
    block = block_of(solution)
    phases = autopar.price(solution.priced.programs[0][1], H100).by_phase
    assert block.forward == pytest.approx(phases["forward"], abs=1e-12)
    assert block.backward + block.weight == pytest.approx(phases["backward"], abs=1e-12)
    # two products for the input's gradient, and two of the same work for the weights
    assert block.weight / 1.2 < block.backward < 1.2 * block.weight
    rows = 4096 if "[4096 512]" in solution.values["input x"].gives else 2048
    assert block.boundary == 4 * rows * 512
    assert block.transfer == price("send", block.boundary, 2, H100, shape=(2, 1))
    assert block_of(solution, outside=True).transfer == price("send", block.boundary, 2, H100, shape=(1, 2))
    # kept are x, what relu reads or makes, and nothing twice
    assert block.activation == 4 * rows * (512 + 2048)
    weights = sum(
        4 * 512 * 2048 // (1 + ("/a" in solution.values[f"param {n}.weight"].gives[0])) for n in ("up", "down")
    )
    assert block.fixed == 2 * weights and block_of(solution, states=4).fixed == 4 * weights


def test_without_a_gradient_of_the_input_all_of_the_backward_is_of_the_weights() -> None:
    block = block_of(planned(Block(), 4096, grad=False))
    assert block.backward == 0 < block.weight


def test_a_deep_model_of_equal_blocks() -> None:
    """The price is affine in the depth, so one plan is enough; the head is dearer than a block."""
    head = nn.Sequential(nn.Linear(512, 8192, bias=False), nn.Linear(8192, 512, bias=False))
    candidates = {}
    for microbatches in (4, 8):
        rows = 65536 // microbatches
        first, last = block_of(planned(Block(), rows)), block_of(planned(head, rows))
        candidates[microbatches] = [first] * 15 + [last]
        assert 2 * first.forward < last.forward
    found = best_pipeline(candidates, 4, most=100)
    assert found.bound <= found.seconds
    alone = best_pipeline(candidates, 4, policies=["gpipe"])
    assert found.seconds < alone.seconds and alone.exact and "no other is faster" in str(alone)
    last = alone.blocks - alone.cut[-1]
    assert last < 16 / 4, "the stage with the head has fewer blocks"


def test_what_is_no_block(tmp_path: object) -> None:
    solution = planned(Block(), 64)
    solution.save(f"{tmp_path}/plan.json")
    with pytest.raises(PlanError, match="a block is a call whose plan is applied in this process"):
        block_of(load(f"{tmp_path}/plan.json"))
