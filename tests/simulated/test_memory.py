"""Memory: a step holds no more than eager's, and what it held it lets go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import calls_of_optimizers
import loops
import pytest
import torch
from conv_net import Net
from models import Residual
from processes import ranks
from torch import nn
from transformers_models import llama

import autopar
from autopar import Mesh
from autopar.examples.peak import peak_bytes


def rows(count: int, *shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, *shape)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "llama": (lambda: llama(heads=4, kv=2, head=16, hidden=176, layers=2).float(), lambda: loops.text(0, 4, 32)),
    "mlp": (lambda: Residual(64, 256, layers=4), lambda: rows(256, 64)),
    "resnet": (lambda: Net(), lambda: rows(8, 3, 33, 33)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step(name: str) -> None:
    """Bytes that the allocator holds at once: at most 1.05 times as many as in eager."""
    make, batch = MODELS[name]
    model, given = make(), batch()
    own = copy.deepcopy(model)
    parallel = autopar.parallelize(own, Mesh(dp=1), "ddp", example=given)

    def step(run: nn.Module) -> Callable[[], None]:
        def call() -> None:
            outputs = run(**given)
            (outputs.loss if hasattr(outputs, "loss") else outputs.square().mean()).backward()
            run.zero_grad()

        return call

    step(model)(), step(parallel)()
    assert peak_bytes(step(parallel)) <= 1.05 * peak_bytes(step(model))


@pytest.mark.processes
def test_many_steps() -> None:
    """On four processes, 60 steps with a megabyte in each of several collectives: no more tensors, no more memory."""
    for tensors, grown in ranks(4).run(calls_of_optimizers.many_steps, 60):
        assert tensors <= 0
        assert grown < 32 * 2**20
