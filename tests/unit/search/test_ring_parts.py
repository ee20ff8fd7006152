"""The parts of a graph with long runs: what they cost together, their rows, and their products."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from factor_graphs import Case, Model, all_costs, assignments, cases, chain_of, dense_cases, models
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.search.solver import parts, spans
from autopar.search.solver.exact import TooManyRows, rows_of
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.solver.fold import Folded, rings_of
from autopar.search.solver.message_passing import MessagePassing
from autopar.search.solver.parts import Part, TooManyStates, spread_rows
from autopar.search.solver.periodic import Best, Periodic
from autopar.search.solver.reduced import Reduced
from autopar.search.solver.spans import Span
from autopar.search.solver.tied import Ends, Piece, TiedRing, border, shares


def passed(graph: FactorGraph, passes: int = 5) -> MessagePassing:
    passing = MessagePassing(graph, range(len(graph.costs)), range(len(graph.costs)))
    passing.run(passes)
    return passing


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(models(), st.integers(1, 12), st.integers(0, 99))
def test_parts_cost_together_what_the_graph_costs(model: Model, passes: int, seed: int) -> None:
    """Each block of the ring as often as it stands in its run, for assignments that repeat."""
    rings = rings_of(model.graph, model.labels)
    assume(rings)
    reduced = Reduced(Folded(model.graph, rings))
    order = range(len(reduced.folded.variables))
    passing = MessagePassing(reduced.weighted, reduced.left, order)
    passing.run(passes)
    given_shares = shares(passing, reduced)
    tied = [TiedRing(reduced, ring, given_shares, order) for ring in rings]
    ends = Ends(reduced, tied, given_shares, order)
    number, pieces = reduced.folded.number, [ring.pieces() for ring in tied]
    for states in assignments(reduced.graph, seed, 4):
        states = reduced.eliminated.completed(states)
        beside = {own: states[v] for v, own in ends.own.items()}
        for ring, (before, after) in zip(tied, ends.borders, strict=True):
            low, up = ring.border
            first, last = ring.blocks[0], ring.blocks[-1]
            beside |= dict(
                zip(
                    [*before, *after],
                    [
                        *(states[number[ring.ring.before[p]]] for p in low),
                        *(states[first[q]] for q in up),
                        *(states[last[p]] for p in low),
                        *(states[number[ring.ring.after[q]]] for q in up),
                    ],
                    strict=True,
                )
            )
        total = reduced.constant + energy(ends.passing.graph, beside)
        for ring, own in zip(tied, pieces, strict=True):
            last = len(ring.ring.blocks) - 1
            total += sum(piece_energy(ring, own, k, states, number, k == 0, k == last) for k in range(last + 1))
        assert total == pytest.approx(model.graph.energy(reduced.folded.extended(states)), abs=1e-3)


def piece_energy(
    ring: TiedRing, pieces: list[Piece], k: int, states: Array, number: dict[int, int], first: bool, last: bool
) -> float:
    """The cost of one block, whose neighbours are those of the ring or, at its ends, those beside the run."""
    period = ring.ring.period
    piece = pieces[k % period]
    low, up = ring.border
    before = [number[v] for v in ring.ring.before] if first else ring.blocks[k % period - 1]
    after = [number[v] for v in ring.ring.after] if last else ring.blocks[(k + 1) % period]
    own = {own: states[v] for own, v in enumerate(piece.own)}
    own |= {mine: states[v] for v, mine in piece.outside.items()}
    own |= dict(zip(piece.before, [states[before[p]] for p in low], strict=False))
    own |= dict(zip(piece.after[len(low) :], [states[after[q]] for q in up], strict=True))
    return energy(piece.passing.graph, own)


def energy(graph: FactorGraph, states: dict[int, int]) -> float:
    return graph.energy(np.array([states[v] for v in range(len(graph.costs))]))


@settings(deadline=None, max_examples=20)
@given(models())
def test_no_variable_is_on_both_borders_of_its_block(model: Model) -> None:
    for ring in rings_of(model.graph, model.labels):
        found = border(model.graph, ring.blocks[0], ring.crossings)
        assert not set(found.lower) & set(found.upper)
        assert all(p in found.lower or q in found.upper for p, q, _ in ring.crossings)


@pytest.mark.simulated
@settings(deadline=None, max_examples=40)
@given(st.one_of(cases(5), dense_cases(5)), st.data())
def test_a_part_has_the_least_costs_up_to_the_slack(case: Case, data: st.DataObject) -> None:
    count = case.costs.ndim
    shared = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    passing = passed(case.graph, data.draw(st.integers(1, 5)))
    slack = data.draw(st.sampled_from([0, 1, 10, 300, 3000]))
    allowed = {v: np.arange(data.draw(st.integers(1, case.costs.shape[v]))) for v in shared[:2]}
    costs = case.costs - passing.bound
    for v, states in allowed.items():
        costs = np.take(costs, states, axis=v)
    least = costs.min(axis=tuple(v for v in range(count) if v not in shared))
    inorder = least.transpose([sorted(shared).index(v) for v in shared])
    part = Part(passing, shared, slack, allowed)
    found = {tuple(states): cost for states, cost in zip(part.rows.states.tolist(), part.rows.costs, strict=True)}
    assert len(found) == len(part.rows.costs)
    assert found == {states: inorder[states] for states in np.ndindex(inorder.shape) if inorder[states] <= slack}
    for states, cost in found.items():
        full = part.completed(states)
        assert tuple(full[passing.variables.index(v)] for v in shared) == states
        assert case.costs[tuple(full[passing.variables.index(v)] for v in range(count))] - passing.bound == cost


def test_a_part_of_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_STATES", 2)
    graph = FactorGraph()
    for _ in range(2):
        graph.add_variable("x", [0, 1])
    with pytest.raises(TooManyStates):
        Part(passed(graph), [], 5)
    assert len(Part(passed(graph), [0], 0).rows.costs) == 1


def test_columns_that_become_one_agree() -> None:
    rows = rows_of((0, 1), np.array([[0, 0], [0, 1], [2, 2]], dtype=np.int32), np.array([1.0, 2.0, 3.0]))
    found = spread_rows(rows, [4, 4])
    assert (found.variables, found.states.tolist(), found.costs.tolist()) == ((4,), [[0], [2]], [1.0, 3.0])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([0.0, 3.0, 40.0]))
def test_spans_are_products(seed: int, count: int, slack: float) -> None:
    """Of matrices, with the state of an outer variable given; and they tell the states on all borders."""
    rng = np.random.default_rng(seed)
    matrices = rng.integers(0, 9, (count, 3, 3, 2)).astype(float)  # before, after, outside
    grid = np.indices((3, 3, 2), dtype=np.int32).reshape(3, -1).T
    span = None
    for matrix in matrices:
        one = Span(rows_of((0, 1, 2), grid, matrix.reshape(-1)), 1)
        span = one if span is None else span.followed_by(one, slack)
    assert span is not None and span.count == count
    total = matrices[0]
    for matrix in matrices[1:]:
        total = (total[:, :, None] + matrix[None]).min(axis=1)
    least = sum(matrix.min() for matrix in matrices)
    found = dict(zip(map(tuple, span.rows.states.tolist()), span.rows.costs + span.least, strict=True))
    for states in np.ndindex(total.shape):
        if total[states] <= least + slack:
            assert found[states] == total[states]
    for states, cost in found.items():
        blocks = span.blocks(states)
        assert [blocks[0][0], blocks[-1][1]] == [*states[:2]]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
        assert sum(matrices[k][block] for k, block in enumerate(blocks)) == cost >= total[states]


def test_spans_without_rows_have_no_products() -> None:
    empty = Span(spans.NO_ROWS, 1)
    assert not empty.feasible
    assert not empty.followed_by(empty, 5).feasible


@pytest.mark.long
@settings(deadline=None, max_examples=20)
@given(models(), st.integers(1, 20))
def test_the_bound_of_the_parts_is_below_the_least_cost(model: Model, passes: int) -> None:
    rings = rings_of(model.graph, model.labels)
    assume(rings)
    reduced = Reduced(Folded(model.graph, rings))
    order = range(len(reduced.folded.variables))
    passing = MessagePassing(reduced.weighted, reduced.left, order)
    passing.run(passes)
    periodic, best = Periodic(reduced, passing, order), Best(model.graph)
    first = periodic.bound
    periodic.solve(best, np.inf)
    assert first <= periodic.bound == best.cost == model.graph.energy(best.states)


def test_the_best_assignment_is_kept() -> None:
    graph = FactorGraph()
    graph.add_variable("x", [2, 1, 3])
    best = Best(graph)
    for state in (2, 1, 0):
        best.offer(np.array([state]))
    assert (best.cost, best.states.tolist()) == (1, [1])
    assert all_costs(graph).min() == 1


@pytest.mark.parametrize("times", [0.5, 4, 40])
@pytest.mark.parametrize("too_many", [False, True])
def test_a_near_answer_is_looked_at_at_once(times: float, too_many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slack grows if the best answer is many times as far above the bound, or if there are too many near it."""
    chain = chain_of(5, 40, 3)
    folded = Folded(chain.graph, rings_of(chain.graph, chain.labels))
    reduced, order = Reduced(folded), range(len(folded.variables))
    passing = MessagePassing(reduced.weighted, reduced.left, order)
    passing.run(1)
    best, first = Best(chain.graph), Best(chain.graph)
    Periodic(reduced, passing, order).solve(best, np.inf)
    first.offer(best.states)
    again, looked = Periodic(reduced, passing, order), []
    gap = best.cost - again.bound
    assert gap > 0
    again._slack = gap / times
    look = again._look

    def counting(slack: float) -> Array | None:
        looked.append(slack)
        if too_many and len(looked) == 1:
            raise TooManyRows
        return look(slack)

    monkeypatch.setattr(again, "_look", counting)
    again.solve(first, np.inf)
    if times == 4:
        assert looked[0] == gap and len(looked) == (4 if too_many else 1)
    if times == 40:
        assert looked[0] == gap / 40 and len(looked) == (1 if too_many else 3)
    assert (again.bound == best.cost) is (not too_many or times == 4)
