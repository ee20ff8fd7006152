"""The price of messages between stages: by the links between the hosts of sender and receiver."""

from __future__ import annotations

import pytest

from autopar.costs.machine import Level, Link, Machine
from autopar.step.pipelined.reports.times import message_price

pytestmark = pytest.mark.fast

ON = Machine("plain", "any", 4, Link(1.0, 1.0), Link(10.0, 0.1), Link(0.5, 2.0),
             levels=(Level("rack", 8, Link(100.0, 0.01)),))  # fmt: skip


@pytest.mark.parametrize(
    ("sends", "seconds"),
    [
        ({0: {1: 100}, 1: {}}, 1 + 100),
        ({0: {4: 100}}, 10 + 1000),
        ({0: {1: 5000}, 1: {4: 100}}, 1 + 5000),  # the longest, and not the farthest
        ({0: {1: 500}, 1: {4: 100}}, 10 + 1000),
        ({7: {8: 1}}, 100 + 100),
        ({0: {}}, 0),
    ],
)
def test_the_slowest_message_counts(sends: dict[int, dict[int, int]], seconds: float) -> None:
    assert message_price(sends, ON) == seconds
