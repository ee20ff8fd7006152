"""The ranks of a start share a part of the launcher's store, however often each of them was started before."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from autopar.runtime.processes.job import store_of_start

pytestmark = pytest.mark.simulated


def started(port: int, ranks: int) -> list[bytes]:
    """What each rank reads of rank 0, in a start of so many ranks."""
    wait = datetime.timedelta(seconds=20)

    def rank(number: int) -> bytes:
        store = distributed.TCPStore("localhost", port, is_master=False, timeout=wait)
        own = store_of_start(store, number, ranks, 20.0)
        if number == 0:
            assert not own.check(["address"])  # nothing is left of the start before
            own.set("address", f"of {ranks}")
        return own.get("address")

    with ThreadPoolExecutor(ranks) as pool:
        return [*pool.map(rank, reversed(range(ranks)))]


def test_ranks_of_a_start_meet_whoever_was_lost_before() -> None:
    launcher = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for ranks in (4, 2, 4, 4, 1, 3):
        assert started(launcher.port, ranks) == [f"of {ranks}".encode()] * ranks
