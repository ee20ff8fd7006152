"""Constraints of a search: open dims of homes, results in the layout that the plan gives them, contradictions."""

from __future__ import annotations

import pytest
from searched import SLOW, price, traced

from autopar import Mesh, PlanError
from autopar.ir.layout import DistAttr
from autopar.ir.nodes import operands
from autopar.ir.record import TensorType
from autopar.plan.boundary import OPEN, Boundary, UserConstraints
from autopar.search.problem.build import build
from autopar.search.search import search

MESH = Mesh(a=2, b=2)
A: tuple[tuple[None, tuple[str, ...]], ...] = ((None, ("a",)),)
WHOLE: tuple[tuple[None, tuple[str, ...]], ...] = ((None, ()),)
TWO = """
  w : f32[64 64] = param
  x : f32[64 64] = input
forward:
  t : f32[64 64] = t(w)
  y : f32[64 64] = relu(x)
  mm : f32[64 64] = mm(y, t)
  s : f32[64 64] = cumsum(mm, -1)
  return s
"""


def homes(attr: DistAttr, value: str = "x") -> set[DistAttr]:
    problem = build(Boundary(traced(TWO), MESH, {value: attr}), SLOW)
    return set(problem.homes[problem.variables[problem.program.node(value)]])


@pytest.mark.parametrize("value", ["x", "w"])
def test_an_open_dim_takes_the_axes_that_are_left(value: str) -> None:
    assert homes(DistAttr((A, OPEN)), value) == {DistAttr.split("a", None), DistAttr.split("a", "b")}
    assert homes(DistAttr((WHOLE, OPEN)), value) == {
        DistAttr.split(None, axes) for axes in [None, "a", "b", ("a", "b")]
    }
    assert homes(DistAttr((OPEN, OPEN)), value) == set(build(Boundary(traced(TWO), MESH), SLOW).homes[0])
    both = DistAttr((((None, ("b", "a")),), OPEN))
    assert homes(both) == {DistAttr.split(("b", "a"), None)}


@pytest.mark.simulated
@pytest.mark.parametrize("attr", [DistAttr((A, OPEN)), DistAttr((OPEN, A)), DistAttr.split("b", "a")], ids=str)
def test_what_is_found_has_the_layouts_of_the_constraints(attr: DistAttr) -> None:
    for name in ("x", "w", "y", "mm"):
        program = traced(TWO)
        if name == "mm" and attr.dims[1] == A:
            continue  # a softmax needs its dim whole
        found = search(Boundary(program, MESH, {name: attr}), SLOW)
        free = search(Boundary(program, MESH), SLOW)
        assert found.nanoseconds >= free.nanoseconds
        assert price(program, MESH, SLOW, found) == found.nanoseconds
        node = program.node(name)
        type = found.types[node]
        assert isinstance(type, TensorType)
        needs = [type.attr] if name in ("x", "w") else [
            need.placed.attr for user in node.users
            for value, need in zip(operands(user), found.uses[user], strict=True) if value is node and need is not None
        ]  # fmt: skip
        assert needs
        for mine, asked in ((mine, asked) for need in needs for mine, asked in zip(need.dims, attr.dims, strict=True)):
            assert asked in (mine, OPEN), name


def refused(constraints: dict[str, DistAttr], names: dict[str, str]) -> str:
    with pytest.raises(PlanError) as caught:
        search(Boundary(traced(TWO), MESH, UserConstraints(constraints, names)), SLOW)
    return str(caught.value)


def test_a_result_that_no_op_can_read_so() -> None:
    assert refused({"mm": DistAttr.split(None, "a")}, {"mm": "up()"}) == (
        "no strategy of s reads mm as [64 64/a], as the plan has up()\n"
        "    mm : f32[64 64] = mm(y, t)\n"
        "    s : f32[64 64] = cumsum(mm, -1)\n"
        "  the rule of cumsum is d0 d1! -> d0 d1!: an axis splits one factor, and none with !; change the plan's "
        "layout of up(), or leave it out"
    )


def test_a_constraint_without_which_there_is_no_strategy_either_is_not_named() -> None:
    text = refused({"mm": DistAttr.split(None, "a"), "s": DistAttr.split("b", None)}, {"mm": "up()", "s": "()"})
    assert text.startswith("no strategy of s reads mm as [64 64/a], as the plan has up()\n") and "()," in text


def test_two_results_that_no_op_can_read_together() -> None:
    """Each alone is possible."""
    asked = {"y": DistAttr.split("a", None), "t": DistAttr.split(None, "a")}
    for name, attr in asked.items():
        search(Boundary(traced(TWO), MESH, {name: attr}), SLOW)
    text = refused({**asked, "s": DistAttr((OPEN, WHOLE))}, {"y": "act()", "t": "weight()"})
    assert text == (
        "no strategy of mm reads t as [64 64/a] and reads y as [64/a 64], as the plan has weight() and act()\n"
        "    t : f32[64 64] = t(w)\n"
        "    y : f32[64 64] = relu(x)\n"
        "    mm : f32[64 64] = mm(y, t)\n"
        "  the rule of mm is m k, k n -> m n: an axis splits one factor, and none with !; change the plan's layout of "
        "weight() or of act(), or leave one of them out"
    )


def test_a_returned_value_may_have_a_constraint() -> None:
    """Also where all that is returned is gathered."""
    program = traced(TWO)
    attr = DistAttr.split("a", None)
    for whole in (False, True):
        boundary = Boundary(program, MESH, {"s": attr}, whole)
        found = search(boundary, SLOW)
        (need,) = found.uses[program.output]
        assert need is not None and need.placed.attr == (DistAttr.replicated(2) if whole else attr)
    text = refused({"s": attr, "mm": DistAttr.split("b", None)}, {})
    assert text.startswith(
        "no strategy of s reads mm as [64/b 64] and returns s as [64/a 64], as the plan has mm and s"
    )
