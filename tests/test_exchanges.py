"""The collectives of real processes do what the simulator does, bit by bit."""

from __future__ import annotations

import math

import exchanges
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import ranks
from strategies import DTYPES, attrs, shapes
from transition_runs import addends, explicit_program, run

from autopar.layout import DistAttr, Layout
from autopar.localize import localize
from autopar.mesh import Mesh
from autopar.record import TensorType

MESHES = [Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(dp=4), Mesh(tp=2, dp=2, ranks=[0, 2, 1, 3])]
Case = tuple[tuple[list[str], list[torch.Tensor]], list[torch.Tensor]]


def case(source: TensorType, target: TensorType, values: torch.Tensor) -> Case:
    """The local programs and pieces of all ranks, and what the simulator gives."""
    program, mesh = explicit_program(source, target), source.layout.mesh
    _, pieces = addends(source, values)
    wanted = run(source, target, dict(pieces))
    every = sorted(mesh.ranks)
    texts = [str(localize(program, mesh.coordinates(rank))) for rank in every]
    return (texts, [pieces[rank] for rank in every]), [wanted[rank] for rank in every]


def check(cases: list[Case]) -> None:
    found = ranks(4).run(exchanges.run_lowered, [given for given, _ in cases])
    for number, (given_, wanted) in enumerate(cases):
        for rank, expected in enumerate(wanted):
            ours = found[rank][number]
            assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype), given_[0][rank]
            assert torch.equal(ours, expected) and ours.is_contiguous(), given_[0][rank]


@st.composite
def pairs(draw: st.DrawFn) -> Case:
    mesh, shape, dtype = draw(st.sampled_from(MESHES)), draw(shapes()), draw(st.sampled_from([*DTYPES, torch.float16, torch.complex64, torch.int8]))
    kinds = {torch.bool: ("max", "min"), torch.complex64: ("sum",)}.get(dtype, ("sum", "max", "min", "prod"))
    source = draw(attrs(mesh, shape, pending=kinds))
    target = draw(attrs(mesh, shape, pending=()))
    values = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=4, max_size=4)))
    elements = torch.arange(math.prod(shape)).reshape(shape)
    global_ = ((values.reshape(-1, *[1] * len(shape)) + elements) % 3).to(dtype)  # exact in every dtype, whatever is reduced first
    return case(*(TensorType(shape, dtype, Layout(mesh, a)) for a in (source, target)), global_)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(pairs(), min_size=1, max_size=8))
def test_as_the_simulator(cases: list[Case]) -> None:
    check(cases)


SPLITS = [(0, 1), (1, 0), (0, 2), (2, 1), (1, 2)]


@pytest.mark.parametrize("shape", [(8, 4, 12), (5, 7, 3), (2, 1, 3), (4, 0, 8)], ids=str)
def test_every_collective_on_every_dim(shape: tuple[int, ...]) -> None:
    """Gathers, reduce-scatters and all-to-alls over four ranks, even, uneven and empty."""
    mesh = Mesh(tp=4)

    def split(dim: int | None = None, pending: tuple[str, ...] = ()) -> DistAttr:
        return DistAttr.split(*("tp" if d == dim else None for d in range(3)), pending=pending)

    wanted = [(split(d), split()) for d in range(3)] + [(split(pending=("tp",)), split(d)) for d in (0, 1, 2, None)]
    wanted += [(split(a), split(b)) for a, b in SPLITS]
    values = torch.randint(0, 8, (4, *shape))
    cases = [case(TensorType(shape, d, Layout(mesh, a)), TensorType(shape, d, Layout(mesh, b)), values.to(d)) for a, b in wanted for d in (torch.float32, torch.bfloat16)]
    check(cases)


TEXT = """program local on dp=2 tp=2 at dp=0 tp=0
  x : f32[4 8] = input
  y : f32[8 4] = input
forward:
  a : f32[4 8] = relu(x)
  a_tp : f32[4 8] = all_reduce(a, tp)
  b : f32[8 8] = mm(y, a)
  c : f32[4 8] = relu(a_tp)
  c_dp : f32[4 8] = all_reduce(c, dp)
  d : f32[8 8] = mm(y, c_dp)
  return (b, d)
"""


def test_started_where_they_stand_and_waited_for_at_first_use() -> None:
    """And in place where nobody reads the operand again: c is reduced in its own memory, a is read by mm."""
    text = ranks(4).run(exchanges.text_of_lowered, TEXT, 0)[0]
    ops = [line.split(" = ")[1].split("(")[0] for line in text.splitlines() if " = " in line and not line.lstrip().startswith("def")]
    ops = [op.rpartition("_")[0] if op.startswith("autopar") and op[-1].isdigit() else op for op in ops]
    found = [op.replace("autopar_runtime_collectives_", "").replace("torch.ops.aten.", "") for op in ops if "(" not in op and ("autopar" in op or "aten" in op)]
    assert found == ["relu.default", "start_all_reduce", "mm.default", "wait", "relu.default", "start_all_reduce_in_place", "wait", "mm.default"], text
