"""Solve a factor graph with HiGHS: its linear relaxation (the local polytope), or the least cost of all assignments."""

from __future__ import annotations

import itertools

import highspy
import numpy as np

from autopar.search.problem.build import LEAST_PENALTY
from autopar.search.solver.factor_graph import FactorGraph

Array = np.ndarray


class _Rows:
    """Collects the rows of a sparse matrix: equations between sums of columns."""

    def __init__(self) -> None:
        self.starts, self.columns, self.factors, self.values = [0], list[int](), list[float](), list[float]()

    def add(self, columns: Array, factors: Array | float, value: float) -> None:
        self.columns.extend(columns.tolist())
        self.factors.extend(np.broadcast_to(factors, columns.shape).tolist())
        self.starts.append(len(self.columns))
        self.values.append(value)


def least_cost(graph: FactorGraph, *, whole: bool) -> float:
    """Return the least cost of a factor graph in nanoseconds, as HiGHS finds it.

    A column x[i, s] says that variable i has state s, a column y[e, l, r] that the pair of an edge has the numbers l
    and r. Sums of y over one side are the x of the other side (Schlesinger's relaxation). What is forbidden is 0.

    Args:
        whole: ask for whole numbers: then it is the least cost of all assignments, else a bound below it.
    """
    costs, rows = [np.concatenate(graph.costs)], _Rows()
    first = np.concatenate([[0], np.cumsum([len(each) for each in graph.costs])])
    for begin, end in itertools.pairwise(first.tolist()):
        rows.add(np.arange(begin, end), 1.0, 1.0)
    count = int(first[-1])
    for (i, j), (left, right, table) in graph.edges.items():
        pairs = count + np.arange(table.size).reshape(table.shape)
        for own, numbers, sides in ((i, left, pairs), (j, right, pairs.T)):
            for number, side in enumerate(sides):
                states = first[own] + np.flatnonzero(numbers == number)
                rows.add(np.concatenate([states, side]), np.repeat([1.0, -1.0], [len(states), len(side)]), 0.0)
        costs.append(table.reshape(-1))
        count += table.size
    return _solve(np.concatenate(costs), rows, int(first[-1]) if whole else 0)


def _solve(costs: Array, rows: _Rows, whole: int) -> float:
    """Minimise the cost of columns between 0 and 1; the first ones are whole numbers."""
    allowed = costs < LEAST_PENALTY
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), len(rows.values)
    model.col_cost_ = np.where(allowed, costs, 0.0) * 1e-3  # microseconds: HiGHS has absolute tolerances
    model.col_lower_, model.col_upper_ = np.zeros(len(costs)), allowed.astype(np.float64)
    model.row_lower_ = model.row_upper_ = np.array(rows.values)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = rows.starts, rows.columns, rows.factors
    if whole:
        kinds = [highspy.HighsVarType.kInteger] * whole + [highspy.HighsVarType.kContinuous] * (len(costs) - whole)
        model.integrality_ = kinds
    solver = highspy.Highs()
    solver.silent()
    for name, value in (("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-6)):
        solver.setOptionValue(name, value)
    solver.passModel(model)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal, solver.getModelStatus()
    return float(solver.getInfo().objective_function_value * 1e3)
