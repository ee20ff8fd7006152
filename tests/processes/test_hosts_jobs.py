"""Jobs of torchrun on two hosts, which are network namespaces: the losses of one process, or one message a host that
names the host and its ranks, and no process is left after 30 s."""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_jobs import HostJob, described
from host_ranks import SKEW, losses_of_one_process
from network_hosts import Host, hosts, namespaces_are_allowed

LIMIT = 30.0  # seconds after a fault
ENDLESS = ("--steps", "1000000")
ALPHA, BETA = r"host alpha \(ranks 0 1\)", r"host beta \(ranks 2 3\)"
NO_SIGN = (
    rf"autopar: {BETA} has given no sign of life for \d+ s: its network or the host is lost; rank \d was last seen "
)
NO_ANSWER = (
    rf"autopar: {BETA} has lost {ALPHA}, which holds the store of the job and has given no answer for \d+ s; rank \d "
    rf"on host beta was "
)

linked = pytest.mark.skipif(not namespaces_are_allowed(), reason="links need the rights to make network namespaces")


@pytest.fixture
def both() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def ends(job: HostJob, *patterns: str) -> None:
    """Check that all processes end in time, and that each host says one message. ``patterns``: of each host."""
    seconds = job.seconds_until_end(LIMIT)
    assert len(seconds) == len(job.hosts), f"{seconds}{described(job)}"
    for host, pattern in zip(job.hosts, patterns, strict=True):
        said = job.messages(host)
        assert len(said) == 1, described(job)
        assert re.match(pattern, said[0]), described(job)


def finishes(job: HostJob, steps: int) -> None:
    """Check that a job ends well, with the losses of one process on all ranks."""
    seconds = job.seconds_until_end(90.0)
    assert len(seconds) == len(job.hosts), f"{seconds}{described(job)}"
    assert [*job.codes().values()] == [0] * len(job.hosts), described(job)
    expected = losses_of_one_process(steps)
    for rank in range(4):
        found = job.losses(rank)
        assert sorted(found) == list(range(steps)), described(job)
        assert all(math.isclose(found[k], expected[k], rel_tol=1e-10) for k in found), (found, expected)


def test_two_agents_train_as_one_process(both: list[Host], tmp_path: Path) -> None:
    """The commands are those of a user. The clocks of the hosts differ by an hour."""
    job = HostJob(both, tmp_path, "--steps", "8", forked=False, variables={"beta": {SKEW: "3600"}})
    finishes(job, 8)


@linked
def test_a_link_that_goes_down_in_a_step(both: list[Host], tmp_path: Path) -> None:
    """Nothing arrives, and TCP says nothing. The launcher of beta waits for the store on alpha, and is ended."""
    job = HostJob(both, tmp_path, *ENDLESS)
    job.wait_for_steps(3)
    both[1].cut()
    ends(job, NO_SIGN, NO_ANSWER)


@linked
def test_a_link_that_goes_down_while_all_ranks_read_data(both: list[Host], tmp_path: Path) -> None:
    """No rank waits for another: the kernels of the hosts tell it."""
    job = HostJob(both, tmp_path, *ENDLESS, "--pause", "1000")
    job.wait_for_steps(1)
    both[0].cut("host")
    ends(job, NO_SIGN, NO_ANSWER)


@linked
def test_a_link_that_goes_down_in_a_save(both: list[Host], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    given = ("--steps", "9", "--every", "3", "--checkpoints", str(checkpoints))
    job = HostJob(both, tmp_path / "first", *given, "--slow-save", "6")
    job.wait_for_steps(6)
    _wait_for(tmp_path / "first" / "saving-6")
    both[1].cut()
    ends(job, NO_SIGN, NO_ANSWER)
    both[1].heal()
    again = HostJob(both, tmp_path / "again", *given, port=29501)
    seconds = again.seconds_until_end(90.0)
    assert len(seconds) == 2, described(again)
    expected = losses_of_one_process(9)
    found = again.losses()
    assert min(found) in (3, 6), "no more than one interval is lost"
    assert sorted(found) == list(range(min(found), 9)), described(again)
    assert all(math.isclose(found[k], expected[k], rel_tol=1e-10) for k in found)


@linked
def test_a_host_that_comes_back_in_time(both: list[Host], tmp_path: Path) -> None:
    job = HostJob(both, tmp_path, "--steps", "30", "--pause", "0.05")
    job.wait_for_steps(3)
    both[1].cut()
    time.sleep(4.0)
    both[1].heal()
    finishes(job, 30)


@linked
def test_a_slow_link_is_only_slow(both: list[Host], tmp_path: Path) -> None:
    job = HostJob(both, tmp_path, "--steps", "30")
    job.wait_for_steps(3)
    both[1].slow("128kbit")
    finishes(job, 30)


def test_a_killed_launcher_leaves_no_rank(both: list[Host], tmp_path: Path) -> None:
    """Its ranks are orphans, and nobody else would end them."""
    job = HostJob(both, tmp_path, *ENDLESS)
    job.wait_for_steps(3)
    both[1].send(signal.SIGKILL, both[1].agents())
    name = "beta" if both[0].keeper is not None else r".* \(node 1\)"
    ends(
        job, *[rf"autopar: the launcher of host {name} \(ranks 2 3\) was lost \(killed or crashed\); rank \d was "] * 2
    )


def test_a_killed_rank_is_named_on_both_hosts(both: list[Host], tmp_path: Path) -> None:
    job = HostJob(both, tmp_path, *ENDLESS)
    job.wait_for_steps(3)
    both[1].send(signal.SIGKILL, [both[1].ranks()[3]])
    name = "beta" if both[0].keeper is not None else r".* \(node 1\)"
    ends(job, *[rf"autopar: rank 3 on host {name} was lost \(killed or crashed\); it was last seen "] * 2)


def test_a_job_with_restarts_goes_on_from_its_checkpoint(both: list[Host], tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    given = ("--steps", "30", "--every", "5", "--pause", "0.05", "--checkpoints", str(checkpoints))
    job = HostJob(both, tmp_path / "job", *given, options=("--max-restarts", "1"))
    job.wait_for_steps(12)
    both[1].send(signal.SIGKILL, [both[1].ranks()[3]])
    finishes(job, 30)


def _wait_for(path: Path) -> None:
    begun = time.monotonic()
    while not path.exists():
        assert time.monotonic() - begun < 60, path
        time.sleep(0.02)
