"""The gradient of every transition: differentiated through on simulated ranks and on processes, and in the joint
graph."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import ranks
from redistribution_gradients import read, run_and_differentiate, there_and_back
from strategies import attrs, meshes, shapes

from autopar import Mesh
from autopar.capture import capture
from autopar.capture.specialize import specialize
from autopar.errors import TransitionError
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.passes import pipeline, run_passes
from autopar.runtime.localize import LocalPrograms
from autopar.runtime.redistribute import Redistribution, averaged_over, gradient_type
from autopar.runtime.simulated_step import SimulatedStep
from autopar.runtime.simulation.pieces import cut

LINEAR = ("sum", "avg")


def typed(mesh: Mesh, attr: DistAttr, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> TensorType:
    return TensorType(shape, dtype, Layout(mesh, attr.normalize(shape, mesh)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[TensorType, TensorType]:
    """Two Layouts of one kind of pending, on one mesh or on two that share ranks."""
    mesh, shape = draw(meshes(max_ranks=8)), draw(shapes())
    kind = draw(st.sampled_from(LINEAR))
    other = mesh if draw(st.booleans()) else Mesh({"x": draw(st.integers(1, 4))}, ranks=None)
    if other is not mesh:
        first = draw(st.integers(0, 2))
        other = Mesh(other.sizes, ranks=range(first, first + other.size))
    return typed(mesh, draw(attrs(mesh, shape, pending=(kind,))), shape), typed(
        other, draw(attrs(other, shape, pending=(kind,))), shape
    )


def pieces_of(whole: torch.Tensor, type: TensorType) -> dict[int, torch.Tensor]:
    mesh = type.layout.mesh
    held = gradient_type(type)
    return {rank: cut(whole, held, mesh.coordinates(rank)) for rank in mesh.ranks}


def value_of(pieces: dict[int, torch.Tensor], type: TensorType, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of a value's elements: of each element and addend one holder counts."""
    mesh, held = type.layout.mesh, gradient_type(type)
    numbers = torch.arange(weights.numel()).reshape(weights.shape)
    seen: set[tuple[int, ...]] = set()
    total = weights.new_zeros(())
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        addend = tuple(at[axis] for axis, _ in type.attr.pending)
        mine = cut(numbers, held, at).flatten().tolist()
        fresh = torch.tensor([(*addend, n) not in seen for n in mine], dtype=torch.bool)
        seen |= {(*addend, n) for n in mine}
        total = total + (pieces[rank].flatten() * cut(weights, held, at).flatten())[fresh].sum()
    return total / averaged_over(type)


@settings(max_examples=60, deadline=None)
@given(pairs(), st.randoms())
def test_the_gradient_of_a_transition(pair: tuple[TensorType, TensorType], random: object) -> None:
    """Each addend has the gradient of the value, and a change of one changes the value as its gradient says."""
    source, target = pair
    redistribution = Redistribution(source, target)
    weights = torch.randn(source.shape, dtype=torch.float64)
    shares = {rank: torch.randn(piece.shape, dtype=torch.float64) for rank, piece in pieces_of(weights, source).items()}
    mesh, held = source.layout.mesh, gradient_type(source)
    values: dict[tuple[int, ...], torch.Tensor] = {}
    for rank in mesh.ranks:  # ranks that hold the same addend hold the same numbers
        at = mesh.coordinates(rank)
        addend = tuple(at[axis] for axis, _ in source.attr.pending)
        values.setdefault(addend, torch.randn(source.shape, dtype=torch.float64))
        shares[rank] = cut(values[addend], held, at).requires_grad_()
    made = redistribution.simulate(shares)
    assert torch.allclose(value_of(made, target, weights), value_of(shares, source, weights)), print_type(
        source
    ) + print_type(target)
    incoming = {rank: piece / averaged_over(target) for rank, piece in pieces_of(weights, target).items()}
    found = torch.autograd.grad([made[rank] for rank in made], list(shares.values()), [incoming[rank] for rank in made])
    for rank, gradient in zip(shares, found, strict=True):
        wanted = cut(weights, held, mesh.coordinates(rank)) / averaged_over(source)
        assert torch.allclose(gradient, wanted), (print_type(source), print_type(target), rank)


