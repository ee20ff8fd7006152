"""Graphs with long runs that are solved again, where some variables have other costs."""

from __future__ import annotations

import numpy as np
import pytest
from factor_graphs import Chain, Model, chain_of, least_cost, models
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.search.solver import parts, settled
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.settled import Settled
from autopar.search.solver.solver import Answer, solve


def solved(graph: FactorGraph, labels: list[str]) -> tuple[Answer, Settled]:
    answer = solve(graph, range(len(labels)), labels)
    assert answer.exact and answer.settled is not None
    return answer, answer.settled


def changed(graph: FactorGraph, costs: dict[int, Array]) -> FactorGraph:
    """Return the graph with further costs of some variables; equal ones are one array."""
    own = [graph.intern(known + costs[v]) if v in costs else known for v, known in enumerate(graph.costs)]
    return FactorGraph(graph.intern, own, graph.names, graph.edges)


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(models(), st.data())
def test_it_is_the_least_cost_with_its_proof(model: Model, data: st.DataObject) -> None:
    graph, labels = model
    answer = solve(graph, range(len(labels)), labels)
    assume(answer.settled is not None)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    more: dict[int, Array] = {}
    for _ in range(data.draw(st.integers(1, 3))):
        v = int(rng.integers(len(labels)))
        where, name = labels[v].rpartition(".")[0], graph.names[v].rpartition(".")[2]
        alike = [
            u for u in range(len(labels)) if where and labels[u].startswith(where) and graph.names[u].endswith(name)
        ]
        costs = rng.choice([0.0, 1.0, 3.0, 2.0**20, -1.0], len(graph.costs[v]))
        for u in alike if where and rng.random() < 0.4 else [v]:
            if len(graph.costs[u]) == len(costs):
                more[u] = costs
    other = changed(graph, more)
    again = solve(other, range(len(labels)), labels, settled=answer.settled)
    assert again.cost == other.energy(again.states) == least_cost(other)
    assert again.bound <= again.cost
    found = answer.settled.again(other, np.inf)
    if found is not None:
        assert found[0].cost == found[1] == again.cost


def chain() -> Chain:
    return chain_of(5, 40, 3)


@pytest.mark.parametrize("where", ["one block", "all blocks", "outside", "two blocks"])
def test_little_is_passed_and_solved_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, labels, blocks = chain()
    passes: list[int] = []
    run = MessagePassing.run
    monkeypatch.setattr(
        MessagePassing, "run", lambda own, count: (passes.append(count * len(own.links)), run(own, count))[1]
    )
    _, before = solved(graph, labels)
    first = sum(passes)
    at = {"one block": [blocks[17][1]], "all blocks": [block[1] for block in blocks], "outside": [0],
          "two blocks": [blocks[4][1], blocks[21][1]]}[where]  # fmt: skip
    costs = np.array([50.0, 0.0] if where == "outside" else [0.0, 7.0, 50.0])
    other = changed(graph, dict.fromkeys(at, costs))
    passes.clear()
    found = before.again(other, np.inf)
    assert found is not None and found[0].cost == found[1] == least_cost(other)
    assert sum(passes) < first / 2


def test_a_part_that_holds_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block that differs, only its own part is made; with the same costs again, none is."""
    graph, labels, blocks = chain()
    _, before = solved(graph, labels)
    made = []
    part = parts.Part.__init__
    monkeypatch.setattr(parts.Part, "__init__", lambda own, *rest: (made.append(own), part(own, *rest))[1])
    assert before.again(changed(graph, {}), np.inf) is not None
    assert not made
    assert before.again(changed(graph, {blocks[17][1]: np.array([0.0, 0.0, 50.0])}), np.inf) is not None
    assert len(made) <= 2


def test_blocks_of_many_kinds_are_solved_as_a_whole() -> None:
    graph, labels, blocks = chain()
    _, before = solved(graph, labels)
    more = {blocks[k][1]: np.array([0.0, float(k), 0.0]) for k in range(3, 4 + settled.MOST)}
    other = changed(graph, more)
    assert before.again(other, np.inf) is None
    assert solve(other, range(len(labels)), labels, settled=before).cost == least_cost(other)


def test_a_graph_of_other_edges_is_solved_as_a_whole() -> None:
    graph, labels, _ = chain()
    _, before = solved(graph, labels)
    other = chain_of(6, 40, 3).graph
    assert before.again(other, np.inf) is None
    assert solve(other, range(len(labels)), labels, settled=before).cost == least_cost(other)
