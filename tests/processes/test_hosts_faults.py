"""Ten runs of the campaign ``faults``, one of each kind of fault that ends in an error, and some that do not."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from host_faults import KINDS, End, Fault, right_losses, run
from host_jobs import forks
from network_hosts import namespaces_are_allowed

SEEDS = (0, 1, 2, 14, 15, 16, 18, 19, 20, 21)

pytestmark = pytest.mark.skipif(not namespaces_are_allowed(), reason="cut and slow need network namespaces")


@pytest.fixture(scope="module")
def ends() -> dict[int, Future[End]]:
    """The runs, some at once, for most of them wait."""
    forks()
    right_losses()
    with ThreadPoolExecutor(4) as pool:
        return {seed: pool.submit(run, seed) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{seed} {Fault.of(seed).kind}")
def test_a_fault_ends_right_or_in_one_error(ends: dict[int, Future[End]], seed: int) -> None:
    end = ends[seed].result()
    assert end.outcome in ("right", "one error"), f"{end.outcome}\n{end.printed}"


def test_the_seeds_have_almost_all_kinds() -> None:
    assert len({Fault.of(seed).kind for seed in SEEDS}) >= len(KINDS) - 1