NAMED = {  # the transition, the transfers of its backward
    "P to S": ("f32[8] +dp", "f32[8/dp]", ["all_gather"]),
    "P to R": ("f32[8] +dp", "f32[8]", []),
    "S to R": ("f32[8/dp]", "f32[8]", ["slice"]),
    "R to S": ("f32[8]", "f32[8/dp]", ["all_gather"]),
    "R to P": ("f32[8]", "f32[8] +dp", []),
    "S to P": ("f32[8/dp]", "f32[8] +dp", ["slice"]),
    "S(0) to S(1)": ("f32[8/dp 4]", "f32[8 4/dp]", ["all_to_all"]),
    "swapped axes": ("f32[8/dp 4/tp]", "f32[8/tp 4/dp]", ["redistribute"]),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_backward_of(name: str) -> None:
    before, after, wanted = NAMED[name]
    found = Redistribution(read(before), read(after)).backward.program
    assert [node.target.__name__ for node in found.nodes if node.op == "call_function"] == wanted


def test_a_gradient_does_not_stay_pending() -> None:
    """Of a value that is pending before and after, too."""
    redistribution = Redistribution(read("f32[8/tp] +dp"), read("f32[8] +dp"))
    assert redistribution.backward.source == read("f32[8]") and redistribution.backward.target == read("f32[8/tp]")


@pytest.mark.parametrize("kind", ["max", "min", "prod"])
def test_the_gradient_of_a_pending_max_is_refused(kind: str) -> None:
    redistribution = Redistribution(read(f"f32[4] +{kind}:dp"), read("f32[4]"))
    with pytest.raises(TransitionError, match=re.escape(
        f"the gradient of f32[4] +{kind}:dp has no Layout: each rank's share depends on the values, which are pending "
        f"{kind} over dp; reduce the value first, outside of the differentiated computation"
    )):  # fmt: skip
        _ = redistribution.backward


def test_a_gradient_has_the_dtype_of_its_value() -> None:
    redistribution = Redistribution(read("f32[8/dp]"), read("bf16[8]"))
    x = {rank: torch.randn(4, requires_grad=True) for rank in range(4)}
    x |= {1: x[0], 3: x[2]}
    made = redistribution.simulate(x)
    sum(piece.float().sum() for piece in made.values()).backward()
    assert made[0].dtype == torch.bfloat16 and x[0].grad.dtype == torch.float32


PROCESS_CASES = [
    ("f64[8/dp 4/tp]", "f64[8/tp 4/dp]"),
    ("f64[5/dp 3] +tp", "f64[5 3/dp]"),
    ("f64[7]", "f64[7] +dp"),
    ("f64[6] +avg:dp", "f64[6/tp]"),
    ("f64[(5/dp 3/tp) 2]", "f64[15/tp 2/dp]"),
]


@pytest.mark.processes
def test_on_processes_as_simulated() -> None:
    given_ = []
    for before, after in PROCESS_CASES:
        redistribution = Redistribution(read(before), read(after))
        pieces = {
            rank: torch.randn(piece.shape, dtype=torch.float64)
            for rank, piece in pieces_of(
                torch.zeros(redistribution.source.shape, dtype=torch.float64), redistribution.source
            ).items()
        }
        gradients = {
            rank: torch.randn(piece.shape, dtype=torch.float64)
            for rank, piece in pieces_of(
                torch.zeros(redistribution.source.shape, dtype=torch.float64), redistribution.target
            ).items()
        }
        wanted, back = redistribution._run(pieces), redistribution.backward._run(gradients)
        given_.append(
            (
                before,
                after,
                pieces,
                gradients,
                wanted,
                {rank: piece * redistribution.factor for rank, piece in back.items()},
            )
        )
    found = ranks(4).run(run_and_differentiate, [case[:4] for case in given_])
    for rank, results in enumerate(found):
        for (before, after, _, _, wanted, back), (made, gradient) in zip(given_, results, strict=True):
            assert torch.equal(made, wanted[rank]) and torch.equal(gradient, back[rank]), (before, after, rank)


@pytest.mark.processes
def test_between_meshes_on_processes() -> None:
    """Two ranks to three, one of them among both, and the gradient back."""
    source = typed(Mesh(dp=2), DistAttr.split("dp", None), (5, 4))
    target = typed(Mesh({"x": 3}, ranks=[1, 2, 3]), DistAttr.split(None, "x"), (5, 4))
    redistribution, whole = Redistribution(source, target), torch.randn(5, 4, dtype=torch.float64)
    found = ranks(4).run(there_and_back, source, target, pieces_of(whole, source))
    wanted, back = pieces_of(whole, target), pieces_of(whole, source)
    for rank, (there, again) in enumerate(found):
        assert (there is None) == (rank not in wanted) and (again is None) == (rank not in back)
        assert there is None or torch.equal(there, wanted[rank])
        assert again is None or torch.equal(again, back[rank])
    assert redistribution.backward.target == source


# -- in the joint graph --------------------------------------------------------------------------------------------


class Chain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(x) * 2) * torch.exp(x)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_in_the_joint_graph(data: st.DataObject) -> None:
    """Values of a step are put into Layouts of any kind, forward and backward; the gradients are those of one
    device."""
    mesh, shape = data.draw(meshes(max_ranks=8)), data.draw(shapes(2, min_size=1)) or (4,)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    captured = capture(Chain(), (x,))
    program = captured.program
    names = [node.name for node in program.nodes if node.op == "call_function"]
    chosen = {
        name: data.draw(attrs(mesh, shape, pending=())).normalize(shape, mesh)
        for name in names
        if data.draw(st.booleans())
    }
    chosen["x"] = data.draw(attrs(mesh, shape, pending=(), max_parts=1)).normalize(shape, mesh)
    traced = program.copy()
    run_passes(program, pipeline(mesh, chosen))

    def step(of: torch.fx.Graph) -> SimulatedStep:
        return SimulatedStep(
            of,
            LocalPrograms(of, lambda made: made.verify()),
            lambda given: step(specialize(traced, given, captured.device)),
        )

    wanted = Chain()(x)
    (ours,) = step(program)([x])
    weights = torch.randn(shape, dtype=torch.float64)
    assert torch.allclose(ours, wanted)
    assert torch.allclose(torch.autograd.grad(ours, x, weights)[0], torch.autograd.grad(wanted, x, weights)[0])


