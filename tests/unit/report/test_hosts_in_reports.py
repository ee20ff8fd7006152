"""What reports say of hosts: which axes cross them, the bytes between them, and why collectives run at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import Mesh, Program
from autopar.costs.machine import Level, Link, machine
from autopar.costs.prices import crosses_hosts
from autopar.ir.hosts import Hosts
from autopar.report.hosts import about_hosts, bytes_between_hosts
from autopar.report.transfers import transfers_of

pytestmark = pytest.mark.fast

FOUR = replace(machine("generic"), ranks_per_node=4)
RACKS = replace(FOUR, levels=(Level("rack", 8, Link(1e-4, 1e9)),))


def test_the_axes_that_cross_hosts() -> None:
    assert about_hosts(Mesh(dp=4), FOUR) == [] and not crosses_hosts(Mesh(dp=2, tp=2), FOUR)
    assert about_hosts(Mesh(dp=8), FOUR) == ["dp crosses hosts (2 hosts of 4 ranks)"]
    (told,) = about_hosts(Mesh(a=2, b=2, c=2, d=2), FOUR)
    assert told == "a and b cross hosts (4 hosts of 4 ranks); c and d stay within a host"
    for mesh in (Mesh(dp=6), Mesh(a=2, dp=6)):
        assert about_hosts(mesh, FOUR)[1].startswith("the groups along dp have unequal numbers of ranks on their hosts")
    assert len(about_hosts(Mesh(dp=6, tp=2), FOUR)) == 1
    assert about_hosts(Mesh(dp=4, tp=4), RACKS) == [
        "dp crosses hosts (4 hosts of 4 ranks); tp stays within a host",
        "dp crosses racks (2 racks of 8 ranks); tp stays within a rack",
    ]


def test_the_hosts_of_a_job_are_named_where_they_are_uneven() -> None:
    even = Hosts(("a", "b"), (0, 0, 1, 1))
    assert about_hosts(Mesh(dp=4), FOUR, even) == ["dp crosses hosts (2 hosts of 2 ranks)"]
    crossing, why = about_hosts(Mesh(dp=2, tp=2), FOUR, Hosts(("a", "b"), (0, 0, 0, 1)))
    assert crossing == "dp and tp cross hosts (2 hosts of 1 to 3 ranks)"
    assert why.startswith("hosts have different numbers of ranks (a has 3 and b has 1): collectives run at once")
    crossing, why = about_hosts(Mesh(dp=2, tp=2), FOUR, Hosts(("a", "b"), (0, 1, 0, 1)))
    assert crossing == "tp crosses hosts (2 hosts of 2 ranks); dp stays within a host"
    assert why.startswith(
        "the ranks of a host do not follow each other (a has 0 2 and b has 1 3): collectives run at once"
    )


PROGRAM = """\
program explicit on dp=2 tp=4
  a : f32[64 8] +dp = input
  b : f32[64/tp 8] = input
  c : bf16[64/dp 8] = input
  d : f32[64/dp 8/tp] = input
  e : i16[64 8] +dp = input
forward:
  a_dp : f32[64 8] = all_reduce(a, dp)
  b_tp : f32[64 8] = all_gather(b, 0, tp)
  c_dp : bf16[64 8] = all_gather(c, 0, dp)
  d_relaid : f32[64/tp 8/dp] = redistribute(d, ((tp,), (dp,)))
  e_dp : i16[64/dp 8] = reduce_scatter(e, 0, dp)
  return (a_dp, b_tp, c_dp, d_relaid, e_dp)
"""


def test_bytes_between_hosts_are_counted() -> None:
    """Over dp: the largest side, of an all-reduce twice, and what a rank receives of an exchange; none over tp."""
    program = Program.parse(PROGRAM)
    lacked = 64 * 8 // 8 * 4  # of its new piece a rank that moves holds nothing
    assert (
        bytes_between_hosts(program, FOUR) == 2 * 64 * 8 * 4 + 64 * 8 * 2 + lacked + 64 * 8 * 4
    )  # i16 is reduced as i32
    assert bytes_between_hosts(program, replace(FOUR, ranks_per_node=8)) == 0
    found = transfers_of(program, "cpu", FOUR)
    assert found.bytes_between_hosts == bytes_between_hosts(program, FOUR)
    assert str(found).endswith(f"{found.bytes_between_hosts:,} bytes of a rank's collectives are between hosts\n")
    assert "between hosts" not in str(transfers_of(program))
