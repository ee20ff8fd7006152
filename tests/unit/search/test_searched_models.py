"""Searched plans of models: the numbers of a single device, the promised price, and a bound below all plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from equality import TOLERANCE, relative
from random_plans import Prices, near_plan, random_plan
from searched import FAST, MACHINES, explicit
from searched_programs import Mlp, llama, on_meta
from torch import nn

import autopar
from autopar import Mesh
from autopar.capture import capture
from autopar.costs.machine import Machine
from autopar.plan.boundary import Boundary
from autopar.search.problem.build import build
from autopar.search.search import search
from autopar.search.solver.solver import solve

MESH = Mesh(a=2, b=2)
SLOW = MACHINES[0]


class Heads(nn.Module):
    """Attention with a fused projection, over a flattened batch, and a loss beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = torch.softmax(q @ k.mT / 2, -1) @ v
        z = self.out(y.transpose(1, 2).flatten(2))
        return z, z.square().mean()


@pytest.mark.long
@pytest.mark.parametrize(("name", "machine"), [
    *(("mlp", machine) for machine in MACHINES),
    ("llama", MACHINES[-1]),
    *(pytest.param("llama", machine, marks=pytest.mark.sweep("mlp is on this machine, and llama on another"))
      for machine in MACHINES[:-1]),
], ids=lambda value: getattr(value, "name", value))  # fmt: skip
def test_no_plan_costs_less_than_the_bound(name: str, machine: Machine) -> None:
    """1,000 plans at random, and 1,000 that differ from the answer by a few choices."""
    boundary = Boundary(on_meta(name), MESH)
    problem = build(boundary, machine)
    answer = solve(problem.graph, problem.order, problem.labels)
    least = search(boundary, machine).least
    prices, draw = Prices(problem), random.Random(0)
    assert least <= prices(answer.states)
    plans = [random_plan(problem, boundary, draw) for _ in range(1_000)]
    plans += [near_plan(problem, boundary, answer.states, draw) for _ in range(1_000)]
    assert min(map(prices, plans)) >= least


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_the_explicit_program_has_the_price_that_was_found(name: str) -> None:
    program = on_meta(name)
    for machine in MACHINES if name == "mlp" else MACHINES[-1:]:
        found = search(Boundary(program, MESH), machine)
        made = explicit(program, MESH, machine, found)
        assert found.least <= found.nanoseconds == autopar.price(made, machine).nanoseconds, machine.name


def compare(model: nn.Module, *args: Any, tolerance: float = TOLERANCE, on: Machine = SLOW) -> None:
    """Results and gradients of the searched program on simulated ranks, beside eager."""
    program = capture(model, args).program
    found = search(Boundary(program, MESH), on)
    made = explicit(program, MESH, on, found)
    assert any(type.attr.axes for type in found.types.values() if hasattr(type, "attr"))
    named = dict(model.named_parameters())
    inputs = [node for node in made.placeholders if autopar.ir.nodes.record_of(node).role == "input"]
    given = {node.name: tensor for node, tensor in zip(inputs, args, strict=True)}
    results = autopar.simulate(made, {**named, **dict(model.named_buffers()), **given})
    wanted = model(*args)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    seeds = [torch.randn_like(result) for result in wanted]
    ours = torch.autograd.grad(results, list(named.values()), seeds)
    theirs = torch.autograd.grad(wanted, list(named.values()), seeds)
    for a, b in zip([*results, *ours], [*wanted, *theirs], strict=True):
        assert relative(a, b) <= tolerance


@pytest.mark.long
@pytest.mark.parametrize("model", [Mlp, Heads])
def test_a_searched_plan_has_the_numbers_of_one_device(model: type[nn.Module]) -> None:
    compare(model().double(), torch.randn(4, 4, 8, dtype=torch.float64), on=FAST)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits


@pytest.mark.long
def test_a_searched_llama_has_the_numbers_of_one_device() -> None:
    compare(Logits().double(), torch.randint(0, 32, (4, 8)), tolerance=1e-6)  # it casts to float32 inside
