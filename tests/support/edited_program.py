"""The program that edits are tried on, and what its lines say afterwards."""

from __future__ import annotations

from autopar.ir.layout import DistAttr, Layout
from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program

TEXT = """\
program explicit on dp=2 tp=2
stage s1 on dp=2 tp=2 ranks 4 5 6 7
  x : f32[8/dp 4] = input
  w : f32[4 4/tp] = param
  g : f32[8 4] +tp = input
forward:
  relu : f32[8/dp 4] = relu(x)
  x_dp : f32[8 4] = all_gather(x, 0, dp)
  x_dp_tp : f32[8 4/tp] = slice(x_dp, 1, tp)
  add : f32[8/dp 4] = add.Tensor(relu, relu)
  ln : (f32[8/dp 4], f32[8/dp 1], f32[8/dp 1]) = native_layer_norm(add, [4], None, None, 1e-05)
  y : f32[8/dp 4] = ln[0]
backward:
  g_tp : f32[8 4] = all_reduce(g, tp)
  mul : f32[8 4] = mul.Tensor(g_tp, x_dp)
  mm : f32[8/dp 4/tp] = mm(y, w)
  neg : f32[8/dp 4/tp] = neg(mm)
  return (neg, mul, x_dp_tp)
"""


def base() -> Program:
    """The program, with source lines that tell where each line came from."""
    program = Program.parse(TEXT)
    for number, node in enumerate(program.nodes):
        if node.op == "call_function":
            set_record(node, record_of(node)._replace(module="block", source=f"model.py:{number}  {node.name}"))
    return program


def layout(program: Program, *dims: str | None, pending: tuple[str, ...] = ()) -> Layout:
    assert program.mesh is not None
    return Layout(program.mesh, DistAttr.split(*dims, pending=pending))


def lines(program: Program) -> dict[str, str]:
    """name → what stands behind it."""
    return dict(line.strip().split(" : ") for line in str(program).splitlines() if " : " in line)
