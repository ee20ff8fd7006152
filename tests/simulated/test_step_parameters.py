"""Parameters that a step cannot train as eager does are refused by name: with hooks of their gradients, and replaced
ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from processes import ranks
from torch import nn

import autopar
from autopar import Mesh
from autopar.ir.nodes import record_of


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.m(self.l(x).relu()).square().mean()


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
HOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "register_hook": lambda p: p.register_hook(lambda grad: grad * 3),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(lambda p: None),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_hook_of_a_gradient_is_refused(hook: str, steps_before: int) -> None:
    model = Loss()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    for _ in range(steps_before):
        step.simulate(X)
    before = model.l.weight.detach().clone()
    handle = HOOKS[hook](model.l.weight)
    with pytest.raises(ValueError) as caught:
        step.simulate(X)
    assert str(caught.value) == (
        "l.weight has a hook of its gradient, which is not called where the gradient is part of a graph: remove it, "
        "or train in the plain loop, on the model that parallelize returns: loss = parallel(…), loss.backward(), "
        "optimizer.step()"
    )
    assert torch.equal(model.l.weight, before)
    handle.remove()
    step.simulate(X)
    assert not torch.equal(model.l.weight, before)


def test_a_hook_of_what_is_not_trained_stays() -> None:
    model = Loss()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(model.m.parameters(), lr=0.1))
    model.l.weight.register_hook(lambda grad: None)
    hooked, trained = model.l.weight.detach().clone(), model.m.weight.detach().clone()
    step.simulate(X)
    assert torch.equal(model.l.weight, hooked) and not torch.equal(model.m.weight, trained)


def test_a_replaced_parameter_is_refused() -> None:
    """Eager would train the one before, which the optimizer has."""
    model = Loss()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    step = parallel.train_step(
        torch.optim.SGD([{"params": model.m.parameters()}, {"params": model.l.parameters()}], lr=0.1)
    )
    step.simulate(X)
    old, model.l.weight = model.l.weight, nn.Parameter(model.l.weight.detach() * 2)
    with pytest.raises(ValueError, match=r"^l\.weight was replaced after the optimizer was made, which still has the "
                                         r"one before \(in group 1\): "
                                         r"another parameter is there; make the optimizer of parallel\.parameters\(\) "
                                         r"again, and the step of it$"):  # fmt: skip
        step.simulate(X)
    del model.l.weight
    model.l.register_buffer("weight", old.detach())
    with pytest.raises(ValueError, match="it is no parameter of the model any more"):
        step.simulate(X)


def on_processes() -> None:
    model = Loss()
    handle = model.l.weight.register_hook(lambda grad: grad * 3)
    with pytest.raises(
        ValueError,
        match=r"^l\.weight has a hook of its gradient, and the parameters on processes are copies without it: remove "
        r"it, and register it",
    ):
        autopar.parallelize(model, Mesh(dp=2), "ddp")
    handle.remove()
    parallel = autopar.parallelize(model, Mesh(dp=2), "ddp")
    seen: list[torch.Tensor] = []
    handle = parallel.l.weight.register_hook(seen.append)
    parallel(X).backward()
    assert len(seen) == 1
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="has a hook of its gradient, which is not called"):
        step(X)
    handle.remove()
    step(X)


@pytest.mark.processes
def test_on_processes() -> None:
    ranks(2).run(on_processes)


def test_the_reduction_of_the_loss_has_the_losss_line() -> None:
    parallel = autopar.parallelize(Loss(), Mesh(dp=2), "ddp")
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1))
    update = step.capture(X).update
    (reduction,) = (node for node in update.nodes if node.name == "loss_dp")
    assert record_of(reduction).source.startswith("test_step_parameters.py:")
