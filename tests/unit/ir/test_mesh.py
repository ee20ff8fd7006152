"""Meshes: coordinates, groups, and what is said of bad ones."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ascending, meshes

from autopar.ir.mesh import Mesh

quick = settings(max_examples=50, deadline=None)


@st.composite
def scattered_meshes(draw: st.DrawFn) -> Mesh:
    """Meshes whose ranks are any numbers, in any order that ascends along each axis."""
    mesh = draw(meshes())
    ranks = draw(st.lists(st.integers(0, 99), min_size=mesh.size, max_size=mesh.size, unique=True))
    return Mesh(mesh.sizes, ranks=ascending(draw, mesh.shape, ranks), name=draw(st.sampled_from([None, "s0"])))


@pytest.mark.simulated
@quick
@given(scattered_meshes())
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    assert mesh.size == len(mesh.ranks) == math.prod(mesh.shape)
    points = list(mesh.points())
    assert [mesh.rank(point) for point in points] == list(mesh.ranks)
    assert [mesh.coordinates(rank) for rank in mesh.ranks] == points
    assert [tuple(point.values()) for point in points] == sorted(tuple(point.values()) for point in points)  # row-major


@pytest.mark.simulated
@quick
@given(scattered_meshes(), st.data())
def test_a_group_differs_along_its_axis_alone(mesh: Mesh, data: st.DataObject) -> None:
    rank, axis = data.draw(st.sampled_from(mesh.ranks)), data.draw(st.sampled_from(mesh.names))
    here = mesh.coordinates(rank)
    alike = [r for r in mesh.ranks if all(mesh.coordinates(r)[a] == here[a] for a in mesh.names if a != axis)]
    assert mesh.group(rank, axis) == tuple(sorted(alike, key=lambda r: mesh.coordinates(r)[axis]))
    assert {mesh.group(member, axis) for member in alike} == {mesh.group(rank, axis)}


@pytest.mark.simulated
@quick
@given(scattered_meshes())
def test_equal_meshes_hash_alike_and_repr_makes_them_again(mesh: Mesh) -> None:
    again = eval(repr(mesh))
    assert again == mesh and hash(again) == hash(mesh)
    assert again != Mesh(mesh.sizes, ranks=[rank + 100 for rank in mesh.ranks], name=mesh.name)


def test_the_last_axis_varies_fastest() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert str(mesh) == "dp=2 tp=3"
    assert mesh.coordinates(4) == {"dp": 1, "tp": 1}
    assert mesh.group(4, "tp") == (3, 4, 5) and mesh.group(4, "dp") == (1, 4)
    assert mesh.count(("dp", "tp")) == 6 and mesh.count(()) == 1


def test_a_mesh_without_axes_is_one_rank() -> None:
    mesh = Mesh()
    assert (mesh.size, mesh.ranks, mesh.coordinates(0), mesh.rank({})) == (1, (0,), {}, 0)
    with pytest.raises(ValueError, match="its axes are none"):
        mesh.check_axis("dp")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mesh(dp=0), "axis 'dp' has size 0; the size of an axis is an integer ≥ 1"),
        (lambda: Mesh(dp=-2), "axis 'dp' has size -2; the size of an axis is an integer ≥ 1"),
        (lambda: Mesh(dp=True), "axis 'dp' has size True; the size of an axis is an integer ≥ 1"),
        (lambda: Mesh(dp=2.0), "axis 'dp' has size 2.0; the size of an axis is an integer ≥ 1"),
        (
            lambda: Mesh({"d p": 2}),
            "axis name 'd p' is not an identifier; use letters, digits and '_', as in Mesh(dp=2)",
        ),
        (lambda: Mesh({"?": 2}), "axis name '?' is not an identifier"),
        (lambda: Mesh(dp=2, name="s 0"), "stage name 's 0' is not an identifier"),
        (
            lambda: Mesh(dp=2, tp=2, ranks=[0, 1, 2, 2]),
            "dp=2 tp=2 needs 4 different ranks, but rank 2 is given twice: [0, 1, 2, 2]",
        ),
        (
            lambda: Mesh(dp=4, ranks=[0, 7, 7, 7]),
            "dp=4 needs 4 different ranks, but rank 7 is given 3 times: [0, 7, 7, 7]",
        ),
        (
            lambda: Mesh(dp=2, tp=2, ranks=[0, 1, 3, 2]),
            "the ranks of dp=2 tp=2 do not ascend along tp: 2 comes after 3 in [0, 1, 3, 2]; "
            "give them in ascending order along each axis, as in ranks=[0, 1, 2, 3]",
        ),
        (
            lambda: Mesh(dp=2, tp=2, ranks=[4, 5, 0, 7]),
            "the ranks of dp=2 tp=2 do not ascend along dp: 0 comes after 4 in [4, 5, 0, 7]; "
            "give them in ascending order along each axis, as in ranks=[0, 4, 5, 7]",
        ),
        (lambda: Mesh(ranks=[0, 1]), "a mesh without axes needs 1 different ranks, got 2: [0, 1]"),
        (
            lambda: Mesh({"dp": 2}, dp=3),
            "axis 'dp' is given twice, with the sizes 2 and 3; give it once, as in Mesh(dp=2, tp=2)",
        ),
        (lambda: Mesh(dp="2"), "axis 'dp' has size '2'; the size of an axis is an integer ≥ 1"),
        (
            lambda: Mesh(dp=2, ranks=["a", "b"]),
            "rank 'a' is not an integer ≥ 0; leave the ranks out, as in Mesh(dp=2, tp=2), or give ranks=[0, 1]",
        ),
        (lambda: Mesh(dp=2, ranks=[0, -1]), "rank -1 is not an integer ≥ 0"),
        (lambda: Mesh(dp=2, ranks=[0, True]), "rank True is not an integer ≥ 0"),
        (lambda: Mesh(dp=2, ranks=[0, 1.0]), "rank 1.0 is not an integer ≥ 0"),
        (lambda: Mesh(dp=2).check_axis(["dp"]), "the mesh (dp=2) has no axis ['dp']; its axes are dp"),
        (lambda: Mesh(dp=2, ranks=[0, 1, 2]), "dp=2 needs 2 different ranks, got 3: [0, 1, 2]"),
        (
            lambda: Mesh(dp=2, tp=4).check_axis("tpp"),
            "the mesh (dp=2 tp=4) has no axis 'tpp'; its axes are dp, tp; did you mean 'tp'?",
        ),
        (lambda: Mesh(dp=2).group(0, "tp"), "the mesh (dp=2) has no axis 'tp'; its axes are dp"),
        (lambda: Mesh(dp=2).coordinates(2), "rank 2 is not on the mesh (dp=2), whose ranks are 0 1"),
        (lambda: Mesh(dp=2).coordinates("0"), "rank '0' is not on the mesh (dp=2), whose ranks are 0 1"),
        (
            lambda: Mesh(dp=6, ranks=[0, 1, 2, 3, 8, 9]).group(4, "dp"),
            "rank 4 is not on the mesh (dp=6), whose ranks are 0-3 8 9",
        ),
        (lambda: Mesh(dp=2).rank({"dp": 2}), "coordinate dp=2 is outside the mesh (dp=2)"),
        (lambda: Mesh(dp=2).rank({"dp": -1}), "coordinate dp=-1 is outside the mesh (dp=2)"),
        (lambda: Mesh(dp=2, tp=2).rank({"dp": 1}), "coordinates {'dp': 1} lack the axis 'tp' of the mesh (dp=2 tp=2)"),
    ],
)
def test_errors_name_the_offender_and_the_remedy(make, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mesh(2, 2), "Mesh(2, 2) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)"),
        (lambda: Mesh(4), "Mesh(4) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)"),
        (lambda: Mesh((2, 2)), "Mesh((2, 2)) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)"),
        (lambda: Mesh([]), "Mesh([]) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)"),
        (
            lambda: Mesh([("dp", 2)]),
            "Mesh([('dp', 2)]) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)",
        ),
        (
            lambda: Mesh({"dp": 2}, {"tp": 2}),
            "Mesh({'dp': 2}, {'tp': 2}) gives sizes without names; name the axes, as in Mesh(dp=2, tp=2)",
        ),
        (lambda: Mesh({1: 2}), "axis name 1 is not a string; name the axes, as in Mesh(dp=2, tp=2)"),
        (
            lambda: Mesh(dp=2, name=3),
            "name=3 is not a string; it names a stage, as in Mesh(dp=2, tp=2, name='first') (an axis called 'name' is "
            "Mesh({'name': 2}))",
        ),
        (
            lambda: Mesh(dp=2, ranks=2),
            "ranks=2 is not a list of ranks; leave it out, as in Mesh(dp=2, tp=2), or give ranks=[0, 1]",
        ),
        (
            lambda: Mesh(dp=2, ranks="ab"),
            "ranks='ab' is not a list of ranks; leave it out, as in Mesh(dp=2, tp=2), or give ranks=[0, 1]",
        ),
        (
            lambda: Mesh(dp=2, ranks={0, 1}),
            "ranks={0, 1} is not a list of ranks; leave it out, as in Mesh(dp=2, tp=2), or give ranks=[0, 1]",
        ),
    ],
)
def test_wrong_types(make, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value) == text


def test_integers_of_numpy_become_ints() -> None:
    mesh = Mesh(dp=np.int64(2), ranks=np.array([1, 3]))
    assert mesh == Mesh(dp=2, ranks=[1, 3])
    assert {type(number) for number in (*mesh.shape, *mesh.ranks)} == {int}
    with pytest.raises(ValueError, match="axis 'dp' has size"):
        Mesh(dp=np.bool_(True))


def test_no_near_name_is_offered_where_none_is_near() -> None:
    with pytest.raises(ValueError, match=r"its axes are dp, tp$"):
        Mesh(dp=2, tp=2).check_axis("expert")


def test_a_mistyped_size_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"^dp=1000000000 tp=2 has 2,000,000,000 ranks; a mesh has at most "):
        Mesh(dp=10**9, tp=2)
