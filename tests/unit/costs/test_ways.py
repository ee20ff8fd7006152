"""The ways of a collective over several hosts, by hand; and prices by the slowest link that a group crosses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.machine import Level, Link, Machine, machine
from autopar.costs.on_hosts import on_hosts
from autopar.costs.prices import group_price, price, step_price
from autopar.costs.symbolic import bandwidths, transfer_seconds
from autopar.costs.ways import BY_LEVELS, Part, collective_nanoseconds, way_nanoseconds, ways
from autopar.ir import transfers
from autopar.ir.hosts import Hosts
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType

pytestmark = pytest.mark.fast

# a second for a message and a byte inside a host, ten between hosts, a hundred between racks of two hosts
PLAIN = Machine("plain", "any", 4, Link(1.0, 1.0), Link(10.0, 0.1), Link(0.5, 2.0))
RACKS = replace(PLAIN, levels=(Level("rack", 8, Link(100.0, 0.01)),))
HOSTS = PLAIN.borders


def scatter(axis: str, less: int) -> Part:
    return Part("reduce_scatter", (axis,), less)


def gather(axis: str, less: int) -> Part:
    return Part("all_gather", (axis,), less)


def test_the_ways_over_two_hosts() -> None:
    mesh = Mesh(dp=8)
    inside, outside = "dp.within4", ("dp.across4",)
    assert ways("all_reduce", ("dp",), mesh, HOSTS) == (
        (scatter(inside, 1), Part("all_reduce", outside, 4), gather(inside, 1)),
    )
    assert ways("reduce_scatter", ("dp",), mesh, HOSTS) == ((scatter(inside, 1), scatter("dp.across4", 4)),)
    assert ways("all_gather", ("dp",), mesh, HOSTS) == ((gather("dp.across4", 4), gather(inside, 1)),)
    assert ways("all_to_all", ("dp",), mesh, HOSTS) == ()


def test_ways_of_several_axes() -> None:
    mesh = Mesh(dp=4, tp=2)
    assert ways("all_reduce", ("dp", "tp"), mesh, HOSTS) == (
        (scatter("tp", 1), scatter("dp.within2", 2), Part("all_reduce", ("dp.across2",), 4), gather("dp.within2", 2),
         gather("tp", 1)),
    )  # fmt: skip
    assert ways("all_reduce", ("tp",), mesh, HOSTS) == ()  # within a host
    assert ways("all_reduce", ("dp",), Mesh(dp=2, tp=4), HOSTS) == ()  # one rank on each host
    joint = ways("all_reduce", ("a", "b", "c"), Mesh(a=2, b=2, c=4), HOSTS)
    assert joint == ((scatter("c", 1), Part("all_reduce", ("a", "b"), 4), gather("c", 1)),)


def test_ways_over_racks() -> None:
    """At the border of hosts, of racks, or of both."""
    found = ways("all_reduce", ("dp",), Mesh(dp=16), RACKS.borders)
    assert [[part.axes for part in way if part.name == "reduce_scatter"] for way in found] == [
        [("dp.within4",)], [("dp.within8",)], [("dp.within4",), ("dp.across4.within2",)],
    ]  # fmt: skip
    assert found[2][2] == Part("all_reduce", ("dp.across4.across2",), 8)


@pytest.mark.parametrize(
    ("mesh", "per_host"),
    [
        (Mesh(dp=6), 4),  # four ranks and two
        (Mesh(dp=8, ranks=[0, 1, 2, 4, 5, 6, 8, 9]), 4),
        (Mesh(dp=2, tp=3), 4),  # 0-2 on one host, 3-5 on two
    ],
    ids=str,
)
def test_uneven_hosts_have_no_way_by_levels(mesh: Mesh, per_host: int) -> None:
    assert [ways("all_reduce", (axis,), mesh, (("host", per_host),)) for axis in mesh.names] == [()] * len(mesh.names)


def test_the_price_of_a_way_is_that_of_its_parts() -> None:
    mesh, size = Mesh(dp=8), 2400
    (way,) = ways("all_reduce", ("dp",), mesh, HOSTS)
    inside = 1e9 * (price("reduce_scatter", size, 4, PLAIN) + price("all_gather", size, 4, PLAIN))
    between = 1e9 * price("all_reduce", size / 4, 2, PLAIN, shape=(1, 2))
    assert way_nanoseconds(way, size, mesh, PLAIN) == round(inside + between)
    at_once = round(1e9 * price("all_reduce", size, 8, PLAIN))
    assert collective_nanoseconds("all_reduce", size, ("dp",), mesh, PLAIN) == round(inside + between) < at_once
    near = replace(PLAIN, outside=PLAIN.inside)
    assert collective_nanoseconds("all_reduce", 1, ("dp",), mesh, near) == round(1e9 * price("all_reduce", 1, 8, near))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BY_LEVELS), st.integers(0, 1 << 30), st.sampled_from([PLAIN, RACKS, machine("generic")]))
def test_no_way_is_dearer_than_the_cheapest(name: str, size: int, on: Machine) -> None:
    mesh, axes = Mesh(dp=16), ("dp",)
    found = collective_nanoseconds(name, size, axes, mesh, on)
    assert found <= round(group_price(name, size, axes, mesh, on) * 1e9)
    assert all(found <= way_nanoseconds(way, size, mesh, on) for way in ways(name, axes, mesh, on.borders))
    assert found <= collective_nanoseconds(name, size + 64, axes, mesh, on)


# -- the slowest link --------------------------------------------------------------------------------------------------


def test_a_group_has_the_price_of_the_slowest_link_that_it_crosses() -> None:
    mesh, size = Mesh(a=2, b=2, c=4), 1000
    prices = [group_price("all_gather", size, (axis,), mesh, RACKS) for axis in mesh.names]
    assert prices == [1 * 100 + 500 * 100, 1 * 10 + 500 * 10, 2 * 1 + 750]
    assert group_price("all_gather", size, ("a", "c"), mesh, RACKS) == 3 * 100 + 7 / 8 * 1000 * 100
    assert group_price("all_gather", size, ("a",), mesh, PLAIN) == prices[1]


def test_a_level_is_no_faster_than_those_inside() -> None:
    fast = replace(PLAIN, levels=(Level("rack", 8, Link(0.0, 1e9)),))
    for borders in (1, 2):
        assert fast.across(borders).outside == PLAIN.outside
    assert group_price("all_gather", 1000, ("a",), Mesh(a=2, b=8), fast) == 10 + 5000


@pytest.mark.parametrize("far", [False, True])
def test_a_message_has_the_price_of_the_slowest_link(far: bool) -> None:
    mesh = Mesh(a=2, b=2, ranks=[0, 4, 8, 12]) if far else Mesh(a=2, b=2, ranks=[0, 1, 4, 5])
    value = TensorType((24, 64), torch.float32, Layout(mesh, DistAttr.split("a", "b")))
    given_ = {"splits": (("b",), ("a",))}
    result = transfers.BY_FUNCTION[transfers.redistribute].infer(value, given_, {})
    link = RACKS.levels[0].link if far else RACKS.outside
    assert step_price(transfers.redistribute, value, given_, result, RACKS) == (
        link.latency + 24 * 64 * 4 / 4 / link.bandwidth
    )
    sizes = [sympy.Integer(n) for n in value.shape]
    seconds = transfer_seconds(transfers.redistribute, value, given_, result, sizes, RACKS).subs(bandwidths(RACKS))
    assert float(seconds) == pytest.approx(step_price(transfers.redistribute, value, given_, result, RACKS))


# -- the hosts of a job ------------------------------------------------------------------------------------------------


def hosts(*counts: int) -> Hosts:
    return Hosts(tuple("abcdefgh"[: len(counts)]), tuple(k for k, count in enumerate(counts) for _ in range(count)))


def test_the_hosts_of_a_job_take_the_place_of_those_of_the_machine() -> None:
    assert on_hosts(RACKS, None) is RACKS and on_hosts(RACKS, hosts(4, 4)) is RACKS
    found = on_hosts(RACKS, hosts(2, 2, 2, 2))
    assert found.borders == (("host", 2), ("rack", 4)) and found.outside == RACKS.outside
    assert on_hosts(PLAIN, hosts(8)).ranks_per_node == 8  # one host has one link to no other
    assert on_hosts(PLAIN, hosts(2)) is PLAIN


def test_each_rank_of_uneven_hosts_counts_as_alone() -> None:
    for uneven in (hosts(3, 4), Hosts(("a", "b"), (0, 1, 0, 1))):
        found = on_hosts(RACKS, uneven)
        assert found.borders == (("host", 1),) and found.outside == RACKS.levels[0].link
        assert ways("all_reduce", ("dp",), Mesh(dp=8), found.borders) == ()
