"""The boundary conditions by themselves, each on a tiny program: what is decided before any op is placed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar import Mesh
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.nodes import record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import Result, TensorType
from autopar.plan.boundary import (
    Boundary,
    Home,
    addend_of,
    attr_before_cast,
    filled,
    required_dtypes,
    rounds_nothing,
    sum_home,
)

MESH = Mesh(dp=2, tp=2)
split = DistAttr.split

STEP = """
program traced on dp=2 tp=2
  w : f32[8/tp 4] = param
  b : f32[4] = param
  w_grad : f32[8 4] = state(add, 'w.grad')
  b_grad : f32[4] +dp = state(b_sum, 'b.grad')
  loss : f32[] = state(loss_sum, '.loss')
  m : f32[8/dp 4] = state(mul, 'w.exp_avg')
  x : f32[6/dp 8] = input
  d_y : f32[6 4] = tangent(1)
forward:
  mm : f32[6 4] = mm(x, w)
  y : f32[6 4] = add.Tensor(mm, b)
  total : f32[] = sum(y)
  loss_sum : f32[] = add.Tensor(loss, total)
backward:
  t : f32[8 6] = t(x)
  g : f32[8 4] = mm(t, d_y)
  add : f32[8 4] = add.Tensor(w_grad, g)
  s : f32[4] = sum.dim_IntList(d_y, [0])
  b_sum : f32[4] = add.Tensor(b_grad, s)
  mul : f32[8 4] = mul.Scalar(m, 0.9)
  return (mm, y)
