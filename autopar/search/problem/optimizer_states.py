"""Choose the layout of the optimizer's state of each parameter, so that all stages of ZeRO are plans of one search.

A parameter, the sum of its gradients and its state have layouts of their own. A stage of ZeRO links them:

    w : f32[64 32]      w_grad : f32[64 32] +dp      state f32[64 32]          0
    w : f32[64 32]      w_grad : f32[64 32] +dp      state f32[64/dp 32]       1
    w : f32[64 32]      w_grad : f32[64/dp 32]       state f32[64/dp 32]       2
    w : f32[64/dp 32]   w_grad : f32[64/dp 32]       state f32[64/dp 32]       3, where the uses of w gather it

Each parameter may have another stage. The update runs on the pieces of the state, so the axes that split the parameter
or the sum split the state, too; and if no further ones do, the state is as the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import fx

from autopar.ir.dtensor import edge_of
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import Mesh
from autopar.ir.nodes import name_of, tensor_type
from autopar.ir.record import TensorType
from autopar.plan.batch import split_over
from autopar.search.problem.ending import Ending
from autopar.search.problem.problem import Problem
from autopar.search.problem.strategies import homes
from autopar.search.transfer_prices.least_chains import AnyChains


def layouts_of_state(shape: tuple[int, ...], own: Sequence[DistAttr], mesh: Mesh) -> list[DistAttr]:
    """Return the layouts that the optimizer's state of a parameter may have: what DTensor can express.

    Args:
        own: the homes that the parameter may have. They are among the layouts, also sharded over one more axis, as the
            stages of ZeRO shard them.
    """
    sharded = (edge_of(split_over(attr, shape, mesh, axis), mesh, shape, strided=True) for attr in own
               for axis in mesh.names)  # fmt: skip
    return list(dict.fromkeys((*homes(shape, mesh), *own, *sharded)))


def follows_home(homes: Sequence[DistAttr], layouts: Sequence[DistAttr]) -> np.ndarray:
    """Return whether a state may have each layout beside each home of its parameter: [homes, layouts]."""
    return np.array([[s == home or set(s.axes) > set(home.axes) for s in layouts] for home in homes])


def follows_sum(layouts: Sequence[DistAttr], sums: Sequence[DistAttr]) -> np.ndarray:
    """Return whether a state may have each layout beside each layout of the sum: [layouts, sums]."""
    split = [{axis for dim in attr.dims for _, axes in dim for axis in axes} for attr in sums]
    return np.array([[axes <= set(layout.axes) for axes in split] for layout in layouts])


def cheapest_states(problem: Problem, states: np.ndarray) -> np.ndarray:
    """Return an assignment in which the optimizer's states are the cheapest for the homes and sums that it has.

    Of equally cheap ones, the state is as the parameter, which is the lowest stage of ZeRO.
    """
    found, known = states.copy(), dict[object, int]()
    for parameter, state in problem.chosen_states.items():
        (home, own), (sum_, summed) = (_home(problem, node, states) for node in (parameter, state.sum))
        assert problem.ending is not None
        name = name_of(parameter)
        key = (id(problem.ending.updates.get(name)), problem.ending.kept.get(name), home, own, sum_, summed)
        if key not in known:
            known[key] = cheapest_state(problem, name, own, home, sum_, summed.dtype, state.layouts)
        found[state.variable] = known[key]
    return found


def cheapest_state(
    problem: Problem, name: str, type: TensorType, home: DistAttr, sum_: DistAttr, summed: torch.dtype,
    layouts: Sequence[DistAttr],
) -> int:  # fmt: skip
    """Return which of some layouts of its state is the cheapest for a parameter.

    Args:
        name: of the parameter.
        home, sum_: the layouts of the parameter and of the sum of its gradients.
        summed: the dtype of the sum.
    """
    ending, chains = problem.ending, problem.chains
    assert ending is not None
    costs = prices_of_states(ending, chains, name, type, [home], [sum_], summed, layouts, chains.impossible)[0, :, 0]
    fitting = np.flatnonzero(costs == costs.min()).tolist()
    return next((k for k in fitting if layouts[k] == home), fitting[0])


def prices_of_states(
    ending: Ending, chains: AnyChains, name: str, type: TensorType, homes: Sequence[DistAttr],
    sums: Sequence[DistAttr], summed: torch.dtype, layouts: Sequence[DistAttr], impossible: float,
) -> np.ndarray:  # fmt: skip
    """Return the nanoseconds of the update of a parameter: [homes, layouts of its state, sums].

    Args:
        chains: with ``LeastChains`` the nanoseconds are a bound.
        impossible: the nanoseconds where a state may not have a layout.
    """
    updated = ending.updated(chains, name, type, layouts, sums, summed)
    updated = np.where(follows_sum(layouts, sums), updated, impossible)
    moved = ending.moved(chains, name, type, homes, layouts)
    moved = np.where(follows_home(homes, layouts), moved, impossible)
    return moved[:, :, None] + updated[None]


def chosen_layouts(problem: Problem, states: np.ndarray) -> dict[str, DistAttr]:
    """Return the layout of the optimizer's state of each parameter for which it was chosen, by the user's names."""
    return {name_of(node): state.layouts[states[state.variable]] for node, state in problem.chosen_states.items()}


def _home(problem: Problem, node: fx.Node, states: np.ndarray) -> tuple[DistAttr, TensorType]:
    variable = problem.variables[node]
    return problem.homes[variable][states[variable]], tensor_type(node)
