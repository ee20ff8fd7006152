"""Any order on real gloo processes has the numbers of ``today``, and those of simulated ranks: bit for bit on two."""

from __future__ import annotations

import math
from typing import Any

import calls_of_orders
import pytest
from processes import ranks

from autopar.scheduling import POLICIES, ByteScheduler

TINY = [ByteScheduler(64, 256), ByteScheduler(40, 100, fused=False)]  # bytes: many chunks, and messages of several
EVERY = [
    *(name for name in POLICIES if name not in ("today", "priorities")),
    *TINY,
    {"*loss*": 1, "*grad_sum": 0},
]  # fmt: skip


SIX = pytest.mark.sweep("six processes; simulated ranks have this mesh too")


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, pytest.param({"dp": 3, "tp": 2}, marks=SIX)], ids=str)
def test_transfers(sizes: dict[str, int]) -> None:
    """Every kind, dtype and dim in chunks and messages: what simulated ranks hold."""
    chunks = ranks(math.prod(sizes.values())).run(calls_of_orders.transfers_in_any_order, sizes, range(12))
    assert min(chunks) > 40


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.sweep("random transfers have three ranks"))])
def test_random_models(count: int) -> None:
    compared = ranks(count).run(calls_of_orders.random_calls, range(24))
    assert len(set(compared)) == 1 and compared[0] >= 4


@pytest.mark.parametrize(("name", "sizes", "options", "overlaps"), [
    ("mlp", {"dp": 2}, {"zero": 1, "grad_norm": True}, EVERY),
    ("mlp", {"dp": 2}, {"zero": 3, "microbatches": 3, "clip_norm": 0.5}, [*TINY, "longest-tail"]),
    ("mlp", {"dp": 3}, {"zero": 2, "microbatches": 2}, TINY),
    *(
        pytest.param(*case, marks=pytest.mark.sweep("each option, policy and mesh occurs in another case"))
        for case in [
            ("mlp", {"dp": 2, "tp": 2}, {"zero": 1}, EVERY),
            ("mlp", {"dp": 2}, {"zero": 2, "microbatches": 2, "amp": "fp16-O2"}, [*TINY, "longest-tail"]),
            ("mlp", {"dp": 2}, {"zero": 1, "amp": "bf16-O2"}, TINY),
            ("mlp", {"tp": 2}, {"ema": 0.9}, TINY),
            ("llama", {"dp": 2}, {"zero": 3, "recompute": "blocks"}, TINY),
            ("llama sequence", {"dp": 2, "tp": 2}, {"zero": 2, "microbatches": 2}, TINY),
        ]
    ),
], ids=str)  # fmt: skip
def test_steps(name: str, sizes: dict[str, int], options: dict[str, Any], overlaps: list[Any]) -> None:
    """Under policies and in random orders: losses, norms, parameters and states."""
    run = ranks(math.prod(sizes.values())).run
    run(calls_of_orders.steps_in_any_order, name, sizes, options, overlaps, range(3))


@pytest.mark.parametrize("overlap", [TINY[1], "longest-tail"], ids=str)
def test_simulated_steps_are_those_of_processes(overlap: Any) -> None:
    case = (overlap, "mlp", {"dp": 2}, {"zero": 1, "microbatches": 2})
    alone = calls_of_orders.step_in(*case, simulated=True)
    for found in ranks(2).run(calls_of_orders.step_in, *case):
        # products are computed by other numbers of threads there
        assert not calls_of_orders.alike(found, alone, 1e-12)


@pytest.mark.parametrize("call", ["a_call_in_chunks", "nan_in_a_chunk", "two_models", "other_orders_on_one_rank"])
def test_calls(call: str) -> None:
    ranks(2).run(getattr(calls_of_orders, call))
