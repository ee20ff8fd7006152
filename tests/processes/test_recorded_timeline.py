"""On real gloo processes, a recorded step has the numbers of a step that is not recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import timelines
from processes import ranks

CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mlp", {"dp": 2}, {"microbatches": 2}),
    ("mlp", {"dp": 2}, {"across": True}),
    ("llama", {"dp": 2, "tp": 2}, {"zero": 3}),
]


@pytest.mark.parametrize(("name", "sizes", "options"), CASES, ids=str)
def test_recorded(name: str, sizes: dict[str, int], options: dict[str, Any], tmp_path: Path) -> None:
    ranks(math.prod(sizes.values())).run(timelines.recorded, name, sizes, options, str(tmp_path))