@pytest.mark.parametrize("after", ["f32[4/dp 4]", "f32[4 4] +dp", "f32[4/dp 4/tp]", "f32[4/tp 4]"])
def test_pieces_that_a_rank_does_not_have_are_refused(after: str) -> None:
    redistribution = Redistribution(read("f32[4/dp 4]"), read(after))
    pieces = {rank: torch.zeros(2, 4) for rank in range(4)}
    redistribution.simulate(pieces)
    for wrong, said in [
        (
            {**pieces, 1: torch.zeros(4, 4)},
            "the piece of rank 1 is [2, 4], torch.float32 of f32[4/dp 4], but got [4, 4], torch.float32",
        ),
        (
            {**pieces, 2: torch.zeros(2, 4, dtype=torch.float64)},
            "the piece of rank 2 is [2, 4], torch.float32 of f32[4/dp 4], but got [2, 4], torch.float64",
        ),
        (
            {rank: pieces[rank] for rank in range(3)},
            "pieces are given for the ranks [0, 1, 2], but f32[4/dp 4] is on the ranks [0, 1, 2, 3]",
        ),
        (
            {**pieces, 4: pieces[0]},
            "pieces are given for the ranks [0, 1, 2, 3, 4], but f32[4/dp 4] is on the ranks [0, 1, 2, 3]",
        ),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            redistribution.simulate(wrong)
    here = redistribution.on(0, {})
    with pytest.raises(ValueError, match=re.escape("the piece of rank 0 is [2, 4]")):
        here(torch.zeros(4, 2))
    with pytest.raises(
        ValueError, match=re.escape("rank 0 got no piece, but f32[4/dp 4] is on the ranks [0, 1, 2, 3]")
    ):
        here(None)
