"""Give ops the user's integer priorities by glob: the smallest goes first (PaddlePaddle #49275)."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

from autopar.errors import ScheduleError, shown
from autopar.scheduling.graph import Graph


def numbers_of(graph: Graph, priorities: Mapping[str, int]) -> list[int]:
    """Return op → its priority. An op without one has 0, or the least priority of the ops that depend on it, if that
    is less.

    Raises:
        ScheduleError: a glob matches no op, two globs give an op different numbers, or an op with a smaller number
            depends on one with a larger number.
        TypeError: ``priorities`` is no mapping of words to ints.
    """
    if not isinstance(priorities, Mapping):
        raise TypeError(f"priorities={shown(priorities)} is no mapping from globs over names of ops to ints")
    given = _given(graph, priorities)
    _check(graph, given)
    numbers = [0] * len(graph)
    for i in reversed(graph.order):
        own = given[i][0] if i in given else 0
        numbers[i] = min([own, *(numbers[j] for j in graph.readers[i])])
    return numbers


def _given(graph: Graph, priorities: Mapping[str, int]) -> dict[int, tuple[int, str]]:
    """Return op → its priority, and the glob that gives it."""
    given: dict[int, tuple[int, str]] = {}
    for glob, number in priorities.items():
        if not isinstance(glob, str) or isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"priorities: {shown(glob)}: {shown(number)} is no glob with an int")
        matched = fnmatch.filter(graph.number, glob)
        if not matched:
            raise matches_nothing(glob, list(graph.number))
        for name in matched:
            i = graph.number[name]
            if i in given and given[i][0] != number:
                raise ScheduleError(
                    f"the priorities contradict each other on {name!r}: {given[i][1]!r} says {given[i][0]}, {glob!r} "
                    f"says {number}; make the globs disjoint"
                )
            given[i] = number, glob
    return given


def matches_nothing(glob: str, names: Sequence[str]) -> ScheduleError:
    """Return the error about a glob that matches none of these names; it lists the nearest."""
    near = difflib.get_close_matches(glob.strip("*"), names, n=3, cutoff=0.3) or names[:3]
    return ScheduleError(f"the priority {glob!r} matches no op; near it: {', '.join(near) or 'there are none'}")


def _check(graph: Graph, given: Mapping[int, tuple[int, str]]) -> None:
    """Refuse an op with a smaller priority than an op that it depends on."""
    largest: list[int | None] = [None] * len(graph)  # op → itself or the predecessor with the largest priority
    for i in graph.order:
        before = [k for j in graph.before[i] if (k := largest[j]) is not None]
        worst = max(before, key=lambda k: given[k][0], default=None)
        if i in given:
            if worst is not None and given[worst][0] > given[i][0]:
                raise ScheduleError(
                    f"the priorities contradict the order: {graph.ops[i].name!r} has {given[i][0]} and goes before "
                    f"{graph.ops[worst].name!r} with {given[worst][0]}, which it depends on; give "
                    f"{graph.ops[worst].name!r} at most {given[i][0]}"
                )
            worst = i
        largest[i] = worst
