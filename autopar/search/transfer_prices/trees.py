"""Hold the chains from each home of a value to each state as arrays: which transfers begin alike, and their prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.ir import transfers
from autopar.plan.shared_transfers import REDUCTIONS
from autopar.search.transfer_prices.chains import Chain, Hop


class Tree(NamedTuple):
    """The transfers from each home, numbered; equal ones after equal beginnings have one number.

    Attributes:
        numbers: of the transfers of each chain, -1 after its end: [homes, states, longest chain].
        nanoseconds: of each transfer; one more at the end, for -1, is 0.
        reduces, narrows, gathers: whether a transfer is a reduction, a cast to fewer bytes, a gather; True for -1.
    """

    numbers: np.ndarray
    nanoseconds: np.ndarray
    reduces: np.ndarray
    narrows: np.ndarray
    gathers: np.ndarray


def tree_of(chains: Sequence[Sequence[Chain]]) -> Tree:
    """Return the tree of the chains from each home to each state."""
    longest = max((len(chain) for row in chains for chain in row), default=0)
    hops: list[Hop] = []
    numbers = np.full((len(chains), len(chains[0]), longest), -1, dtype=np.int32)
    for home, row in enumerate(chains):
        known: dict[tuple[int, Hop], int] = {}
        for state, chain in enumerate(row):
            before = -1
            for place, hop in enumerate(chain):
                number = known.setdefault((before, hop), len(hops))
                if number == len(hops):
                    hops.append(hop)
                numbers[home, state, place] = before = number
    return Tree(
        numbers,
        np.array([*[hop.nanoseconds for hop in hops], 0], dtype=np.int64),
        np.array([*[hop.function in REDUCTIONS for hop in hops], True]),
        np.array([*[hop.narrows for hop in hops], True]),
        np.array([*[hop.function is transfers.all_gather for hop in hops], True]),
    )


class Shared(NamedTuple):
    """The chains before the uses of one reader, with what shares each transfer.

    Attributes:
        keys: of the transfers, equal where ``share`` makes them one, -1 after the end: [homes, states, longest chain].
        own: the nanoseconds of the first transfers that only uses in one phase share: [homes, states, longest + 1].
        kept: the same for those that all uses share.
    """

    keys: np.ndarray
    own: np.ndarray
    kept: np.ndarray


def shared(tree: Tree, states: np.ndarray, phase: int, *, computed: bool, turning: bool) -> Shared:
    """Return the chains to some states.

    Args:
        phase: the number of the phase of the uses.
        computed: whether an op makes the value; narrowing casts of parameters and inputs are not kept.
        turning: whether a gather at the beginning is shared by the forward and the backward.
    """
    numbers = tree.numbers[:, states]
    reduces = tree.reduces[numbers] & (numbers >= 0)
    kept = np.logical_or.accumulate(reduces[..., ::-1], axis=2)[..., ::-1] | (numbers < 0)
    if computed:
        kept |= tree.narrows[numbers]
    if turning and kept.shape[2]:
        kept[..., 0] |= tree.gathers[numbers[..., 0]]
    everywhere = np.logical_and.accumulate(kept, axis=2)
    prices = tree.nanoseconds[numbers]
    keys = np.where(numbers < 0, -1, 2 * numbers + (2 * len(tree.nanoseconds) * phase + 1) * ~everywhere)
    return Shared(keys, _sums(np.where(everywhere, 0, prices)), _sums(np.where(everywhere, prices, 0)))


def _sums(prices: np.ndarray) -> np.ndarray:
    """Return the sums of the first prices: of none, of one, and so on."""
    sums = np.zeros((*prices.shape[:2], prices.shape[2] + 1), dtype=np.int64)
    np.cumsum(prices, axis=2, out=sums[..., 1:])
    return sums


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the lengths of the common beginnings of rows of keys, broadcast."""
    alike = np.ones(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]), dtype=bool)
    lengths = np.zeros(alike.shape, dtype=np.int8)
    for place in range(a.shape[-1]):
        alike &= (a[..., place] == b[..., place]) & (a[..., place] >= 0)
        lengths += alike
    return lengths
