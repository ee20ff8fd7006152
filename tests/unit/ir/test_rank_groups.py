"""Groups of ranks as arrays, and ranks in short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import meshes

from autopar.ir.mesh import positions_by_group, ranges_of, ranks_by_group


@given(meshes(max_ranks=24), st.data())
def test_the_groups_are_those_of_each_rank(mesh, data) -> None:
    axes = tuple(data.draw(st.permutations(mesh.names))[: data.draw(st.integers(0, len(mesh.names)))])
    groups = ranks_by_group(mesh, axes)
    assert sorted(groups) == sorted({mesh.group(rank, axes) for rank in mesh.ranks})
    assert positions_by_group(mesh, axes).shape == (mesh.size // mesh.count(axes), mesh.count(axes))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((5,), "5"), ((0, 1), "0 1"), ((0, 1, 2, 3, 8, 9), "0-3 8 9"), (range(1, 4096, 8), "1-4089:8"),
     ((0, 2, 4, 5, 6, 7), "0-4:2 5-7"), ((3, 7), "3 7")],
)  # fmt: skip
def test_ranges(ranks, text: str) -> None:
    assert ranges_of(list(ranks)) == text


@given(st.sets(st.integers(0, 60)))
def test_ranges_name_each_rank_once(ranks: set[int]) -> None:
    found = []
    for word in ranges_of(sorted(ranks)).split():
        rows, _, step = word.partition(":")
        first, _, last = rows.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    assert found == sorted(ranks)
