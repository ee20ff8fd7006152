"""A function on the pieces of real ranks."""

from __future__ import annotations

import local_maps
from processes import ranks


def test_a_function_on_pieces_on_processes() -> None:
    ranks(2).run(local_maps.equals_the_function_on_processes)
