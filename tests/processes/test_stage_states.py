"""Parameters and their state on the stages of a mesh."""

from __future__ import annotations

import calls_of_stages
import pytest
from calls_of_stages import MESHES
from processes import ranks


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_move_between_stages(mesh: str) -> None:
    ranks(4).run(calls_of_stages.moved, MESHES[mesh])
