"""Transforms of torch.func inside of a forward: on a mesh as on a single device, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import TOLERANCE, check_equal, relative
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import autopar
from autopar import Mesh

# torch's own formulas of forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
d = torch.float64
MESH, PLAN = Mesh(dp=2, tp=2), {"inner.weight": ("tp", None)}
Function = Callable[["Transformed", torch.Tensor], Any]


class Transformed(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(4, 4, dtype=d), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)

    def energy(self, row: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(row @ self.inner.weight) ** 2).sum()

    def parameters_by_name(self) -> dict[str, torch.Tensor]:
        return dict(self.inner.named_parameters())


def of_a_sample(model: Transformed) -> Callable[..., torch.Tensor]:
    return lambda weights, row: torch.tanh(functional_call(model.inner, weights, (row,))).sum()


FUNCTIONS: dict[str, Function] = {
    "vmap of hessian": lambda m, x: vmap(hessian(m.energy))(m.inner(x)),
    "hessian": lambda m, x: hessian(m.energy)(m.inner(x)),
    "grad": lambda m, x: grad(m.energy)(m.inner(x)),
    "vmap of jacrev": lambda m, x: vmap(jacrev(lambda row: torch.tanh(row @ m.inner.weight)))(x),
    "vmap of jacfwd": lambda m, x: vmap(jacfwd(lambda row: torch.tanh(row @ m.inner.weight)))(x),
    "jvp": lambda m, x: jvp(m.energy, (m.inner(x),), (torch.ones_like(x),))[1],
    "vjp": lambda m, x: vjp(m.energy, m.inner(x))[1](torch.ones((), dtype=d))[0],
    "vmap "
    "in_dims": lambda m, x: vmap(lambda column, w: column.sum() * w, in_dims=(1, 0), out_dims=1)(x, m.inner.weight),
    "functional_call": lambda m,
    x: functional_call(m.inner, {name: p * 2 for name, p in m.parameters_by_name().items()}, (x,)),
    "gradients of "
    "samples": lambda m, x: vmap(grad(of_a_sample(m)), in_dims=(None, 0))(m.parameters_by_name(), x)["weight"],
    "ensemble": lambda m, x: vmap(lambda w, x: functional_call(m.inner, w, (x,)), in_dims=(0, None))(
        {name: torch.stack([p, p * 2]) for name, p in m.parameters_by_name().items()}, x),
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_transforms_are_those_of_a_single_device(function: Function) -> None:
    check_equal(Transformed(function), MESH, PLAN, (torch.randn(8, 4, dtype=d),))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_as_a_single_device(randomness: str) -> None:
    def dropped(model: Transformed, x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda row: nn.functional.dropout(model.inner(row), 0.5), randomness=randomness)(x)

    model, x = Transformed(dropped), torch.randn(8, 4, dtype=d)
    torch.manual_seed(1)
    expected = model(x)
    parallel = autopar.parallelize(model, MESH, PLAN, example=(x,), random="single")
    torch.manual_seed(1)
    assert relative(parallel.simulate(x), expected) <= TOLERANCE
    masks = torch.stack([row == 0 for row in expected])
    assert bool((masks == masks[0]).all()) == (randomness == "same")


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda call, x: grad(lambda y: call(y).sum())(x),
    "vmap": lambda call, x: vmap(call)(x[None]),
    "jacrev": lambda call, x: jacrev(call)(x),
    "a factor": lambda call, x: grad(lambda factor: call(x * factor).sum())(torch.tensor(2.0, dtype=d)),
}


@pytest.mark.parametrize("name", CALLS)
def test_transforms_of_the_call_are_refused(name: str) -> None:
    parallel = autopar.parallelize(nn.Linear(4, 4, dtype=d), MESH, {"weight": ("tp", None)})
    x = torch.randn(8, 4, dtype=d)
    with pytest.raises(ValueError, match=r"torch\.func transforms") as error:
        CALLS[name](parallel.simulate, x)
    said, line, remedy = str(error.value).splitlines()
    assert said == (
        "torch.func transforms a call of a model on a mesh, whose captured program has gradients through backward() "
        "alone"
    )
    assert line.startswith("    test_func.py:")
    assert remedy == (
        "  use the transform inside of forward, where it is captured with the model, or loss.backward() and "
        "torch.autograd.grad outside"
    )
    assert parallel.simulate(x).shape == (8, 4)
