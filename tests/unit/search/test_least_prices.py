"""Bounds of the prices of all transfers at once, beside the prices of the transfers themselves."""

from __future__ import annotations

import random

import pytest
import torch
from random_states import random_state
from searched import MACHINES, SLOW

from autopar import Mesh
from autopar.costs.machine import Machine
from autopar.ir.layout import DistAttr
from autopar.search.transfer_prices.chains import Chains, State
from autopar.search.transfer_prices.least_chains import LeastChains

SHAPES = [(8, 16), (4, 4, 8), (128,), (8, 1, 16), (64, 64), (1024, 1024), (6, 5), (3, 10), (7, 4), (3,), (4096, 12)]
MESHES = [Mesh(a=2, b=2, c=2), Mesh(a=2, b=4, c=2), Mesh(a=8, b=2, c=4), Mesh(a=8, b=4)]
f32, bf16 = torch.float32, torch.bfloat16


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "machine"), [
    pytest.param(
        mesh, machine, id=f"{mesh}-{machine.name}",
        marks=() if k % len(MACHINES) == m else pytest.mark.sweep("mesh and machine occur in other cases"),
    )
    for k, mesh in enumerate(MESHES) for m, machine in enumerate(MACHINES)
])  # fmt: skip
def test_no_transfers_cost_less_than_their_bound(mesh: Mesh, machine: Machine) -> None:
    draw, chains, least = random.Random(f"{mesh}"), Chains(mesh, machine), LeastChains(mesh, machine)
    tight = 0
    for _ in range(120):
        shape = draw.choice(SHAPES)
        have, need = (random_state(draw, shape, mesh, (f32, f32, bf16)) for _ in range(2))
        price, bound = chains.nanoseconds(shape, have, need), least.nanoseconds(shape, have, need)
        assert bound <= price, (shape, have, need)
        tight += bound == price > 0
    assert tight > 10


def state(*dims: str | tuple[str, ...] | None, pending: tuple[str, ...] = ()) -> State:
    return DistAttr.split(*dims, pending=pending), f32


@pytest.mark.parametrize(("have", "need"), [
    (state("a", None), state(None, "a")),
    (state("a", "b"), state("a", None)),
    (state(None, None, pending=("a", "b")), state(None, None)),
    (state(None, "c", pending=("a",)), state("a", "c")),
    (state("a", None), state(("a", "b"), None)),
    (state("a", None), state("a", None)),
])  # fmt: skip
def test_the_bound_of_a_single_transfer_is_its_price(have: State, need: State) -> None:
    mesh, shape = Mesh(a=2, b=2, c=2), (64, 64)
    assert LeastChains(mesh, SLOW).nanoseconds(shape, have, need) == Chains(mesh, SLOW).nanoseconds(shape, have, need)
