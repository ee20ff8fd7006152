"""Real gloo processes: the user's own loop has the single-device numbers."""

from __future__ import annotations

import loops
import pytest
from processes import ranks

MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2 tp2": {"dp": 2, "tp": 2}, "tp4": {"tp": 4}}


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", loops.MODELS)
def test_ten_steps(name: str, sizes: dict[str, int]) -> None:
    count = 1
    for size in sizes.values():
        count *= size
    ranks(count).run(loops.ten_steps, name, sizes)
