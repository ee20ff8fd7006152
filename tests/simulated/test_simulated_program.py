"""``autopar.simulate`` runs any explicit program on full tensors, ``autopar.localize`` makes the programs of its ranks;
errors name the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Mesh, Program, VerifyError

MESH = Mesh(dp=2, tp=2)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.up(x))
        return self.down(h), h.sum()


PLAN = {"*up.weight": ("tp", None), "*down.weight": (None, "tp")}


def captured(model: nn.Module, *args: Any, plan: Any = "megatron") -> Program:
    return autopar.parallelize(model, MESH, plan, example=args).program


def alike(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_captured_program_as_the_model_with_full_gradients() -> None:
    """Five rows over dp=2 are uneven; names are the model's or the program's, or the order is the program's."""
    model, x = TwoResults().double(), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    program = captured(model, x, plan=PLAN)
    wanted = model(x)
    parameters = dict(model.named_parameters())
    seeds = torch.randn(5, 6, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, [*parameters.values(), x], seeds)
    by_program = {name.replace(".", "_"): tensor for name, tensor in parameters.items()}
    for inputs in ({**parameters, "x": x}, {"x": x, **by_program}, [*parameters.values(), x]):
        found = autopar.simulate(program, inputs)
        assert isinstance(found, tuple)
        alike(found, wanted)
        alike(torch.autograd.grad(found, [*parameters.values(), x], seeds), gradients)


def test_a_result_without_a_gradient_counts_as_zero() -> None:
    model, x = TwoResults().double(), torch.randn(4, 6, dtype=torch.float64)
    program = captured(model, x, plan=PLAN)
    for used in (0, 1):
        model.zero_grad()
        model(x)[used].sum().backward()
        wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found = autopar.simulate(program, {**dict(model.named_parameters()), "x": x})
        alike(torch.autograd.grad(found[used].sum(), list(model.parameters())), tuple(wanted))


def test_buffers_get_their_next_values_in_place() -> None:
    model, x = nn.BatchNorm1d(6).double(), torch.randn(8, 6, dtype=torch.float64)
    program = captured(model, x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = model(x)
    (found,) = autopar.simulate(program, {**state, "input": x})
    alike(found, wanted)
    alike(state, dict(model.state_dict()))


def test_a_seed_is_drawn_where_it_is_not_given() -> None:
    program = captured(nn.Dropout(0.5), torch.ones(8, 6))
    seed = torch.tensor(7)
    one, other = (autopar.simulate(program, {"input": torch.ones(8, 6), "seed": seed})[0] for _ in range(2))
    assert torch.equal(one, other)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn += [autopar.simulate(program, [torch.ones(8, 6)])[0]]
    assert torch.equal(*drawn) and not torch.equal(drawn[0], autopar.simulate(program, [torch.ones(8, 6)])[0])


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_the_programs_of_a_training_step() -> None:
    """Run by hand: sums of gradients are partial sums and states, and so are parameters in the update."""
    model, x = Loss().double(), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, MESH, {"inner.weight": ("tp", None)})
    step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.5), microbatches=2)
    weight = model.inner.weight.detach().clone()
    loss = step.simulate(x)
    programs = step.program.programs
    sums = {"inner.weight.grad": torch.zeros_like(weight), ".loss": torch.zeros_like(loss)}
    for batch in x.chunk(2):
        assert autopar.simulate(programs["micro"], {"inner.weight": weight, "x": batch, **sums}) == ()
    numbers = {".lr.0": torch.tensor(0.5, dtype=torch.float64), ".weight_decay.0": torch.zeros((), dtype=torch.float64)}
    (found,) = autopar.simulate(programs["update"], {"inner.weight": weight, **sums, **numbers})
    alike(found, loss)
    alike(weight, model.inner.weight.detach())


PENDING = """
program explicit on dp=2 tp=2
  x : f64[5/dp 4] +tp = state(y)
  w : f64[4] +max:dp = input
forward:
  y : f64[5/dp 4] +tp = neg(x)
  w_dp : f64[4] = all_reduce(w, dp, op='max')
  return (y, w_dp, w)
"""


