"""Hosts: which ranks share one, their names, and whether they are even."""

from __future__ import annotations

import pytest

from autopar.ir.hosts import Hosts

pytestmark = pytest.mark.fast


def test_ranks_with_one_identity_share_a_host() -> None:
    hosts = Hosts.of([("0", "alpha"), ("0", "alpha"), ("1", "beta"), ("1", "beta")])
    assert hosts == Hosts(("alpha", "beta"), (0, 0, 1, 1))
    assert len(hosts) == 2 and hosts.name(2) == "beta" and hosts.ranks(1) == (2, 3)


def test_nodes_with_one_host_name_are_told_apart() -> None:
    hosts = Hosts.of([("0", "alpha"), ("1", "alpha"), ("2", "beta")])
    assert hosts.names == ("alpha (node 0)", "alpha (node 1)", "beta")


@pytest.mark.parametrize(
    "of_rank, per_host",
    [((0, 0, 1, 1), 2), ((0, 0, 0), 3), ((0, 1, 2), 1), ((0, 0, 1), None), ((0, 1, 0, 1), None), ((0, 1, 1, 0), None)],
)
def test_hosts_are_even_where_each_has_as_many_ranks_that_follow_each_other(
    of_rank: tuple[int, ...], per_host: int | None
) -> None:
    names = tuple("abc"[: max(of_rank) + 1])
    assert Hosts(names, of_rank).ranks_per_host == per_host


def test_whole_hosts_have_all_their_ranks() -> None:
    hosts = Hosts(("alpha", "beta"), (0, 0, 1, 1))
    assert hosts.whole([2, 3, 0]) == ("beta",) and hosts.whole([1]) == ()
