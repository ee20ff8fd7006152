"""Wrong searches, which the oracles must catch: each test breaks one part, and then an oracle fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from search_oracle import check
from searched import MACHINES, MESHES, traced

import autopar
from autopar import Mesh, Program
from autopar.plan.boundary import Boundary
from autopar.rules.strategies import Bound
from autopar.search.problem import build, payments, strategies
from autopar.search.problem.strategies import Placed
from autopar.search.search import search
from autopar.search.solver.factor_graph import Array, FactorGraph
from autopar.search.transfer_prices.sharing import Alternates

SLOW, TWO = MACHINES[0], MESHES[0]

SUM = """
  x : f32[256 256] = input
forward:
  e : f32[256 256] = exp(x)
  s : f32[] = sum.dim_IntList(e, [0, 1])
  return (s)
"""
SUM_BY_HAND = """program explicit on a=2
  x : f32[256/a 256] = input
forward:
  e : f32[256/a 256] = exp(x)
  s : f32[] +a = sum.dim_IntList(e, [0, 1])
  s_a : f32[] = all_reduce(s, a)
  return (s_a)
"""
SHARED = """
  x : f32[256 256] = input
forward:
  s : f32[] = sum.dim_IntList(x, [0, 1])
  e : f32[] = exp(s)
  return (s, e)
"""
CHAIN = """
  x : f32[256 256] = input
forward:
  s : f32[] = sum.dim_IntList(x, [0, 1])
  e : f32[] = exp(s)
  return (e)
"""


def least_of_sum() -> float:
    return search(Boundary(traced(SUM), TWO), SLOW).least


def test_the_bound_is_below_a_program_by_hand() -> None:
    """This oracle does not use our list of strategies."""
    assert least_of_sum() <= autopar.price(Program.parse(SUM_BY_HAND), SLOW).nanoseconds


def test_a_pending_sum_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_pending(bound: Bound, mesh: Mesh, parts: Any) -> list[Placed]:
        return [
            p for p in strategies.strategies(bound, mesh, parts) if not any(give and give.pending for give in p.gives)
        ]

    monkeypatch.setattr(build, "strategies", without_pending)
    assert least_of_sum() > autopar.price(Program.parse(SUM_BY_HAND), SLOW).nanoseconds


def test_a_form_that_is_charged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(traced(CHAIN), TWO, SLOW, "")
    add_edge = FactorGraph.add_edge

    def twice(graph: FactorGraph, i: int, j: int, left: Array, right: Array, table: Array) -> None:
        add_edge(graph, i, j, left, right, 2 * table)

    monkeypatch.setattr(FactorGraph, "add_edge", twice)
    with pytest.raises(AssertionError, match="the bound is above the best plan"):
        check(traced(CHAIN), TWO, SLOW, "")


def test_a_form_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an op costs nothing in the search, its answer is dearer than the best of all plans."""
    monkeypatch.setattr(build._Builder, "_prices_of", lambda _self, _key, _bound, placed, *_: np.zeros(len(placed)))
    with pytest.raises(AssertionError):
        check(traced(CHAIN), TWO, SLOW, "")


def test_an_alternate_that_is_charged_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(traced(SHARED), TWO, SLOW, "")
    alternates = payments.alternates

    def dearer(*args: Any, **kwargs: Any) -> Alternates:
        made = alternates(*args, **kwargs)
        return made._replace(paid=made.paid + np.where(made.paid > 0, 1.0, 0.0))

    monkeypatch.setattr(payments, "alternates", dearer)
    with pytest.raises(AssertionError, match="the bound is above the best plan"):
        check(traced(SHARED), TWO, SLOW, "")


def test_an_alternate_that_is_not_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    alternates = payments.alternates

    def free(*args: Any, **kwargs: Any) -> Alternates:
        made = alternates(*args, **kwargs)
        return made._replace(paid=np.zeros_like(made.paid))

    monkeypatch.setattr(payments, "alternates", free)
    with pytest.raises(AssertionError):
        check(traced(SHARED), TWO, SLOW, "")
