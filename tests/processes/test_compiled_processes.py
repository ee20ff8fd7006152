"""On real gloo processes, compiled steps have the numbers and the order of collectives of uncompiled ones."""

from __future__ import annotations

from typing import Any

import compiled_steps
import torch
from processes import ranks

CASES: list[tuple[dict[str, int], Any, torch.dtype, float, dict[str, Any]]] = [
    ({"dp": 2}, "ddp", torch.float64, 1e-10, {"microbatches": 2, "zero": 1}),
    ({"tp": 2}, {"*.up.weight": ("tp", None), "*.down.weight": (None, "tp")}, torch.float32, 1e-6, {}),
]


def test_compiled() -> None:
    found = ranks(2).run(compiled_steps.on_ranks, CASES)
    assert found[0] == found[1], "all ranks have the same regions"


def test_compiled_stages() -> None:
    ranks(2).run(compiled_steps.alike_on_stages)
