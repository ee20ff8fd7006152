"""Steps that return what the model returns, beside the model in eager on the whole batch. On each rank, or
simulated."""

from __future__ import annotations

import copy
from typing import Any

import loops
import torch
from steps import run
from torch import nn

import autopar
from autopar import Mesh
from autopar.runtime.dtensors import is_dtensor

PLAN = {"*.a.weight": ("tp", None), "*.b.weight": (None, "tp")}
STACKED = ("norm", "largest")  # rows meet in them


class Many(nn.Module):
    """It returns one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.a(x))
        logits = self.b(hidden)
        error, penalty = nn.functional.cross_entropy(logits, y), hidden.square().mean()
        return {
            "loss": error + 0.1 * penalty, "error": error, "penalty": penalty, "logits": logits, "columns": logits.t(),
            "flat": hidden.reshape(-1), "hits": (logits.argmax(-1) == y).sum(), "total": hidden.sum(),
            "bias": self.a.bias, "transposed": self.a.weight.t(), "x": x, "norm": hidden.norm(),
            "largest": hidden.amax(0), "kind": "text", "nothing": None,
        }  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 6, dtype=torch.float64, generator=generator), torch.randint(5, (12,), generator=generator)
    y[:3] = -100
    return x, y


def own_value(found: Any, outputs: str) -> torch.Tensor:
    """The whole value of an output; it needs no gradient, and is a DTensor only if outputs are sharded."""
    assert not found.requires_grad and (outputs == "sharded" or not is_dtensor(found))
    whole: torch.Tensor = loops.whole(found).detach().as_subclass(torch.Tensor)
    return whole


def outputs_alike(
    sizes: dict[str, int], microbatches: int, options: dict[str, Any], inputs: str = "global", outputs: str = "sharded"
) -> None:
    torch.manual_seed(0)
    model = Many()
    alone = copy.deepcopy(model)
    mesh = Mesh(sizes)
    plan = PLAN if "tp" in sizes else "ddp" if "dp" in sizes else {}
    parallel = autopar.parallelize(model, mesh, plan, inputs=inputs, outputs=outputs)
    step = parallel.train_step(
        torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=microbatches, returns="outputs", **options
    )
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for k in range(3):
        x, y = batch(k)
        theirs = alone(x, y)
        given = x, y
        if inputs == "local":
            given = tuple(one.chunk(sizes["dp"])[mesh.coordinates(torch.distributed.get_rank())["dp"]] for one in given)
        ours = run(step, *given, promoted=False)
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            if not isinstance(value, torch.Tensor):
                assert ours[name] == value
                continue
            found = own_value(ours[name], outputs)
            if name in STACKED and microbatches > 1:
                assert found.shape == (microbatches, *value.shape)
                continue
            torch.testing.assert_close(found, value.detach(), rtol=1e-10, atol=1e-10)
        alone.zero_grad()
        theirs["loss"].backward()
        optimizer.step()
    notes = [
        note.partition(" is stacked")[0] for report in step.reports for note in report.notes if "is stacked" in note
    ]
    assert notes == [f"the output {name}" for name in STACKED if microbatches > 1]
