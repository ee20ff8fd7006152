"""The price of a transition by its class, beside the prices of the transfers that are planned for the pair itself."""

from __future__ import annotations

import random

import pytest
import torch
from random_states import random_state
from searched import MACHINES, SLOW

from autopar import Mesh
from autopar.costs.machine import Machine
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.record import TensorType
from autopar.search.transfer_prices.chains import Chains, State
from autopar.transitions import transitions
from autopar.transitions.by_levels import cheapest_way

f32, bf16 = torch.float32, torch.bfloat16
SHAPES = {
    "even": [(8, 16), (16, 8), (4, 4, 8), (128,), (2, 8, 8), (8, 1, 16)],
    "uneven": [(6, 5), (5, 6), (30,), (3, 10), (2, 3, 5), (10, 3), (7, 4), (4, 7)],
    "small": [(1, 4), (4,), (2, 2), (2,), (), (1, 1), (3,)],
}
MESHES = [Mesh(a=2, b=2), Mesh(a=4, b=2), Mesh(a=2, b=2, c=2)]


def planned(
    shape: tuple[int, ...], have: State, need: State, mesh: Mesh, machine: Machine
) -> list[tuple[object, State, int]]:
    """The transfers of a transition, the states that they lead to, and their prices."""
    type, target = (TensorType(shape, dtype, Layout(mesh, attr)) for attr, dtype in (have, need))
    found = []
    for step in transitions(type, target, machine):
        paid, _ = cheapest_way(step, type, machine)
        found.append((step.function, (step.type.attr, step.type.dtype), paid))
        type = step.type
    return found


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES)
def test_a_class_has_the_price_of_each_of_its_pairs(sizes: str, mesh: Mesh, machine: Machine) -> None:
    """One table of classes serves all pairs of all shapes, so that a class of pairs that differ shows."""
    draw, chains = random.Random(f"{sizes} {mesh}"), Chains(mesh, machine)
    pairs = 0
    for _ in range(150):
        shape = draw.choice(SHAPES[sizes])
        have, need = (random_state(draw, shape, mesh, (f32, f32, bf16)) for _ in range(2))
        pairs += have != need
        wanted = planned(shape, have, need, mesh, machine)
        assert chains.nanoseconds(shape, have, need) == sum(price for *_, price in wanted), (shape, have, need)
        chain = chains.chain(shape, have, need)
        assert [hop[:3] for hop in chain] == wanted, (shape, have, need)
    assert len(chains.classes) < pairs  # some pairs share a class


def test_equal_states_need_no_transfer() -> None:
    chains, state = Chains(Mesh(a=2), SLOW), (DistAttr.split("a", None), f32)
    assert chains.nanoseconds((4, 4), state, state) == 0
    assert chains.chain((4, 4), state, state) == ()
