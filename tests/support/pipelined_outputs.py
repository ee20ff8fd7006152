"""Steps on stages that return what the model returns, made by all stages; beside the model in eager."""

from __future__ import annotations

import copy
from typing import Any

import torch
from outputs import outputs_alike, own_value
from pipelined_steps import MESHES, SPLIT, Layers, vectors
from steps import run
from torch import nn

import autopar
from autopar import Mesh
from autopar.runtime.dtensors import is_dtensor


class Turned(nn.Module):
    """A layer of its own that computes nothing: its result is a view of what the stage before has sent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


class Told(Layers):
    """Each layer's result is an output, and so is a view of the first half's."""

    def __init__(self, layers: int = 4, dim: int = 8) -> None:
        super().__init__(layers, dim)
        self.turned = Turned()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {}
        half = len(self.layers) // 2
        for k, layer in enumerate(self.layers):
            if k == half:
                found["turned"] = self.turned(x)
            x = found[f"layer {k}"] = layer(x)
        scores = self.head(x)
        loss = nn.functional.cross_entropy(scores, y)
        return {"scores": scores, "loss": loss, "labels": y, "count": y.ne(-100).sum(), "kind": "text", **found}


class ToldShared(Told):
    """The first layer, one between and the last have one weight."""

    def __init__(self, layers: int = 4, dim: int = 8) -> None:
        super().__init__(layers, dim)
        for k in (layers // 2, layers - 1):
            self.layers[k][0].weight = self.layers[0][0].weight


MODELS = {"told": Told, "shared": ToldShared}


def told_alike(name: str, mesh: str, policy: str, microbatches: int, layers: int, outputs: str = "sharded",
               **options: Any) -> Any:  # fmt: skip
    """Outputs of three steps equal those of a single device, on all ranks. Returns the step."""
    torch.manual_seed(0)
    model = MODELS[name](layers).double()
    alone, sizes = copy.deepcopy(model), MESHES[mesh]
    plan: Any = SPLIT if "tp" in sizes else "ddp" if "dp" in sizes else {}
    parallel = autopar.parallelize(model, Mesh(sizes), plan, outputs=outputs)
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), microbatches=microbatches,
                               schedule=policy, returns="outputs", **options)  # fmt: skip
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for k in range(3):
        batch = vectors(4 * microbatches)(k)
        ours, theirs = run(step, batch), alone(**batch)
        check(ours, theirs, outputs)
        theirs["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


def check(ours: Any, theirs: Any, outputs: str) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        if not isinstance(value, torch.Tensor):
            assert ours[name] == value
            continue
        found = own_value(ours[name], outputs)
        assert found.shape == value.shape, name
        torch.testing.assert_close(found, value.detach(), rtol=1e-10, atol=1e-10)


def on_processes() -> None:
    """Sharded outputs, plain ones, and batches in pieces; the calls of the model too."""
    for case in (("told", "pp2 dp2", "1f1b", 3, 4), ("shared", "pp4", "zb-v", 3, 8)):
        told_alike(*case).parallel.close()
    step = told_alike("told", "pp2 dp2", "1f1b", 2, 4, outputs="global")
    batch = vectors(8)(0)
    with torch.no_grad():
        found = step.parallel(**batch)
    assert {name: tuple(found[name].shape) for name in ("scores", "turned")} == {"scores": (8, 11), "turned": (8, 8)}
    assert not any(map(is_dtensor, found.values()))
    step.parallel.close()
    outputs_alike({"pp": 2, "dp": 2}, 3, {"schedule": "1f1b"}, "local")
