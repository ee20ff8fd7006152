"""On real processes, the memory of a pipelined step does not grow with the micro-batches, and is what is predicted."""

from __future__ import annotations

import pipelined_memory
import pytest
from processes import ranks


@pytest.mark.parametrize(
    "policy",
    [
        "1f1b",
        "zb-h1",
        pytest.param("eager-1f1b", marks=pytest.mark.sweep("1f1b has the same passes")),
        pytest.param("zb-v", marks=pytest.mark.sweep("zb-h1 splits the backward, too")),
    ],
)
def test_memory_does_not_grow(policy: str) -> None:
    for few, many in ranks(2).run(pipelined_memory.used, policy, [5, 12]):
        assert abs(many[0] - few[0]) < pipelined_memory.BOUNDARY
        assert many[2] == few[2]  # buffers for received messages
        for allocated, predicted, _ in (few, many):
            assert allocated == pytest.approx(predicted, rel=0.1)


def test_memory_grows_where_a_policy_keeps_all() -> None:
    for few, many in ranks(2).run(pipelined_memory.used, "gpipe", [5, 12]):
        assert many[0] - few[0] >= 7 * pipelined_memory.BOUNDARY
