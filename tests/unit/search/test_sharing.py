"""What the pairs of home and alternate charge for a few uses, beside the union of the transfers of these uses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from random_states import random_state
from searched import MACHINES, SLOW

from autopar import Mesh
from autopar.ir.layout import DistAttr
from autopar.search.transfer_prices.chains import Chain, Chains, State
from autopar.search.transfer_prices.heads import heads_of
from autopar.search.transfer_prices.once import once
from autopar.search.transfer_prices.sharing import Path, Use, alternates, charges, path_of, union
from autopar.search.transfer_prices.trees import Tree, tree_of

MESH = Mesh(a=2, b=2)
SHAPES = [(4, 8), (6, 5), (16,), (2, 4, 4)]
DTYPES = (torch.float32, torch.float32, torch.bfloat16)


class Drawn(NamedTuple):
    """Homes and uses of a value, and the transfers before a use: ``path(home, state, number of the use)``."""

    homes: list[State]
    needs: list[State]
    uses: list[Use]
    computed: bool
    path: Callable[[State, State, int], Path]
    tree: Tree


def drawn(seed: int, count: int) -> Drawn:
    """A value, each use of which needs some states, in one phase or two."""
    draw = random.Random(seed)
    chains = Chains(MESH, MACHINES[seed % len(MACHINES)])
    shape = draw.choice(SHAPES)
    homes = list(dict.fromkeys(random_state(draw, shape, MESH, DTYPES, pending=0.4) for _ in range(4)))
    needs = list(dict.fromkeys([random_state(draw, shape, MESH, DTYPES, pending=0.1) for _ in range(6)] + homes[:1]))
    uses = [
        Use(
            np.array(draw.sample(range(len(needs)), min(4, len(needs)))),
            draw.choice(["forward", "backward"]),
            draw.random() < 0.3,
        )
        for _ in range(count)
    ]
    computed = draw.random() < 0.7

    def path(have: State, need: State, use: int) -> Path:
        chain = chains.chain(shape, have, need)
        return path_of(chain, uses[use].phase, computed=computed, turning=uses[use].turning)

    tree = tree_of([[chains.chain(shape, home, need) for need in needs] for home in homes])
    return Drawn(homes, needs, uses, computed, path, tree)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_cheapest_pair_pays_for_each_transfer_once(count: int) -> None:
    shared = 0
    for seed in range(20):
        homes, needs, uses, computed, path, tree = drawn(seed, count)
        made = alternates(tree, uses, computed=computed)
        for number, home in enumerate(homes):
            pairs = np.nonzero(made.home == number)[0]
            for states in itertools.product(*(range(len(use.states)) for use in uses)):
                total = made.paid[pairs].copy()
                for rest, state in zip(made.rest, states, strict=True):
                    total += rest[pairs, state]
                paths = [path(home, needs[use.states[states[k]]], k) for k, use in enumerate(uses)]
                assert total.min() == union(paths), (seed, home, states)
                shared += union(paths) < sum(union([steps]) for steps in paths)
    assert (shared > 0) == (count > 1)


@pytest.mark.parametrize("parts", [2, 3])
def test_fractions_of_prices_never_charge_more_than_the_union(parts: int) -> None:
    """Of the uses of one value in groups, each charges its fraction: together they charge no more than all uses."""
    for seed in range(12):
        homes, needs, uses, computed, path, tree = drawn(seed, 3)
        made = alternates(tree, uses, 1 / parts, 1 / parts / 2, computed=computed)
        for number, home in enumerate(homes):
            pairs = np.nonzero(made.home == number)[0]
            for states in itertools.product(*(range(len(use.states)) for use in uses)):
                total = made.paid[pairs] + sum(rest[pairs, s] for rest, s in zip(made.rest, states, strict=True))
                paths = [path(home, needs[use.states[states[k]]], k) for k, use in enumerate(uses)]
                assert total.min() <= union(paths) / parts, (seed, home, states)
                if not union(paths):
                    assert total.min() == 0
                elif not any(not step.phase for steps in paths for step in steps):
                    assert total.min() == pytest.approx(union(paths) / parts, rel=1e-5)


def test_the_charges_of_a_use_are_those_of_its_path() -> None:
    some = 0
    for seed in range(12):
        homes, needs, uses, computed, path, tree = drawn(seed, 1)
        (use,) = uses
        charged = charges(tree, use, 1.0, 0.5, computed=computed)
        for (h, home), (k, state) in itertools.product(enumerate(homes), enumerate(use.states)):
            steps = path(home, needs[state], 0)
            own = sum(step.nanoseconds for step in steps if step.phase)
            kept = sum(step.nanoseconds for step in steps if not step.phase)
            assert charged[h, k] == own + kept / 2
            some += kept > 0 < own
    assert some


def test_a_reduction_is_shared_by_all_phases_and_a_gather_is_not() -> None:
    """A sum over a is reduced, and then gathered over b, in the forward and in the backward."""
    chains, shape = Chains(MESH, SLOW), (64, 64)
    home = DistAttr.split("b", None, pending=["a"]), torch.float32
    whole, reduced = (DistAttr.replicated(2), torch.float32), (DistAttr.split("b", None), torch.float32)
    chain = chains.chain(shape, home, whole)
    prices = [hop.nanoseconds for hop in chain]
    paths = [path_of(chain, phase) for phase in ("forward", "backward")]
    assert [hop.state for hop in chain] == [reduced, whole]
    assert [step.phase for step in paths[0]] == ["", "forward"]
    assert union(paths) == prices[0] + 2 * prices[1]
    assert union([paths[0], paths[0]]) == sum(prices)


@pytest.mark.parametrize("count", [2, 3])
def test_heads_charge_no_more_than_one_reduction_and_mostly_as_much(count: int) -> None:
    """``once`` has the price of all transfers; what another use of a value might need makes heads cheaper at times."""
    less = more = conflicts = 0
    for seed in range(14):
        draw, chains, shape = random.Random(seed), Chains(MESH, MACHINES[seed % len(MACHINES)]), SHAPES[seed % 2]
        find = partial(chains.chain, shape)
        homes = [random_state(draw, shape, MESH, DTYPES[:1], pending=0.8) for _ in range(3)]
        homes = [home for home in dict.fromkeys(homes) if home[0].pending]
        needs = list(dict.fromkeys([random_state(draw, shape, MESH, DTYPES, pending=0.1) for _ in range(5)] + homes))
        phases = [draw.choice(["forward", "backward"]) for _ in range(count)]
        heads = heads_of(find, homes, [needs] * count, ())
        uses = [Use(np.arange(len(needs)), phase) for phase in phases]
        made, ways = alternates(tree_of(heads.chains(find, needs)), uses), heads.table(1.0, 2.0**40)
        waits = np.array([[head.waits.get(need, 0.0) for need in needs] for head in heads.heads])[made.home]
        for number, home in enumerate(homes):
            for states in itertools.product(range(len(needs)), repeat=count):
                rest = sum(table[:, s] + waits[:, s] for table, s in zip(made.rest, states, strict=True))
                charged = (ways[number, made.home] + made.paid + rest).min()

                def price(found: Sequence[Chain], phases: Sequence[str] = phases) -> int:
                    return union([path_of(chain, phase) for chain, phase in zip(found, phases, strict=True)])

                wanted = price(once(find, home, [needs[s] for s in states], price))
                conflicts += wanted != price([find(home, needs[s]) for s in states])
                more += charged > wanted
                less += charged < wanted
    assert more == 0 and conflicts > 100 and less < conflicts / 10, (more, less, conflicts)
