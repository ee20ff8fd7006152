"""One capture for many sizes, on processes."""

from __future__ import annotations

from pathlib import Path

import calls_of_sizes
import pytest
from processes import ranks


@pytest.mark.parametrize(("name", "count"), [("mlp", 2), ("llama", 2), ("bert", 4)])
def test_one_capture_on_processes(name: str, count: int) -> None:
    ranks(count).run(calls_of_sizes.one_capture_serves_many_sizes, name, count)


def test_pieces_of_many_sizes() -> None:
    ranks(2).run(calls_of_sizes.pieces_of_many_sizes)


def test_one_rank_plans_a_second_size(tmp_path: Path) -> None:
    """The next start reads it, and the capture with symbols serves a third size on all ranks; nothing is searched."""
    for first in (True, False):
        (planned, captures), (read, others) = ranks(2).run(calls_of_sizes.second_sizes, str(tmp_path))
        assert planned == ([["trace", "search"], ["trace"], [], []] if first else [[]] * 4) and read == [[]] * 4
        assert captures == others == 2


def test_a_second_size_that_cannot_be_kept_is_captured_by_each(tmp_path: Path) -> None:
    """The first rank forgets what it has captured alone, so that all do the same."""
    (planned, captures), (read, others) = ranks(2).run(calls_of_sizes.second_sizes, str(tmp_path), True)
    assert planned == [["trace", "search"], ["trace"] * 2, [], []] and read == [[], ["trace"], [], []]
    assert captures == others == 2
