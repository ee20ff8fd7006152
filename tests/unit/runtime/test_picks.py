"""Values are picked from a row by name: as from a dict of which the first value of a name counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.picks import pick

NAMES = st.lists(st.sampled_from("abcdef"), max_size=6)


@given(NAMES, NAMES)
def test_picks_are_those_of_a_dict(names: list[str], row: list[str]) -> None:
    values = list(range(len(row)))
    first = dict(zip(reversed(row), reversed(values), strict=True))
    assert pick(names, row)(values) == [first.get(name) for name in names]


def test_another_number_of_values() -> None:
    with pytest.raises(ValueError, match="3 values, and 2 names: x, y"):
        pick(["x", "y"], ["x", "y"])([1, 2, 3])
