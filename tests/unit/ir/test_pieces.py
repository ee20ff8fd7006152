"""Cutting a tensor into pieces and joining them."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, attrs, meshes, shapes

from autopar.errors import SimulationError
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.runtime.simulation.pieces import cut, join


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_joining_the_pieces_gives_the_whole(data: st.DataObject) -> None:
    mesh, shape, dtype = data.draw(meshes()), data.draw(shapes()), data.draw(st.sampled_from(DTYPES))
    type = TensorType(shape, dtype, Layout(mesh, data.draw(attrs(mesh, shape, pending=()))))
    whole = torch.randint(0, 100, shape).to(dtype)
    pieces = {rank: cut(whole, type, mesh.coordinates(rank)) for rank in mesh.ranks}
    for rank, piece in pieces.items():
        assert tuple(piece.shape) == type.attr.local_shape(shape, mesh, mesh.coordinates(rank))
        assert piece.dtype == dtype and piece.is_contiguous()
    again = join(pieces, type, "x")
    assert again.dtype == dtype and torch.equal(again, whole)


@pytest.mark.simulated
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_replicas_that_disagree_are_refused(data: st.DataObject) -> None:
    mesh, shape, dtype = data.draw(meshes()), data.draw(shapes(min_size=1)), data.draw(st.sampled_from(DTYPES))
    type = TensorType(shape, dtype, Layout(mesh, data.draw(attrs(mesh, shape, pending=()))))
    pieces = {rank: cut(torch.zeros(shape, dtype=dtype), type, mesh.coordinates(rank)) for rank in mesh.ranks}
    bad = data.draw(st.sampled_from(mesh.ranks))
    spans = {rank: type.attr.local_parts(shape, mesh, mesh.coordinates(rank)) for rank in mesh.ranks}
    replicas = [rank for rank in mesh.ranks if spans[rank] == spans[bad]]
    if not pieces[bad].numel():
        return
    element = data.draw(st.integers(0, math.prod(pieces[bad].shape) - 1))
    pieces[bad] = pieces[bad].clone()
    pieces[bad].view(-1)[element] = 1
    if len(replicas) == 1:
        assert join(pieces, type, "x").sum() == 1
    else:
        first = replicas[0]
        second = replicas[1] if bad == first else bad
        text = f"ranks {first} and {second} hold different values of the same piece of x"
        with pytest.raises(SimulationError, match=f"^{text}$"):
            join(pieces, type, "x")


def test_replicas_may_differ_by_rounding_and_share_nans() -> None:
    type = TensorType((2,), torch.float32, Layout(Mesh(dp=2), DistAttr.replicated(1)))
    first = torch.tensor([1.0, math.nan])
    whole = join({0: first, 1: first * (1 + 1e-6)}, type, "x")
    torch.testing.assert_close(whole, first, equal_nan=True)


def test_pending_values_have_no_whole() -> None:
    type = TensorType((2,), torch.float32, Layout(Mesh(dp=2), DistAttr.split(None, pending=["dp"])))
    with pytest.raises(
        SimulationError, match=re.escape("loss is still pending and has no global value; reduce it first")
    ):
        join({0: torch.ones(2), 1: torch.ones(2)}, type, "loss")


def test_pieces_of_five_over_four() -> None:
    type = TensorType((5,), torch.int64, Layout(Mesh(dp=4), DistAttr.split("dp")))
    pieces = [cut(torch.arange(5), type, {"dp": index}).tolist() for index in range(4)]
    assert pieces == [[0, 1], [2, 3], [4], []]


def test_a_merged_dim_is_cut_part_by_part() -> None:
    type = TensorType((6,), torch.int64, Layout(Mesh(tp=2), DistAttr((((3, ()), (2, ("tp",))),))))
    assert [cut(torch.arange(6), type, {"tp": index}).tolist() for index in range(2)] == [[0, 2, 4], [1, 3, 5]]
