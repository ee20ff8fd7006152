"""Leave out of a problem the states that are unlikely in its cheapest plan, before its transfers are priced.

On a mesh of three axes ops have hundreds of strategies, and pairs of them millions of transfers. The outline of such a
problem is solved first: its bound holds for all plans. The states of its answer are kept, and of each variable a few
others that cost least beside that answer. Only their transfers are priced exactly. Where this proves nothing and there
are not too many pairs, all states are kept in a second round that a plan may have which is cheaper than the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.ir.nodes import name_of, tensor_type
from autopar.plan.boundary import Boundary
from autopar.search.problem.ending import Ending
from autopar.search.problem.optimizer_states import prices_of_states
from autopar.search.problem.outline import Outline, Tie
from autopar.search.problem.problem import Problem
from autopar.search.solver.factor_graph import Array
from autopar.search.solver.fold import Folded, rings_of
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.pruning import affordable
from autopar.search.solver.solver import solve
from autopar.search.transfer_prices.least_chains import LeastChains

AXES = 3  # of a mesh, from which on problems are narrowed
PAIRS = 50_000  # of layouts between which values may move; problems with fewer stay whole
FEW = 500_000  # of these pairs, up to which an answer that is not proven is looked for again
STATES = 8  # of each variable that are kept
PASSES = 40  # of messages, which tell what states cost at least


def is_wide(problem: Problem) -> bool:
    """Return whether a problem has so many pairs of states that it should be narrowed.

    There are bounds for axes whose sizes are powers of two.
    """
    sizes = [size for _, size in problem.mesh.axes if size > 1]
    if len(sizes) < AXES or any(size & (size - 1) for size in sizes):
        return False
    return pairs_of(problem) > PAIRS


def pairs_of(problem: Problem) -> int:
    """Return the number of pairs of states between which values may move."""
    return sum(len(value.states) * len(r.states) for value in problem.values.values() for r in value.readers)


def narrow(
    problem: Problem, boundary: Boundary, ending: Ending | None, ties: Mapping[fx.Node, Array],
    allowed: Mapping[int, Array], deadline: float, cheaper: float | None,
) -> None:  # fmt: skip
    """Leave only some states of each variable of a problem, and set its ``floor``.

    Args:
        ties: tangent → its state for each state of the value that is returned in its layout.
        allowed: variable → which of its states constraints allow.
        deadline: of ``time.monotonic``, for the outline's answer.
        cheaper: nanoseconds; keep all states that a plan may have which costs less. ``None``: keep few.
    """
    tied = {node: Tie(problem.value(boundary.tangents[node]).variable, problem.variables[node], equal)
            for node, equal in ties.items()}  # fmt: skip
    outline = Outline(problem, list(tied.values()))
    for variable, fits in allowed.items():
        outline.add_costs(variable, np.where(fits, 0.0, float(problem.chains.impossible)))
    if ending is not None:
        _end(outline, boundary, ending)
    if cheaper is None:
        answer = solve(outline.graph, outline.order, outline.labels, deadline)
        problem.floor, kept = answer.bound, _few(outline, answer.states)
    else:
        problem.floor, kept = cheaper, _cheaper(outline, cheaper)
    for variable, fits in allowed.items():
        some = kept[variable][fits[kept[variable]]]
        kept[variable] = some if len(some) else np.nonzero(fits)[0]
    for tie in tied.values():
        kept[tie.other] = np.unique(tie.equal[kept[tie.variable]])
    _leave(problem, kept)


def _end(outline: Outline, boundary: Boundary, ending: Ending) -> None:
    """Add bounds of the prices of the update to an outline, as ``build`` adds the prices."""
    problem, chains = outline.problem, LeastChains(outline.problem.mesh, outline.problem.chains.machine)
    for sum_, parameter in boundary.sums.items():
        variable, type = problem.variables[sum_], tensor_type(sum_)
        sums = problem.homes[variable]
        if parameter is None:
            outline.add_costs(variable, ending.of_loss(chains, type, sums) / ending.microbatches)
        else:
            home, own = problem.variables[parameter], tensor_type(parameter)
            homes = problem.homes[home]
            name, chosen = name_of(parameter), problem.chosen_states.get(parameter)
            if chosen is None:
                table = ending.nanoseconds(chains, name, own, homes, sums, type.dtype)
            else:  # the cheapest layout of its state, of those that problem.graph lets it have
                dear = problem.chains.impossible * ending.microbatches
                prices = prices_of_states(ending, chains, name, own, homes, sums, type.dtype, chosen.layouts, dear)
                table = prices.min(axis=1)
            outline.add_pair(home, variable, table / ending.microbatches)


def _cheaper(outline: Outline, below: float) -> list[Array]:
    """Return the states of each variable that a plan which costs less may have."""
    passing = MessagePassing(outline.graph, range(len(outline.order)), outline.order)
    passing.run(PASSES)
    place = {variable: k for k, variable in enumerate(passing.variables)}
    states = affordable(passing, below - passing.bound)
    return [np.nonzero(np.isin(own, states[place[v]]))[0] for v, own in enumerate(outline.states)]


def _few(outline: Outline, answer: Array) -> list[Array]:
    """Return the states of each variable that are kept; equal blocks keep equal ones."""
    folded = Folded(outline.graph, rings_of(outline.graph, outline.labels))
    graph, first = folded.graph, answer[folded.variables]
    order = [outline.order[v] for v in folded.variables]
    passing = MessagePassing(graph, range(len(order)), order)
    passing.run(PASSES)
    beside = [costs.copy() for costs in graph.costs]  # what a state costs where all others are those of the answer
    for (i, j), edge in graph.edges.items():
        beside[i] += edge.table[edge.left, edge.right[first[j]]]
        beside[j] += edge.table[edge.left[first[i]], edge.right]
    score = [costs - costs.min() for costs in beside]
    for place, variable in enumerate(passing.variables):
        total = passing.collected(place)
        score[variable] += total - total.min()
    for variable, state in enumerate(answer.tolist()):
        score[folded.number[variable]][state] = -1.0
    best = [np.argsort(each, kind="stable")[: max(STATES, int((each < 0).sum()))] for each in score]
    return [np.nonzero(np.isin(states, best[folded.number[v]]))[0] for v, states in enumerate(outline.states)]


def _leave(problem: Problem, kept: Sequence[Array]) -> None:
    """Leave only some states of each variable."""
    graph, chosen = problem.graph, [states.tolist() for states in kept]
    pick = lambda things, variable: [things[k] for k in chosen[variable]]  # noqa: E731
    fewer: dict[object, list] = {}

    def of_op(variable: int) -> list:
        """Equal ops share one list of strategies."""
        key = id(problem.placed[variable]), tuple(chosen[variable])
        if key not in fewer:
            fewer[key] = pick(problem.placed[variable], variable)
        return fewer[key]

    for variable, states in enumerate(kept):
        graph.costs[variable] = graph.intern(graph.costs[variable][states])
        if variable in problem.prices:
            problem.prices[variable] = problem.prices[variable][states]
    problem.placed = {variable: of_op(variable) for variable in problem.placed}
    problem.homes = {variable: pick(homes, variable) for variable, homes in problem.homes.items()}
    for value in problem.values.values():
        value.states = tuple(pick(value.states, value.variable)) if value.states else ()
        readers = [replace(reader, states=tuple(pick(reader.states, reader.variable))) for reader in value.readers]
        value.readers[:] = dict.fromkeys(readers)
    problem.results[:] = [
        (value, home, tuple(pick(own, value.variable)) if own else (), dtype)
        for value, home, own, dtype in problem.results
    ]
