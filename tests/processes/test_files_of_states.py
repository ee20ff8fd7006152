"""Real processes: one file for one device, and a warning where one rank writes its pieces."""

from __future__ import annotations

import files_of_states
import pytest
from processes import ranks


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_file_for_one_device(sizes: dict[str, int]) -> None:
    assert ranks(2).run(files_of_states.one_file, sizes) == [True, True]


def test_a_file_of_pieces_is_a_warning() -> None:
    assert ranks(2).run(files_of_states.pieces) == [[[files_of_states.SAID], [], [], [], []]] * 2
