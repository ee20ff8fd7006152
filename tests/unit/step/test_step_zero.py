"""ZeRO's Layouts: where one more axis splits a value, and that its pieces tile it."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import strategies
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autopar
from autopar import Mesh
from autopar.ir.dtensor import attr_of, edge_of, placements_of
from autopar.ir.layout import DistAttr
from autopar.plan.batch import split_over
from autopar.step.compiling.zero import STAGES, data_axis


@pytest.mark.long
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_one_more_dim_is_split(data: st.DataObject) -> None:
    """Over any axis, of any value that DTensor can say: nothing but one free dim changes, and where there is none,
    nothing."""
    mesh, shape = data.draw(strategies.meshes()), data.draw(strategies.shapes())
    before = edge_of(data.draw(strategies.attrs(mesh, shape, pending=())), mesh, shape, strided=True)
    axis = data.draw(st.sampled_from(mesh.names))
    after = split_over(before, shape, mesh, axis)
    assert len(set(after.axes)) == len(after.axes)
    assert edge_of(after, mesh, shape, strided=True) == after.normalize(shape, mesh)
    assert attr_of(placements_of(after, mesh, shape), mesh, shape) == after.normalize(shape, mesh)
    pieces = strategies.holdings(after, shape, mesh)
    held = [number for _, numbers in pieces for number in numbers]
    copies = mesh.size // math.prod(mesh.sizes[name] for name in after.axes)
    assert sorted(held) == sorted(list(range(math.prod(shape))) * copies), "the pieces tile the value"
    size = mesh.sizes[axis]
    free = [d for d, dim in enumerate(before.dims) if not any(axes for _, axes in dim) and shape[d] >= size]
    if axis in before.axes or size == 1 or not free:
        assert after == before
        return
    (changed,) = [
        d
        for d, (one, other) in enumerate(zip(before.normalize(shape, mesh).dims, after.dims, strict=True))
        if one != other
    ]
    assert changed in free and after.dims[changed] == ((None, (axis,)),)
    even = [d for d in free if shape[d] % size == 0]
    assert changed == even[0] if even else shape[changed] == max(shape[d] for d in free)
    assert split_over(after, shape, mesh, axis) == after


@pytest.mark.simulated
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_no_piece_is_more_than_its_share(data: st.DataObject) -> None:
    """What divides is cut into equal pieces."""
    mesh, shape = data.draw(strategies.meshes()), data.draw(strategies.shapes(min_size=1))
    axis = data.draw(st.sampled_from(mesh.names))
    assume(any(n % mesh.sizes[axis] == 0 for n in shape))
    after = split_over(DistAttr.replicated(len(shape)), shape, mesh, axis)
    assert all(
        len(numbers) * mesh.sizes[axis] == math.prod(shape) for _, numbers in strategies.holdings(after, shape, mesh)
    )


CASES: dict[str, tuple[tuple[int, ...], DistAttr, DistAttr]] = {  # over dp=2 tp=2
    "the first free dim": ((8, 4), DistAttr.split(None, None), DistAttr.split("dp", None)),
    "not the one that tp splits": ((8, 4), DistAttr.split("tp", None), DistAttr.split("tp", "dp")),
    "that divides": ((7, 4), DistAttr.split(None, None), DistAttr.split(None, "dp")),
    "else the longest": ((3, 5), DistAttr.split(None, None), DistAttr.split(None, "dp")),
    "no free dim": ((8,), DistAttr.split("tp"), DistAttr.split("tp")),
    "too short": ((1, 1), DistAttr.split(None, None), DistAttr.split(None, None)),
    "without dims": ((), DistAttr.split(), DistAttr.split()),
    "a fused weight": (
        (12, 4),
        DistAttr((((3, ()), (4, ("tp",))), ((None, ()),))),
        DistAttr((((3, ()), (4, ("tp",))), ((None, ("dp",)),))),
    ),
    "split already": ((8, 4), DistAttr.split(None, "dp"), DistAttr.split(None, "dp")),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    shape, before, after = CASES[name]
    assert split_over(before, shape, Mesh(dp=2, tp=2), "dp") == after


def test_each_stage_splits_more() -> None:
    assert all(less < more for less, more in itertools.pairwise(STAGES)) and len(STAGES) == 4


def test_the_data_axis() -> None:
    """The first in the order of the mesh that splits rows; not one that splits a sequence."""
    mesh = Mesh(tp=2, dp=2, ep=2)
    assert data_axis(mesh, {"x": DistAttr.split(None, "tp"), "y": DistAttr.split(("ep", "dp"), "tp")}) == "dp"
    both = {"x": DistAttr.split(("dp", "ep"), "tp")}
    assert data_axis(mesh, both, "ep") == "ep" and data_axis(mesh, both, "tp") == data_axis(mesh, both) == "dp"
    text = re.escape(
        "zero= splits what an axis of the batch replicates, but no axis of the mesh (tp=2 dp=2 ep=2) splits an input; "
        "use zero=0, or split the batch"
    )
    for inputs in ({}, {"x": DistAttr.split(None, "tp")}, {"x": DistAttr.split(None, None)}):
        with pytest.raises(ValueError, match=text):
            data_axis(mesh, inputs)
    with pytest.raises(ValueError, match=text):
        data_axis(mesh, {"scale": DistAttr.split()})  # an input without dims


class Trained(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def test_the_report_names_parameters_that_are_too_small_to_split() -> None:
    """And is silent where all are split, and without ZeRO."""
    parallel = autopar.parallelize(Trained(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)), Mesh(dp=4), "ddp")
    said = {}
    for stage in (0, 1, 3):
        step = parallel.train_step(torch.optim.SGD(parallel.parameters(), lr=0.1), zero=stage)
        step.capture(torch.ones(8, 8))
        said[stage] = [note for report in step.reports if report.name == "zero" for note in report.notes]
    note = (
        "ZeRO leaves 1 of 4 parameters whole over dp, whose 4 ranks are more than any of their free dims has elements: "
        "1.bias"
    )
    assert said == {0: [], 1: [note], 3: [note]}
