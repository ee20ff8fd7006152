"""Sub-axes: which ranks they name, how values are split over them, and their text."""

from __future__ import annotations

import re

import pytest

from autopar import Mesh, Program
from autopar.errors import EditError, TextError, VerifyError
from autopar.ir.layout import DistAttr
from autopar.ir.mesh import ranks_by_group
from autopar.ir.subaxes import across, cut_towards, index_along, joined, overlap, sub_axis, within

pytestmark = pytest.mark.fast

EIGHT = Mesh(dp=8)


def test_a_name_says_which_indices() -> None:
    assert (within("dp", 4), across("dp", 4)) == ("dp.within4", "dp.across4")
    assert sub_axis("dp.within4") == ("dp", 1, 4) and sub_axis("dp.across4") == ("dp", 4, None)
    assert sub_axis("dp.across4.within2") == ("dp", 4, 2) and sub_axis("dp.within4.across2") == ("dp", 2, 2)
    assert [sub_axis(name) for name in ("dp", "dp.4", "dp.within0", "dp.within4.within3", ".within4")] == [None] * 5


def test_the_index_of_a_rank() -> None:
    at = {"dp": 13, "tp": 1}
    found = [index_along(name, at) for name in ("dp", "dp.within4", "dp.across4", "dp.across4.within2", "dp.across8")]
    assert found == [13, 1, 3, 1, 1]
    with pytest.raises(KeyError):
        index_along("pp", at)


def test_a_mesh_has_the_sub_axes_that_divide_its_axes() -> None:
    assert [EIGHT.sizes[name] for name in ("dp.within4", "dp.across4", "dp.across2.within2")] == [4, 2, 2]
    assert "dp.within4" in EIGHT.sizes and "dp.within3" not in EIGHT.sizes and "tp.within2" not in EIGHT.sizes
    assert EIGHT.names == ("dp",) and list(EIGHT.sizes) == ["dp"]
    with pytest.raises(ValueError, match=re.escape("has no sub-axis 'dp.within3': 8 ranks are not divisible by 3")):
        EIGHT.check_axis("dp.within3")


def test_the_groups_of_sub_axes() -> None:
    mesh = Mesh(dp=4, tp=2)
    assert ranks_by_group(mesh, ("dp.within2",)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert ranks_by_group(mesh, ("dp.across2", "tp")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    for axes in (("dp.within2",), ("dp.across2",), ("dp.across2", "tp"), ("dp",), ("tp", "dp.within2")):
        assert {mesh.group(rank, axes) for rank in mesh.ranks} == {*ranks_by_group(mesh, axes)}
    assert Mesh(dp=4, ranks=[0, 3, 5, 9]).group(5, "dp.within2") == (5, 9)


def test_both_halves_are_the_axis() -> None:
    assert cut_towards(("tp", "dp"), "dp.across4.within2") == (
        "tp",
        "dp.across4.across2",
        "dp.across4.within2",
        "dp.within4",
    )
    assert cut_towards(("tp",), "dp.within4") == ("tp",) and cut_towards(("dp",), "dp") == ("dp",)
    assert joined(("tp", "dp.across4.across2", "dp.across4.within2", "dp.within4")) == ("tp", "dp")
    assert joined(("dp.within4", "dp.across4")) == ("dp.within4", "dp.across4")  # another order of the pieces
    halves = DistAttr.split(("dp.across4", "dp.within4"))
    assert halves.normalize((64,), EIGHT) == DistAttr.split("dp")
    assert halves.normalize((10,), EIGHT) == halves  # 2 2 1 0 of each five, and of ten over dp 2 2 2 2 2 0 0 0


def test_sub_axes_that_share_ranks_overlap() -> None:
    assert overlap("dp", "dp.within4") and overlap("dp.within4", "dp.within2") and overlap("dp.across2", "dp.across4")
    assert not overlap("dp.within4", "dp.across4") and not overlap("dp.within4", "tp.within4")
    assert not overlap("dp.across4.within2", "dp.within4") and overlap("dp.across2.within4", "dp.within4")


BY_LEVELS = """\
program explicit on dp=8
  x : f32[64 6] +max:dp = input
forward:
  a : f32[64/dp.within4 6] +max:dp.across4 = reduce_scatter(x, 0, dp.within4, op=max)
  b : f32[64/dp.within4 6] = all_reduce(a, dp.across4, op=max)
  c : f32[64 6] = all_gather(b, 0, dp.within4)
  return c
"""


def test_a_program_with_sub_axes_is_read_and_verified() -> None:
    program = Program.parse(BY_LEVELS)
    program.verify()
    assert str(program) == BY_LEVELS


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("all_reduce(a, dp.across4, op=max)", "all_reduce(a, dp, op=max)", "the value is not pending max over dp"),
        ("64/dp.within4 6] = all", "64/dp.within2 6] = all", "64/dp.within2"),
    ],
)
def test_a_wrong_sub_axis_is_refused(before: str, after: str, text: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(text)):
        Program.parse(BY_LEVELS.replace(before, after)).verify()


def test_a_value_is_not_split_twice_by_one_axis() -> None:
    with pytest.raises(VerifyError, match=r"the axis dp\.within4 is used twice on one value"):
        Program.parse(
            "program explicit on dp=8\n  x : f32[64/dp 8/dp.within4] = input\nforward:\n  return x\n"
        ).verify()
    with pytest.raises(TextError, match=re.escape("no sub-axis 'dp.within3'")):
        Program.parse("program explicit on dp=8\n  x : f32[64/dp.within3] = input\nforward:\n  return x\n")
    program = Program.parse("program explicit on dp=8\n  x : f32[64/dp 8] = input\nforward:\n  return x\n")
    with pytest.raises(EditError, match=r"the value already uses the axis dp\.within4"), program.edit() as edit:
        edit.slice(program.node("x"), 1, "dp.within4", before=program.output)
