"""What a step returns: a number as any other, whose backward has run."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import calls_of_steps
import pytest
import torch
from processes import ranks
from steps import Pair
from torch import nn

import autopar
from autopar import Mesh
from autopar.step.compiling.loss import DONE, StepLoss

SAID = (
    "the step has already run its backward and its optimizer, and its loss has no graph: remove {}, and what "
    "follows it in the loop of a single device"
)


@pytest.fixture(scope="module")
def loss() -> torch.Tensor:
    torch.manual_seed(0)
    parallel = autopar.parallelize(Pair(), Mesh(dp=2), "ddp")
    return parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1)).simulate(
        torch.randn(4, 8), torch.randn(4, 8)
    )


@pytest.mark.parametrize("backward", [
    lambda loss: loss.backward(),
    lambda loss: (loss / 4).backward(),
    lambda loss: (loss + loss).mean().backward(retain_graph=True),
    lambda loss: torch.amp.GradScaler("cpu", enabled=False).scale(loss).backward(),
])  # fmt: skip
def test_backward(loss: torch.Tensor, backward: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        backward(loss)
    assert str(caught.value) == DONE == SAID.format("loss.backward()")


def test_autograd_grad(loss: torch.Tensor) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(loss, [nn.Parameter(torch.ones(1))])
    assert str(caught.value) == SAID.format("torch.autograd.grad(loss, …)")


def test_all_else_works(loss: torch.Tensor) -> None:
    plain = torch.tensor(float(loss))
    assert (
        isinstance(loss, torch.Tensor)
        and loss.item() == float(plain)
        and repr(loss) == repr(plain)
        and f"{loss:.4f}" == f"{plain:.4f}"
    )
    assert (
        loss == loss
        and torch.equal(loss, plain)
        and loss.isfinite()
        and type(loss.detach()) is torch.Tensor
        and loss.numpy() == plain.numpy()
    )
    assert type(torch.stack([loss, loss])) is torch.Tensor and torch.stack([loss, loss]).mean() == plain
    torch.testing.assert_close(loss, plain, check_dtype=True)
    for copied in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert type(copied) is torch.Tensor and torch.equal(copied, plain)
    file = io.BytesIO()
    torch.save({"loss": loss, "mean": (loss + loss) / 2}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"loss": plain, "mean": plain}


@pytest.mark.long
def test_sums_of_losses_hold_no_graph(loss: torch.Tensor) -> None:
    gc.collect()
    total: Any = 0
    running, own = torch.zeros(()), torch.zeros(())
    for _ in range(100):
        total += loss
        running += loss
        own.add_(loss)
    gc.collect()
    assert total.grad_fn is running.grad_fn is None and abs(float(total - own)) < 1e-4
    assert sum(type(one) is StepLoss for one in gc.get_objects()) <= 4


def test_a_graph_of_the_users_own_goes_on(loss: torch.Tensor) -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    (loss * weight).backward()
    assert torch.equal(weight.grad, loss.detach())


@pytest.mark.processes
def test_on_processes() -> None:
    ranks(2).run(calls_of_steps.loss_of_a_step)
