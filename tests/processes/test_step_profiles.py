"""On real gloo processes, profiled steps have the numbers of others, and one trace shows all ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import step_profiles
from processes import ranks

CASES: list[tuple[str, dict[str, int], dict[str, Any], bool]] = [
    ("mlp", {"dp": 2}, {"microbatches": 2}, True),
    ("llama", {"dp": 2, "tp": 2}, {"zero": 3}, False),
]


@pytest.mark.parametrize(("name", "sizes", "options", "by_loop"), CASES, ids=str)
def test_profiled(name: str, sizes: dict[str, int], options: dict[str, Any], by_loop: bool, tmp_path: Path) -> None:
    ranks(math.prod(sizes.values())).run(step_profiles.profiled, name, sizes, options, by_loop, str(tmp_path))


def test_profiled_on_stages(tmp_path: Path) -> None:
    ranks(4).run(step_profiles.profiled_stages, "pp2 tp2", "1f1b", str(tmp_path))
