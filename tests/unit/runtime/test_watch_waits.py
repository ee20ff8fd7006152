"""Following waits: compared with a search over all paths, on random waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.current_op import CurrentOp
from autopar.runtime.processes.watch.waits import Waits

RANKS = 6


@st.composite
def places(draw: st.DrawFn) -> dict[int, CurrentOp]:
    """Ranks that are nowhere, or wait for nobody, for messages of some ranks, or in a collective of a group."""
    groups = [draw(st.sets(st.integers(0, RANKS - 1), min_size=2)) for _ in range(2)]
    found = {}
    for rank in range(RANKS):
        own = [group - {rank} for group in groups if rank in group]
        kind = draw(st.sampled_from(["nowhere", "computes", "message"] + ["collective"] * 3 * bool(own)))
        if kind == "collective":
            name = draw(st.sampled_from(["a", "b"]))
            found[rank] = CurrentOp(1, True, name, tuple(sorted(draw(st.sampled_from(own)))), name)
        elif kind == "message":
            others = sorted({*range(RANKS), RANKS + 1} - {rank})  # the last of them is no rank of the job
            found[rank] = CurrentOp(1, True, "m", tuple(sorted(draw(st.sets(st.sampled_from(others), min_size=1)))))
        elif kind == "computes":
            found[rank] = CurrentOp(1, True, "c")
    return found


def group_of(places: dict[int, CurrentOp], rank: int) -> set[int] | None:
    place = places.get(rank)
    return {rank, *place.peers} if place is not None and place.collective else None


def edges_of(places: dict[int, CurrentOp]) -> dict[int, set[int]]:
    """Whom each rank waits for, pair by pair."""
    found: dict[int, set[int]] = {rank: set() for rank in range(RANKS)}
    for rank, place in places.items():
        for peer in place.peers:
            own, theirs = group_of(places, rank), group_of(places, peer)
            together = own is not None and own == theirs and places[peer].collective == place.collective
            if peer < RANKS and not together:
                found[rank].add(peer)
    return found


def led_to(edges: dict[int, set[int]], first: int) -> dict[int, int]:
    """All ranks that waits lead to from one, each with the fewest waits in between."""
    steps, k = {first: 0}, 0
    while any(count == k for count in steps.values()):
        k += 1
        for rank in [rank for rank, count in steps.items() if count == k - 1]:
            steps.update({peer: k for peer in edges[rank] if peer not in steps})
    return steps


@given(places())
def test_waits_lead_to_those_who_wait_for_nobody_or_in_a_cycle(places: dict[int, CurrentOp]) -> None:
    waits, edges = Waits(places, range(RANKS)), edges_of(places)
    stuck = [rank for rank, place in places.items() if place.peers]
    reached = {rank: led_to(edges, rank) for rank in range(RANKS)}
    ends = {end for rank in stuck for end in reached[rank] if not edges[end]}
    assert waits.ends == sorted(ends)
    assert waits.endless == sorted(rank for rank in stuck if not ends & reached[rank].keys())

    order = waits.outwards(waits.ends)
    steps = {rank: min((count for end, count in reached[rank].items() if end in ends), default=0) for rank in order}
    assert sorted(order) == sorted(rank for rank in stuck if rank not in ends and ends & reached[rank].keys())
    assert order == sorted(order, key=lambda rank: (steps[rank], rank)), "the nearest first"

    cycle = waits.cycle
    assert bool(cycle) == bool(waits.endless) and len(set(cycle)) == len(cycle)
    assert all(peer in edges[rank] for rank, peer in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True))
    if cycle:
        back = {rank: min(reached[peer].get(rank, RANKS) for peer in edges[rank]) + 1 for rank in cycle}
        assert len(cycle) == back[cycle[0]], "no shorter way back"


@given(places())
def test_ranks_are_apart_in_different_collectives_of_one_group(places: dict[int, CurrentOp]) -> None:
    waits = Waits(places, range(RANKS))
    pairs = [
        (rank, peer)
        for rank in waits.endless
        for peer in waits.endless
        if (group := group_of(places, rank)) is not None
        and group == group_of(places, peer)
        and places[rank].collective != places[peer].collective
    ]
    assert bool(waits.apart) == bool(pairs)
    if pairs:
        group = group_of(places, waits.apart[0])
        assert waits.apart == [rank for rank in range(RANKS) if group_of(places, rank) == group]
        assert len({places[rank].collective for rank in waits.apart}) > 1


def test_a_large_collective_that_one_rank_misses() -> None:
    count = 600
    places = {
        rank: CurrentOp(1, True, "a", tuple(peer for peer in range(count) if peer != rank), "a")
        for rank in range(count - 1)
    }
    waits = Waits(places, range(count))
    assert waits.ends == [count - 1] and waits.endless == waits.apart == waits.cycle == []
    assert waits.outwards(waits.ends) == list(range(count - 1))
