"""Which uses reshard finds to disagree with their values, whatever objects say so."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.layout import Layout
from autopar.ir.nodes import record_of, set_record
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.passes import Reshard, run_passes
from autopar.passes.reshard import disagreements

TEXT = """\
program placed on dp=2 tp=2
  x : f32[8/dp 4] = input
  y : f32[6/dp 4] = input
forward:
  add : f32[8/dp 4] = add.Tensor(x, x)
  mul : f32[8 4] = mul.Tensor(x as [8 4], x as [8 4])
  sub : f32[8 4/dp] = sub.Tensor(x as [8 4/dp], x as [8 4/dp])
  neg : f32[6 4] = neg(y as [6 4])
  relu : f32[6/dp 4] = relu(y)
  return (add, mul as [8/dp 4], sub, neg, relu)
"""
FOUND = [("mul", 0, "x"), ("mul", 1, "x"), ("sub", 0, "x"), ("sub", 1, "x"), ("neg", 0, "y"), ("output", 1, "mul")]


def found(program: Program) -> list[tuple[str, int, str]]:
    return [(user.name, index, value.name) for user, index, value, *_ in disagreements(program)]


def with_layouts(program: Program, make: dict[Layout, Layout] | None) -> Program:
    """The same program, in which equal Layouts are one object (those of ``make``), or each is one of its own."""

    def other(about: TensorType | Requirement) -> TensorType | Requirement:
        layout = about.layout
        assert layout is not None
        new = Layout(layout.mesh, replace(layout.attr)) if make is None else make.setdefault(layout, layout)
        return replace(about, layout=new)

    program = program.copy()
    for node in program.nodes:
        record = record_of(node)
        type = other(record.type) if isinstance(record.type, TensorType) else record.type
        set_record(node, record._replace(type=type, uses=tuple(need and other(need) for need in record.uses)))
    return program


def test_uses_disagree_by_content() -> None:
    """Also where one operand is read twice, and where values of two shapes lie alike."""
    program = Program.parse(TEXT)
    texts = set()
    for one in (program, with_layouts(program, None), with_layouts(program, {})):
        assert found(one) == FOUND
        run_passes(one, [Reshard()])
        texts.add(str(one))
    assert len(texts) == 1
    assert "  y_dp : f32[6 4] = all_gather(y, 0, dp)\n" in texts.pop()