"""


def boundary_of(text: str = STEP, constraints: dict[str, DistAttr] | None = None, **options: bool) -> Boundary:
    program = Program.parse(text)
    assert program.mesh is not None
    return Boundary(program, program.mesh, constraints or {}, **options)


def node(boundary: Boundary, name: str) -> fx.Node:
    return next(node for node in boundary.program.nodes if node.name == name)


def names(nodes: dict[fx.Node, fx.Node | None]) -> dict[str, str | None]:
    return {key.name: None if value is None else value.name for key, value in nodes.items()}


def tensor(attr: DistAttr, *shape: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType(shape, dtype, Layout(MESH, attr))


# -- placeholders ----------------------------------------------------------------------------------------------------


def test_a_constraint_or_a_layout_of_the_program_decides() -> None:
    boundary = boundary_of(constraints={"w": split("dp", None), "y": split(None, "tp")})
    decided = {name: boundary.decided(node(boundary, name)) for name in ("w", "m", "b", "y", "mm")}
    assert decided == {"w": split("dp", None), "m": split("dp", None), "b": None, "y": split(None, "tp"), "mm": None}


def test_what_is_not_decided_is_replicated() -> None:
    boundary = boundary_of()
    assert boundary.home(node(boundary, "b")) == Home(split(None), split(None))
    assert boundary.home(node(boundary, "x")) == Home(split("dp", None), split("dp", None))


def test_a_parameter_is_kept_in_what_placements_say_and_read_as_decided() -> None:
    """Over tp before dp, which placements cannot say, and the evenly split parts of a fused weight, which they can."""
    boundary = boundary_of(
        "program traced on dp=2 tp=2\n  w : f32[8 4] = param\n  qkv : f32[(3 4/tp) 4] = param\n"
        "  odd : f32[(4/tp 3) 4] = param\nforward:\n  mm : f32[8 4] = mm(w, w)\n  return mm\n",
        {"w": split(("tp", "dp"), None)},
    )
    parts = DistAttr((((3, ()), (4, ("tp",))), ((None, ()),)))
    assert boundary.home(node(boundary, "w")) == Home(split(None, None), split(("tp", "dp"), None))
    assert boundary.home(node(boundary, "qkv")) == Home(parts, parts)
    assert boundary.home(node(boundary, "odd")).kept == boundary.home(node(boundary, "odd")).read == split("tp", None)


@pytest.mark.parametrize(
    ("name", "kept"), [("b", split(None)), ("m", split(None, None)), ("x", None), ("w_grad", None), ("loss", None)]
)
def test_inputs_and_sums_of_gradients_are_kept_in_any_attribute(name: str, kept: DistAttr | None) -> None:
    boundary = boundary_of()
    ndim = len(tensor_type(node(boundary, name)).shape)
    attr = DistAttr(split(*[None] * ndim).dims, (("dp", "sum"),))
    assert boundary.nearest_home(node(boundary, name), attr) == (kept or attr)


# -- sums of gradients, tangents, parameters -------------------------------------------------------------------------


def test_sums_of_gradients_and_their_parameters() -> None:
    """A state of a parameter is none; a sum with a Layout is decided."""
    boundary = boundary_of()
    assert names(boundary.sums) == {"w_grad": "w", "b_grad": "b", "loss": None}
    assert names(boundary.open_sums) == {"w_grad": "w", "loss": None}
    assert {op.name for op in boundary.additions_to_sums} == {"add", "loss_sum"}
    assert boundary.home(node(boundary, "b_grad")).kept == split(None, pending=("dp",))
    constrained = boundary_of(constraints={"w_grad": split("tp", None)})
    assert names(constrained.open_sums) == {"loss": None}


def test_what_only_looks_like_a_sum_of_gradients() -> None:
    """A parameter called ``grad`` beside ``up``, a sum without its parameter, unless it is pending, and what only reads
    a sum."""
    boundary = boundary_of(
        "program traced on dp=2\n  up : f32[4] = param\n  up_grad : f32[4] = param('up.grad')\n"
        "  lost : f32[4] = state(lost, 'lost.grad')\n  kept : f32[4] +dp = state(kept, 'kept.grad')\n"
        "  loss : f32[] = state(add, '.loss')\n  x : f32[] = input\nforward:\n  mul : f32[] = mul.Tensor(loss, x)\n"
        "  add : f32[] = add.Tensor(loss, mul)\n  return mul\n"
    )
    assert names(boundary.sums) == {"kept": None, "loss": None}
    assert {op.name for op in boundary.additions_to_sums} == {"add"}


def test_a_sum_with_a_layout_keeps_it_beside_a_constraint() -> None:
    boundary = boundary_of(constraints={"b_grad": split("dp")})
    assert boundary.home(node(boundary, "b_grad")) == Home(split(None, pending=("dp",)), split("dp"))


def test_a_sum_of_gradients_waits_where_its_parameter_is_not_split() -> None:
    addend = split(None, None, pending=("dp", "tp"))
    assert sum_home(addend, split("tp", None)) == split("tp", None, pending=("dp",))
    assert sum_home(split("tp", None), split(None, None)) == split(None, None)
    boundary = boundary_of()
    assert addend_of(node(boundary, "w_grad"), node(boundary, "add")).name == "g"


def test_a_tangent_belongs_to_a_returned_value() -> None:
    assert names(dict(boundary_of().tangents)) == {"d_y": "y"}


def test_results_that_are_not_returned_have_no_tangents() -> None:
    boundary = boundary_of(
        "program traced on dp=2\n  w : f32[4 4] = param\n  x : f32[6 4] = input\n  d_y : f32[6 4] = tangent(0)\n"
        "forward:\n  y : f32[6 4] = mm(x, w)\nbackward:\n  t : f32[4 6] = t(x)\n  g : f32[4 4] = mm(t, d_y)\n"
        "  return y\n  grad w = g\n"
    )
    assert names(dict(boundary.tangents)) == {"d_y": "y"}


def test_what_is_computed_of_parameters_alone() -> None:
    boundary = boundary_of(
        "program traced on dp=2\n  w : f32[8 4] = param\n  seed : i64[] = seed\n  x : f32[4 4] = input\nforward:\n"
        "  t : f32[4 8] = t(w)\n  both : (f32[4 4], f32[4 4]) = split_with_sizes(t, [4, 4], 1)\n"
        "  one : f32[4 4] = both[0]\n  y : f32[4 4] = mm(x, one)\n  ones : f32[4] = full([4], 1)\n  return (y, ones)\n"
    )
    assert {value.name for value in boundary.of_parameters} == {"w", "seed", "t", "both", "one"}
    assert {value.name for value in boundary_of().of_parameters} == {"w", "b", "w_grad", "b_grad", "loss", "m", "mul"}


# -- results ---------------------------------------------------------------------------------------------------------


def test_readers_of_a_constrained_result_read_it_so() -> None:
    boundary = boundary_of(constraints={"y": split("?", "tp")})
    y = node(boundary, "y")
    assert boundary.read_attr(y, tensor(split("dp", None), 6, 4)) == split("dp", "tp")
    assert boundary.read_attr(y, tensor(split("tp", None, pending=("dp",)), 6, 4)) == split(None, "tp")
    assert boundary.read_attr(node(boundary, "mm"), tensor(split("dp", None), 6, 4)) is None


def test_open_dims_are_filled() -> None:
    constraint = split("?", None)
    assert filled(constraint, split(("dp", "tp"), None)) == split(("dp", "tp"), None)
    assert filled(constraint, split(None, "tp")) == split(None, None)


def test_returned_values_are_reduced_and_in_what_placements_say() -> None:
    boundary = boundary_of()
    assert boundary.returned_attr(tensor(split("dp", None, pending=("tp",)), 8, 4)) == split("dp", None)
    assert boundary.returned_attr(tensor(split(("tp", "dp"), None), 8, 4)) == split(None, None)
    assert boundary_of(whole=True).returned_attr(tensor(split("dp", None), 8, 4)) == split(None, None)


def test_gradients_and_states_are_given_in_the_home_of_their_placeholder() -> None:
    boundary, made = boundary_of(), tensor(split("dp", None, pending=("tp",)), 8, 4)
    homes = {"w": split("tp", None), "w_grad": split("tp", None, pending=("dp",))}
    assert boundary.result_attr(Result("grad", "w"), made, homes) == homes["w"]
    assert boundary.result_attr(Result("state", "w_grad"), made, homes) == homes["w_grad"]
    assert boundary.result_attr(Result("return"), made, homes) == split("dp", None)


# -- operands --------------------------------------------------------------------------------------------------------


def test_operands_are_used_in_the_required_dtype() -> None:
    boundary = boundary_of(
        "program traced on tp=2\n  x : f32[6 8] = input\n  w : f32[8 4] = param\nforward:\n"
        "  mm : bf16[6 4] = mm(x as bf16, w)\n  exp : bf16[6 4] = exp(mm)\n  return exp\n"
    )
    types = {name: tensor_type(node(boundary, name)) for name in ("x", "w", "mm")}
    mm, exp = record_of(node(boundary, "mm")), record_of(node(boundary, "exp"))
    assert required_dtypes(mm, [types["x"], types["w"]]) == (torch.bfloat16, torch.float32)
    assert required_dtypes(exp, [types["mm"]]) == (torch.bfloat16,)


def test_a_value_that_is_narrowed_is_reduced_first() -> None:
    pending = split("dp", pending=("tp",))
    wide, narrow = (replace(tensor(pending, 8), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert rounds_nothing(narrow, torch.float32) and rounds_nothing(wide, torch.float32)
    assert not rounds_nothing(wide, torch.bfloat16)
    assert attr_before_cast(narrow, torch.float32) == attr_before_cast(wide, torch.float32) == pending
    assert attr_before_cast(wide, torch.bfloat16) == split("dp")