def test_partial_sums_are_given_and_come_back_whole() -> None:
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    given = x.clone()
    found = autopar.simulate(Program.parse(PENDING), {"x": given, "w": w})
    alike(found, (-x, w, w))
    alike(given, -x)


STAGES = """
program explicit on w=3
stage s0 on a=2
stage s1 on c=1 ranks 2
  x : f64[5/a 4] @s0 = input
forward:
  relu : f64[5/a 4] @s0 = relu(x)
  relu_a : f64[5 4] @s0 = all_gather(relu, 0, a, stage=s0)
  relu_a_s1 : f64[5 4] @s0 = send(relu_a, s1)
  relu_a_s1_1 : f64[5 4] @s1 = recv(relu_a_s1, s1)
  neg : f64[5 4] @s1 = neg(relu_a_s1_1)
  return neg
"""


def test_between_stages() -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    alike(autopar.simulate(Program.parse(STAGES), [x]), (-torch.relu(x),))


def test_localize() -> None:
    program = Program.parse(
        "program explicit on dp=2\n  x : f32[5/dp 4] = input\nforward:\n  relu : f32[5/dp 4] = relu(x)\n  return relu\n"
    )
    ranks = autopar.localize(program)
    assert list(ranks) == [0, 1] and [ranks[rank].node("relu").meta["autopar"].type.shape for rank in ranks] == [
        (3, 4),
        (2, 4),
    ]
    program.edit()  # is still possible
    with pytest.raises(ValueError, match="rank 2 is not on the mesh"):
        ranks[2]


X, W = torch.randn(8, 4), torch.randn(4, 6)
TEXT = """
program explicit on dp=2 tp=2
  x : f32[8/dp 4] = input
  w : f32[4 6/tp] = param('down.weight')
forward:
  mm : f32[8/dp 6/tp] = mm(x, w)
  return mm
"""
REFUSED = {
    "no program": (3, [X, W], TypeError, "takes a Program, such as parallel.program or Program.parse(text), not int"),
    "traced": (
        "program traced\n  x : f32[8 4] = input\n  return x\n",
        [X],
        ValueError,
        "localize takes an explicit program, this one is traced; run the passes first",
    ),
    "inconsistent": (
        TEXT.replace("return mm", "return mm as [8/dp 6]"),
        [X, W],
        VerifyError,
        "insert the transfers between them",
    ),
    "too few": (
        TEXT,
        [X],
        ValueError,
        "simulate got 1 tensor, but the program takes 2: x, w; give one for each, in this order or by name",
    ),
    "missing": (TEXT, {"x": X}, ValueError, "simulate got no tensor for down.weight; give one for each placeholder"),
    "unknown": (
        TEXT,
        {"x": X, "down.wait": W},
        ValueError,
        "the program has no placeholder 'down.wait'; did you mean 'down.weight'?",
    ),
    "twice": (TEXT, {"x": X, "down.weight": W, "w": W}, ValueError, "'w' is given twice"),
    "a piece": (
        TEXT,
        {"x": X[:4], "w": W},
        ValueError,
        "x is f32[8/dp 4] in the program, but got [4, 4], torch.float32; give the full tensor",
    ),
    "another dtype": (
        TEXT,
        {"x": X, "w": W.double()},
        ValueError,
        "down.weight is f32[4 6/tp] in the program, but got [4, 6], torch.float64",
    ),
    "no tensor": (TEXT, {"x": X, "w": 3}, TypeError, "down.weight is an int; simulate takes full tensors"),
    "no inputs": (
        TEXT,
        X,
        TypeError,
        "simulate takes tensors by name or in order, not one tensor; give a dict or a list, as in [x, w]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, inputs, kind, said = REFUSED[name]
    program = Program.parse(text) if isinstance(text, str) else text
    with pytest.raises(kind, match=re.escape(said)):
        autopar.simulate(program, inputs)
