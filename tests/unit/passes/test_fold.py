"""Fold: chains of transfers lead where they led, with no more bytes than one transition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attrs, meshes, shapes
from transition_runs import addends, equal, normal, whole_numbers

from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.layout import Layout
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import Requirement, TensorType
from autopar.ir.text.printer import print_type
from autopar.passes import Fold
from autopar.runtime.localize import localize
from autopar.runtime.simulation.simulate import compile_phases, run_ranks
from autopar.transitions import cost, transitions


def chain(types: list[TensorType]) -> Program:
    """An input that is re-laid again and again."""
    mesh = types[0].layout.mesh
    program = Program.parse(f"program explicit on {mesh}\n  x : {print_type(types[0])} = input\n  return x\n")
    x, output = program.node("x"), program.output
    with program.edit() as edit:
        value = x
        for here, there in itertools.pairwise(types):
            for step in transitions(here, there):
                args, kwargs = transfers.call(step.function, value, dict(step.arguments))
                value = edit.insert(step.function, args, kwargs, before=output)
        edit.replace_use(output, x, value)
        edit.annotate(output, uses=(Requirement(types[-1].layout, types[-1].dtype),))
    program.verify()
    return program


def results(program: Program, pieces: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    code = {
        rank: compile_phases(localize(program, program.mesh.coordinates(rank))).get("forward", [])
        for rank in program.mesh.ranks
    }
    values = {rank: {"x": piece} for rank, piece in pieces.items()}
    run_ranks(program.meshes, code, values)
    return {rank: held[operands(program.output)[0].name] for rank, held in values.items()}


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_chain_is_one_transition(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes(max_ranks=8)), data.draw(shapes())
    kind = data.draw(st.sampled_from(["sum", "max"]))
    layouts = [data.draw(attrs(mesh, shape, pending=(kind,) if k in (0, 3) else ())) for k in range(4)]
    types = [normal(TensorType(shape, torch.float64, Layout(mesh, attr))) for attr in layouts]
    program = chain(types)
    _, pieces = addends(types[0], whole_numbers(types[0]))
    wanted = results(program, pieces) if not types[-1].attr.pending else None
    before = program.counts.commits
    Fold().run(program)
    program.verify()
    assert program.counts.commits <= before + 1
    left = [node for node in program.nodes if node.target in transfers.BY_FUNCTION]
    assert record_of(operands(program.output)[0]).type == types[-1]
    # by bytes, then by transfers
    assert (sum(map(_received, left)), len(left)) <= (cost(types[0], types[-1]), len(transitions(types[0], types[-1])))
    if wanted is not None:
        found = results(program, pieces)
        assert all(equal(found[rank], wanted[rank]) for rank in wanted)


def _received(node: torch.fx.Node) -> int:
    given_ = transfers.arguments(node.target, node.args, node.kwargs)
    return transfers.received(node.target, record_of(operands(node)[0]).type, given_, record_of(node).type)


def test_what_no_transition_does_is_left() -> None:
    """A max that is reduced, and held as a sum."""
    text = (
        "program explicit on dp=2\n  x : f32[4] +max:dp = input\nforward:\n  x_dp : f32[4] = all_reduce(x, dp, "
        "op=max)\n"
        "  x_dp_dp : f32[4] +dp = pend(x_dp, dp)\n  return x_dp_dp\n"
    )
    program = Program.parse(text)
    with pytest.raises(TransitionError):
        transitions(record_of(program.node("x")).type, record_of(program.node("x_dp_dp")).type)
    Fold().run(program)
    assert str(program) == text
