"""One capture for many sizes, on processes."""

from __future__ import annotations

import calls_of_sizes
import pytest
from processes import ranks


@pytest.mark.parametrize(("name", "count"), [("mlp", 2), ("llama", 2), ("bert", 4)])
def test_one_capture_on_processes(name: str, count: int) -> None:
    ranks(count).run(calls_of_sizes.one_capture_serves_many_sizes, name, count)


def test_pieces_of_many_sizes() -> None:
    ranks(2).run(calls_of_sizes.pieces_of_many_sizes)
