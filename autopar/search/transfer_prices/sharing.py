"""Pay for each transfer of a value once, where the program that runs has it once.

Uses of one value in one phase share equal transfers, also where only the beginnings of their chains are equal.
What leads to a reduction, and narrowing casts at the beginning, are shared by all phases. With at most three uses,
what is shared is one path of transfers: it begins at the home, and each use leaves it somewhere. An *alternate* is the
end of such a path. A pair (home, alternate) pays for the path, and a use then pays for what follows after the path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir import transfers
from autopar.search.transfer_prices.chains import Chain, State
from autopar.search.transfer_prices.once import reduction
from autopar.search.transfer_prices.trees import Shared, Tree, common, shared


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
        states: the numbers of the different states.
        phase: of the transfers before it.
        turning: whether a gather at the beginning is shared by the forward and the backward.
    """

    states: np.ndarray
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
    path, everywhere, reduced = [], True, len(reduction(chain))
    for k, hop in enumerate(chain):
        kept = k < reduced or (hop.narrows and computed)
        everywhere &= kept or (k == 0 and turning and hop.function is transfers.all_gather)
        path.append(Step(hop.function, hop.state, hop.nanoseconds, "" if everywhere else phase))
    return tuple(path)


def union(paths: Sequence[Path]) -> int:
    """Return the nanoseconds of all transfers, with equal beginnings paid once."""
    return sum(prefix[-1].nanoseconds for prefix in {path[:k] for path in paths for k in range(1, len(path) + 1)})


def alternates(
    tree: Tree, uses: Sequence[Use], share: float = 1.0, kept: float = 1.0, *, computed: bool = True
) -> Alternates:
    """Return the pairs for at most three uses.

    Args:
        tree: the chains from the different homes to the states.
        share: the fraction of each price that counts here, where the uses of a value form several groups.
        kept: the same for transfers that uses in other phases may share.
        computed: whether an op makes the value.
    """
    before = _before(tree, uses, computed)
    home: list[np.ndarray] = []
    paid: list[np.ndarray] = []
    rest: list[list[np.ndarray]] = [[] for _ in uses]
    for number in range(len(tree.numbers)):
        rows = [Shared(b.keys[number], b.own[number], b.kept[number]) for b in before]
        ends = _ends(rows)
        home.append(np.full(len(ends.keys), number))
        paid.append(_fraction(ends.own, ends.kept, share, kept))
        for k, row in enumerate(rows):
            length = common(ends.keys[:, None], row.keys[None])
            own, others = (sums[:, -1] - np.take_along_axis(sums, length.T, axis=1).T for sums in (row.own, row.kept))
            rest[k].append(_fraction(own, others, share, kept))
    return Alternates(np.concatenate(home), np.concatenate(paid), tuple(np.concatenate(parts) for parts in rest))


def charges(tree: Tree, use: Use, share: float = 1.0, kept: float = 1.0, *, computed: bool = True) -> np.ndarray:
    """Return the nanoseconds of the transfers from each home to each state of a use that count: [homes, states]."""
    (rows,) = _before(tree, [use], computed)
    return _fraction(rows.own[..., -1], rows.kept[..., -1], share, kept)


def _before(tree: Tree, uses: Sequence[Use], computed: bool) -> list[Shared]:
    phases = list(dict.fromkeys(use.phase for use in uses))
    return [shared(tree, use.states, phases.index(use.phase), computed=computed, turning=use.turning) for use in uses]


def _ends(rows: Sequence[Shared]) -> Shared:
    """Return nothing, and the common beginnings of chains of two uses of one home, the longest of each pair."""
    keys, own, kept = [np.full((1, rows[0].keys.shape[1]), -1)], [np.zeros(1)], [np.zeros(1)]
    known = np.zeros(0, dtype=np.int64)
    for a, b in itertools.combinations(rows, 2):
        length = common(a.keys[:, None], b.keys[None])
        mine, _ = np.nonzero(length)
        length = length[length > 0]
        last, first = np.unique(a.keys[mine, length - 1], return_index=True)
        first = first[~np.isin(last, known)]
        known = np.concatenate([known, last])
        mine, length = mine[first], length[first]
        places = np.arange(a.keys.shape[1])
        keys.append(np.where(places < length[:, None], a.keys[mine], -1))
        own.append(a.own[mine, length])
        kept.append(a.kept[mine, length])
    return Shared(np.concatenate(keys), np.concatenate(own), np.concatenate(kept))


def _fraction(own: np.ndarray, kept: np.ndarray, share: float, kept_share: float) -> np.ndarray:
    """Return the nanoseconds that count, in multiples of 2⁻²⁰, rounded down."""
    return np.floor((own * share + kept * kept_share) * 2**20) / 2**20
