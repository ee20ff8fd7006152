"""Boxes against brute force: what a rank holds, lacks and is sent, element by element."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import attrs, holdings, meshes, shapes, worlds

from autopar.ir.boxes import Box, Runs, _few, _many, box_of, count, most_lacked, overlap, volume, within
from autopar.ir.layout import DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.messages import Message, axes_between, messages

NUMBERS = st.sets(st.integers(0, 24))


def runs(numbers: Iterable[int]) -> Runs:
    """A set of numbers as the fewest runs."""
    found: list[tuple[int, int]] = []
    for n in sorted(numbers):
        found[-1:] = [(found[-1][0], n + 1)] if found and found[-1][1] == n else [*found[-1:], (n, n + 1)]
    return tuple(found)


def indices(those: Runs) -> list[int]:
    return [n for start, stop in those for n in range(start, stop)]


def elements(box: Box, shape: Sequence[int]) -> list[int]:
    """The numbers of a box's elements in a row-major value, in the order in which the box has them."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    points = itertools.product(*map(indices, box))
    return [sum(i * stride for i, stride in zip(point, strides, strict=True)) for point in points]


def held(layout: Layout, shape: Sequence[int]) -> dict[int, list[int]]:
    """Rank → the numbers of the elements in its piece, as cutting a tensor finds them."""
    pieces = holdings(layout.attr, shape, layout.mesh)
    return {layout.mesh.rank(at): numbers for at, (_, numbers) in zip(layout.mesh.points(), pieces, strict=True)}


