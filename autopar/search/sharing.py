"""Pay for each transfer of a value once, where the program that runs has it once.

Uses of one value in one phase share equal transfers, also where only the beginnings of their chains are equal.
Reductions and narrowing casts at the beginning are shared by all phases. With at most three uses, what is shared is
one path of transfers: it begins at the home, and each use leaves it somewhere. An *alternate* is the end of such a
path. A pair (home, alternate) pays for the path, and a use then pays for what follows after the path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir import transfers
from autopar.plan.shared_transfers import REDUCTIONS
from autopar.search.chains import Chain, State


class Step(NamedTuple):
    """One transfer as ``share`` compares it; ``phase`` is that of the uses that share it, "" for all."""

    function: object
    state: State
    nanoseconds: int
    phase: str


Path = tuple[Step, ...]  # the transfers from a home


class Use(NamedTuple):
    """How one reader may need a value.

    Attributes:
        states: the different states.
        phase: of the transfers before it.
        turning: whether the reader is in the block with which the forward ends.
    """

    states: tuple[State, ...]
    phase: str
    turning: bool = False


class Alternates(NamedTuple):
    """The pairs (home, alternate) of a value that a few uses read.

    Attributes:
        home: of each pair, the number of the home.
        paid: the nanoseconds of the path.
        rest: for each use, the nanoseconds of what follows the path: [pairs, states of the use].
    """

    home: np.ndarray
    paid: np.ndarray
    rest: tuple[np.ndarray, ...]


def path_of(chain: Chain, phase: str, *, computed: bool = True, turning: bool = False) -> Path:
    """Return the transfers of a chain as ``share`` compares them.

    Args:
        computed: whether an op makes the value; narrowing casts of parameters and inputs are not kept.
        turning: whether a gather at the beginning is shared by the forward and the backward.
    """
    path, everywhere = [], True
    for k, hop in enumerate(chain):
        kept = hop.function in REDUCTIONS or (hop.narrows and computed)
        everywhere &= kept or (k == 0 and turning and hop.function is transfers.all_gather)
        path.append(Step(hop.function, hop.state, hop.nanoseconds, "" if everywhere else phase))
    return tuple(path)


def union(paths: Sequence[Path]) -> int:
    """Return the nanoseconds of all transfers, with equal beginnings paid once."""
    return sum(prefix[-1].nanoseconds for prefix in {path[:k] for path in paths for k in range(1, len(path) + 1)})


def alternates(
    homes: Sequence[State],
    uses: Sequence[Sequence[State]],
    path_to: Callable[[State, State, int], Path],
    share: float = 1.0,
    kept: float = 1.0,
) -> Alternates:
    """Return the pairs for at most three uses.

    Args:
        homes: the different homes.
        uses: for each use, the different states that it may need.
        path_to: returns the transfers from a home to a state that the use of that number needs.
        share: the fraction of each price that counts here, where the uses of a value form several groups.
        kept: the same for transfers that uses in other phases may share.
    """
    home_of: list[int] = []
    paid: list[float] = []
    rest: list[list[np.ndarray]] = [[] for _ in uses]
    for number, home in enumerate(homes):
        paths = [[path_to(home, state, k) for state in states] for k, states in enumerate(uses)]
        alone = [np.array([fraction(path, share, kept) for path in own]) for own in paths]
        begins = [_by_first(own) for own in paths]
        ends: dict[Path, None] = {(): None} | dict.fromkeys(_shared(begins))
        for end in ends:
            home_of.append(number)
            paid.append(fraction(end, share, kept))
            for k, (row, first) in enumerate(zip(alone, begins, strict=True)):
                if end and (alike := first.get(end[0])):
                    row = row.copy()
                    for path, places in alike.items():
                        row[places] = fraction(path[_common(path, end) :], share, kept)
                rest[k].append(row)
    return Alternates(np.array(home_of), np.array(paid), tuple(np.stack(rows) for rows in rest))


def _by_first(paths: Sequence[Path]) -> dict[object, dict[Path, list[int]]]:
    """Group the places of paths by their first transfers, and then by paths."""
    groups: dict[object, dict[Path, list[int]]] = {}
    for place, path in enumerate(paths):
        if path:
            groups.setdefault(path[0], {}).setdefault(path, []).append(place)
    return groups


def fraction(path: Path, share: float, kept: float) -> float:
    """Return the nanoseconds of a path that count, in multiples of 2⁻²⁰, rounded down."""
    total = sum(step.nanoseconds * (share if step.phase else kept) for step in path)
    return float(np.floor(total * 2**20) / 2**20)


def _shared(begins: Sequence[dict[object, dict[Path, list[int]]]]) -> list[Path]:
    """Return the common beginnings of paths of two uses, the longest of each pair."""
    found: dict[Path, None] = {}
    for mine, others in itertools.combinations(begins, 2):
        for first in (first for first in mine if first in others):
            for a, b in itertools.product(mine[first], others[first]):
                found[a[: _common(a, b)]] = None
    return list(found)


def _common(a: Path, b: Path) -> int:
    """Return the length of the common beginning."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
