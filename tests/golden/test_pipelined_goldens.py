"""Golden files of steps on stages, in which each message is a line: tied weights, a norm over all, a skip connection.

``pytest --update-goldens`` rewrites them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh, Program
from autopar.step.program import RankStep, Step

GOLDEN = Path(__file__).parent / "pipelined"


class Tied(nn.Module):
    """The last layer has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(6, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.layer(self.embed(x)))), y)


class Layers(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.second(torch.tanh(self.first(x))), y)


class Scaled(nn.Linear):
    """A layer of a product."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return super().forward(x * by)


class Skipped(nn.Module):
    """The last layer reads what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), Scaled(4, 4)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.tanh(self.layers[0](x))
        second = torch.relu(self.layers[1](first))
        out = self.layers[2](second, first)
        return nn.functional.mse_loss(out, y), out


IDS = {"x": torch.arange(8) % 6, "y": torch.arange(8) % 6}
VECTORS = {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
# case → the model, the mesh, the modules of each stage, a batch, and further options
CASES: dict[str, tuple[type[nn.Module], dict[str, int], list[Any], dict[str, Any], dict[str, Any]]] = {
    "tied": (Tied, {"pp": 2, "dp": 2}, ["embed", ["layer", "head"]], IDS, {}),
    "norm": (Layers, {"pp": 2, "dp": 2}, ["first", "second"], VECTORS, {"clip_norm": 1.0}),
    "skip": (Skipped, {"pp": 3}, ["layers.0", "layers.1", "layers.2"], VECTORS, {"returns": "outputs"}),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_goldens: bool) -> None:
    make, sizes, stages, batch, options = CASES[name]
    parallel = autopar.parallelize(make(), Mesh(sizes), "ddp" if "dp" in sizes else {})
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    step = parallel.train_step(optimizer, microbatches=2, schedule="1f1b", stages=stages, **options)
    path, text = GOLDEN / f"{name}.txt", str(step.capture(**batch))
    if update_goldens:
        path.write_text(text)
    assert text == path.read_text()
    again = Step.parse(text)
    again.verify()
    assert str(again) == text and again == step.program
    for rank in step.parallel.mesh.ranks:
        local = step.local(rank)
        local.verify()
        assert RankStep.parse(str(local)) == local
        assert all(program == Program.parse(str(program)) for program in local.programs.values())


def test_every_golden_has_a_case() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(CASES)


def messages(name: str, program: str) -> list[str]:
    """The values that a program sends, and the stages that they go to."""
    text = (GOLDEN / f"{name}.txt").read_text().partition(f"{program} program")[2]
    part = re.split(r"\n\w+ program", text)[0]
    return [f"{value} to {stage}" for value, stage in re.findall(r" = send\((\w+), (\w+)\)", part)]


def test_what_is_sent() -> None:
    """A tied weight goes to its reader once, its sum home, and the loss to all; a norm needs no message of its own."""
    assert messages("tied", "copy") == ["embed_weight to s1"]
    assert messages("tied", "update") == ["embed_weight_grad_1_dp to s0", "loss_dp to None"]
    assert messages("norm", "update") == ["loss_dp to None"]
    assert "all_reduce(squares_2, pp)" in (GOLDEN / "norm.txt").read_text()
    assert messages("skip", "micro") == [
        "tanh to s1", "tanh_s1_s1 to s2", "relu to s2", "mul_4 to s1", "mul_5 to s1", "add_1 to s0",
    ]  # fmt: skip
    assert messages("skip", "share") == ["outputs_0 to None"]