def a_layout(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return Layout(mesh, draw(attrs(mesh, shape, pending=())))


@st.composite
def ends(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two Layouts, on one mesh or on two that may share ranks, and the shape of a value."""
    here = there = draw(meshes(permuted=True))
    if draw(st.booleans()):
        here, there = draw(worlds())
    shape = draw(shapes())
    return a_layout(draw, here, shape), a_layout(draw, there, shape), shape


# -- one rank ------------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_box_is_what_the_rank_holds(data: st.DataObject) -> None:
    """In the order of its piece; each set of indices is written in one way only, with the fewest runs."""
    mesh, shape = data.draw(meshes(permuted=True)), data.draw(shapes())
    layout = a_layout(data.draw, mesh, shape)
    for rank, numbers in held(layout, shape).items():
        box = box_of(layout, shape, rank)
        assert elements(box, shape) == numbers
        assert volume(box) == len(numbers)
        assert all(those == runs(indices(those)) for those in box)


@pytest.mark.simulated
@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_the_indices_in_both(one: set[int], other: set[int]) -> None:
    assert overlap(runs(one), runs(other)) == runs(one & other)
    assert count(runs(one)) == len(one)


@pytest.mark.simulated
@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_where_indices_lie_among_others(one: set[int], other: set[int]) -> None:
    part, whole = sorted(one & other), sorted(one)
    assert within(runs(part), runs(whole)) == runs(map(whole.index, part))


def test_five_over_four_is_two_and_two_and_one_and_nothing() -> None:
    layout = Layout(Mesh(dp=4), DistAttr.split("dp"))
    assert [box_of(layout, (5,), rank) for rank in range(4)] == [(((0, 2),),), (((2, 4),),), (((4, 5),),), ((),)]
    assert [volume(box_of(layout, (5,), rank)) for rank in range(4)] == [2, 2, 1, 0]


def test_several_axes_split_a_part_major_first() -> None:
    """Five over dp are three and two; each of these over tp, two and one, and one and one."""
    layout = Layout(Mesh(dp=2, tp=2), DistAttr.split(("dp", "tp")))
    assert [box_of(layout, (5,), rank) for rank in range(4)] == [(((0, 2),),), (((2, 3),),), (((3, 4),),), (((4, 5),),)]


def test_a_split_behind_the_first_part_is_several_runs() -> None:
    mesh = Mesh(dp=2, tp=2)
    behind = Layout(mesh, DistAttr((((3, ()), (4, ("tp",))),)))
    assert box_of(behind, (12,), 0) == (((0, 2), (4, 6), (8, 10)),)
    assert box_of(behind, (12,), 1) == (((2, 4), (6, 8), (10, 12)),)
    both = Layout(mesh, DistAttr((((3, ("dp",)), (4, ("tp",))),)))
    assert [box_of(both, (12,), rank)[0] for rank in range(4)] == [
        ((0, 2), (4, 6)),
        ((2, 4), (6, 8)),
        ((8, 10),),
        ((10, 12),),
    ]
    two = Layout(mesh, DistAttr((((2, ()), (6, ("tp", "dp"))),)))
    assert [box_of(two, (12,), rank)[0] for rank in range(4)] == [
        ((0, 2), (6, 8)),
        ((3, 5), (9, 11)),
        ((2, 3), (8, 9)),
        ((5, 6), (11, 12)),
    ]


def test_the_rank_and_not_its_place_decides() -> None:
    layout = Layout(Mesh(dp=2, tp=2, ranks=[0, 2, 1, 3]), DistAttr.split("dp", "tp"))
    assert [box_of(layout, (2, 2), rank) for rank in (0, 2, 1, 3)] == [
        (((d, d + 1),), ((t, t + 1),)) for d in (0, 1) for t in (0, 1)
    ]


def test_a_value_without_dims_is_one_element() -> None:
    layout = Layout(Mesh(dp=2), DistAttr.split())
    assert box_of(layout, (), 1) == () and volume(()) == 1 and elements((), ()) == [0]


# -- what is lacked ------------------------------------------------------------------------------------------------


@pytest.mark.simulated
@settings(max_examples=80, deadline=None)
@given(ends())
def test_what_the_worst_rank_lacks(pair: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = pair
    own = held(source, shape)
    lacked = [len(set(need) - set(own.get(rank, ()))) for rank, need in held(target, shape).items()]
    assert most_lacked(source, target, shape) == max(lacked)


# -- messages ------------------------------------------------------------------------------------------------------


def check_messages(
    sent: Sequence[Message], own: dict[int, list[int]], needs: dict[int, list[int]], shape: tuple[int, ...]
) -> None:
    """Each rank gets each element that it needs and lacks once, from one that holds it, and nothing else."""
    got: dict[int, list[int]] = defaultdict(list)
    for one in sent:
        numbers = elements(one.box, shape)
        assert numbers and one.elements == len(numbers)
        assert set(numbers) <= set(own[one.sender])
        got[one.receiver] += numbers
    assert all(sorted(got[rank]) == sorted(set(need) - set(own.get(rank, ()))) for rank, need in needs.items())
    assert got.keys() <= needs.keys()
    pairs = [(one.receiver, one.sender) for one in sent]
    assert pairs == sorted(set(pairs)), "one order, which says it all"


def loads(each: Iterable[tuple[int, Message]]) -> Counter[int]:
    """Rank → how many elements its messages have."""
    found = Counter[int]()
    for rank, message in each:
        found[rank] += message.elements
    return found


def check_fair(sent: Sequence[Message], own: dict[int, list[int]]) -> None:
    """Of the ranks that hold the same, the busiest could hand no message to the idlest and both send less."""
    load, least = loads((one.sender, one) for one in sent), dict[int, int]()
    for one in sent:
        least[one.sender] = min(least.get(one.sender, one.elements), one.elements)
    replicas = defaultdict(list)
    for rank, numbers in own.items():
        replicas[tuple(numbers)].append(rank)
    for ranks in replicas.values():
        busiest = max(ranks, key=load.__getitem__)
        assert load[busiest] - least.get(busiest, 0) <= min(load[rank] for rank in ranks)


@pytest.mark.simulated
@settings(max_examples=80, deadline=None)
@given(ends())
def test_each_rank_is_sent_what_it_lacks(pair: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = pair
    sent, own = messages(source, target, shape), held(source, shape)
    check_messages(sent, own, held(target, shape), shape)
    check_fair(sent, own)
    got = loads((one.receiver, one) for one in sent)
    assert max(got.values(), default=0) == most_lacked(source, target, shape)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_messages_stay_where_a_value_is_pending(data: st.DataObject) -> None:
    """Ranks at different coordinates of a pending axis hold different addends: at each it is an exchange of its own."""
    mesh, shape = data.draw(meshes(permuted=True)), data.draw(shapes())
    kept = tuple(axis for axis in mesh.names if data.draw(st.booleans()))

    def split_over_others() -> Layout:
        dims = data.draw(attrs(mesh, shape, pending=())).dims
        return Layout(
            mesh,
            DistAttr(
                tuple(tuple((n, tuple(axis for axis in axes if axis not in kept)) for n, axes in dim) for dim in dims)
            ),
        )

    source, target = split_over_others(), split_over_others()
    sent = messages(source, target, shape, kept)
    own, needs = held(source, shape), held(target, shape)
    for point in itertools.product(*(range(mesh.sizes[axis]) for axis in kept)):
        here = [rank for rank in mesh.ranks if tuple(mesh.coordinates(rank)[axis] for axis in kept) == point]
        received, mine = [one for one in sent if one.receiver in here], {rank: own[rank] for rank in here}
        check_messages(received, mine, {rank: needs[rank] for rank in here}, shape)
        check_fair(received, mine)


def test_replicas_send_equal_shares() -> None:
    """Four hold the same and eight lack it: each of the four sends it twice."""
    source = Layout(Mesh({"r": 4}, name="s0"), DistAttr.replicated(1))
    target = Layout(Mesh({"d": 8}, ranks=range(4, 12), name="s1"), DistAttr.replicated(1))
    sent = messages(source, target, (6,))
    assert Counter(one.sender for one in sent) == dict.fromkeys(range(4), 2)
    pieces = Layout(target.mesh, DistAttr.split("d"))
    assert Counter(one.sender for one in messages(source, pieces, (16,))) == dict.fromkeys(range(4), 2)


@pytest.mark.simulated
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_between_meshes_replicas_send_about_equal_shares(data: st.DataObject) -> None:
    """Never more than with whole boxes, nor than a share, a row of the divided box and two of the smallest parts."""
    here, there = data.draw(worlds())
    shape, least = data.draw(shapes()), data.draw(st.sampled_from([1, 2, 5]))
    source, target = a_layout(data.draw, here, shape), a_layout(data.draw, there, shape)
    sent, own, needs = messages(source, target, shape, least=least), held(source, shape), held(target, shape)
    check_messages(sent, own, needs, shape)
    if source.mesh == target.mesh:
        return
    load, undivided = (loads((one.sender, one) for one in each) for each in (sent, messages(source, target, shape)))
    replicas = defaultdict(list)
    for rank, numbers in own.items():
        replicas[tuple(numbers)].append(rank)
    for numbers, ranks in replicas.items():
        lacked = {rank: len(set(need) & set(numbers) - set(own.get(rank, ()))) for rank, need in needs.items()}
        boxes = {
            rank: tuple(map(overlap, box_of(source, shape, ranks[0]), box_of(target, shape, rank)))
            for rank, n in lacked.items()
            if n
        }
        row = max((volume(box) / max(map(count, box), default=1) for box in boxes.values()), default=0)
        assert max(load[rank] for rank in ranks) <= max(undivided[rank] for rank in ranks)
        if any(volume(box) >= 2 * least for box in boxes.values()):
            assert max(load[rank] for rank in ranks) <= max(sum(lacked.values()) / len(ranks), least) + row + 2 * least


@pytest.mark.simulated
@settings(deadline=None)
@given(st.lists(st.integers(0, 400), unique=True), st.lists(st.integers(0, 400), unique=True))
def test_many_runs_overlap_as_few_do(one: list[int], other: list[int]) -> None:
    assert _many(runs(one), runs(other)) == _few(runs(one), runs(other)) == runs(set(one) & set(other))


def test_a_lone_receiver_is_served_by_all_replicas() -> None:
    source = Layout(Mesh({"r": 3}, name="s0"), DistAttr.replicated(2))
    target = Layout(Mesh({"one": 1}, ranks=[5], name="s1"), DistAttr.replicated(2))
    sent = messages(source, target, (2, 9), least=1)
    assert [(one.sender, one.receiver, one.box) for one in sent] == [
        (r, 5, (((0, 2),), ((3 * r, 3 * r + 3),))) for r in range(3)
    ]


def test_two_receivers_are_served_by_three_in_four_parts() -> None:
    """Cut once each: two thirds and one third, one third and two thirds."""
    source = Layout(Mesh({"r": 3}, name="s0"), DistAttr.replicated(1))
    target = Layout(Mesh({"d": 2}, ranks=[4, 5], name="s1"), DistAttr.split("d"))
    sent = messages(source, target, (12,), least=1)
    assert [(one.sender, one.receiver, one.box[0]) for one in sent] == [
        (0, 4, ((0, 4),)),
        (1, 4, ((4, 6),)),
        (1, 5, ((6, 8),)),
        (2, 5, ((8, 12),)),
    ]


def test_a_box_of_several_runs_is_divided_among_them() -> None:
    source = Layout(Mesh({"t": 2, "r": 2}, name="s0"), DistAttr((((3, ()), (4, ("t",))),)))
    target = Layout(Mesh({"one": 1}, ranks=[7], name="s1"), DistAttr.replicated(1))
    sent = messages(source, target, (12,), least=1)
    assert [one.box[0] for one in sent] == [((0, 2), (4, 5)), ((5, 6), (8, 10)), ((2, 4), (6, 7)), ((7, 8), (10, 12))]


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (1, [1]),
        (9, [9]),
        (10, [5, 5]),
        (11, [6, 5]),
        (14, [7, 7]),
        (15, [5, 5, 5]),
        (17, [6, 5, 6]),
        (20, [5, 5, 5, 5]),
    ],
)
def test_no_part_is_smaller_than_is_worth_a_message(size: int, parts: list[int]) -> None:
    source = Layout(Mesh({"r": 4}, name="s0"), DistAttr.replicated(1))
    target = Layout(Mesh({"one": 1}, ranks=[5], name="s1"), DistAttr.replicated(1))
    assert [one.elements for one in messages(source, target, (size,), least=5)] == parts
    assert len({one.sender for one in messages(source, target, (size,), least=5)}) == len(parts)


def test_a_small_rest_is_not_cut_off() -> None:
    """Twelve and eight, of two ranks: equal shares would cut two from the twelve."""
    source = Layout(Mesh({"r": 2}, name="s0"), DistAttr.replicated(1))
    target = Layout(Mesh({"d": 2}, ranks=[4, 5], name="s1"), DistAttr((((5, ("d",)), (4, ())),)))
    assert [one.elements for one in messages(source, target, (20,), least=5)] == [12, 8]
    assert [(one.sender, one.elements) for one in messages(source, target, (20,), least=2)] == [(0, 10), (1, 2), (1, 8)]


def test_on_one_mesh_boxes_stay_whole_and_come_along_few_axes() -> None:
    """Rows 0-3 lie on all four of ``r``; two of the others need half of them each, and get it along ``dp`` alone."""
    mesh = Mesh(dp=2, r=4)
    source, target = Layout(mesh, DistAttr.split("dp")), Layout(mesh, DistAttr.split("r"))
    sent = messages(source, target, (8,), least=1)
    assert [(one.sender, one.receiver, one.elements) for one in sent] == [(6, 2, 2), (7, 3, 2), (0, 4, 2), (1, 5, 2)]
    assert axes_between(sent, mesh) == ("dp",)


def test_the_share_of_a_replica_is_counted_in_elements() -> None:
    """Three hold rows 3-5; needed of them are one row and two, by halves: two of them send two elements, one sends one
    twice."""
    source = Layout(Mesh({"dp": 2, "r": 3}, name="s0"), DistAttr.split("dp", None))
    target = Layout(Mesh({"d": 3, "t": 2}, ranks=range(6, 12), name="s1"), DistAttr.split("d", "t"))
    sent = messages(source, target, (6, 2))
    assert sorted(one.elements for one in sent if one.sender > 2) == [1, 1, 2, 2]
    assert loads((one.sender, one) for one in sent) == dict.fromkeys(range(6), 2)


def test_of_idle_replicas_the_nearest_sends() -> None:
    source = Layout(Mesh({"r": 2}, ranks=[0, 8], name="s0"), DistAttr.replicated(1))
    target = Layout(Mesh({"d": 2}, ranks=[1, 9], name="s1"), DistAttr.replicated(1))
    assert [(one.sender, one.receiver) for one in messages(source, target, (6,))] == [(0, 1), (8, 9)]


# -- axes ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_messages_travel_along_these_axes_and_all_of_them(data: st.DataObject) -> None:
    """Each message stays in its group over them, and without any one of them some message does not."""
    mesh, shape = data.draw(meshes(permuted=True)), data.draw(shapes())
    sent = messages(*(a_layout(data.draw, mesh, shape) for _ in range(2)), shape)
    axes = axes_between(sent, mesh)
    assert list(axes) == [axis for axis in mesh.names if axis in axes]
    assert all(one.sender in mesh.group(one.receiver, axes) for one in sent)
    for axis in axes:
        rest = tuple(other for other in axes if other != axis)
        assert not all(one.sender in mesh.group(one.receiver, rest) for one in sent)
    assert all(mesh.sizes[axis] > 1 for axis in axes)


def test_a_move_between_dims_is_along_its_axis_alone() -> None:
    mesh = Mesh(dp=2, one=1, tp=2)
    columns, rows = (Layout(mesh, DistAttr.split(*axes)) for axes in ((("dp", "one"), "tp"), (("tp", "one"), "dp")))
    one = Layout(mesh, DistAttr.split("dp", None))
    assert axes_between(messages(columns, one, (4, 4)), mesh) == ("tp",)
    assert axes_between(messages(columns, rows, (4, 4)), mesh) == ("dp", "tp")
    assert axes_between(messages(one, columns, (4, 4)), mesh) == ()
