"""Price what numbers the indices of a dim in expansions, which the ops of one phase share.

places : i64[128256] = arange(128256)
held : i64[128256/tp] = slice(places, 0, tp)       the rows of a table, or the classes, that a rank has
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from autopar.ir.layout import DistAttr
from autopar.search.problem.strategies import Places
from autopar.search.transfer_prices.chains import Chains
from autopar.search.transfer_prices.sharing import path_of, union

INDEX = torch.int64  # the dtype of indices
PAIR = 2  # ops that share indices are charged exactly, as an embedding and a loss; of more ops each pays a fraction
WHOLE_PLACES = (DistAttr.replicated(1), INDEX)


def price_of_places(chains: Chains, used: Iterable[tuple[str, Places]]) -> int:
    """Return the nanoseconds of what numbers the indices of dims, with what ops of one phase share paid once.

    Args:
        used: phase and places.
    """
    groups: dict[tuple[str, int], dict[Places, None]] = {}
    for phase, places in used:
        groups.setdefault((phase, places.size), {})[places] = None
    total = 0
    for (phase, size), some in groups.items():
        paths = [path_of(chains.chain((size,), WHOLE_PLACES, (places.need, INDEX)), phase) for places in some]
        total += next(iter(some)).nanoseconds + union(paths)
    return total


def share_of(places: Iterable[Places], chains: Chains, ops: Mapping[int, int]) -> float:
    """Return the fraction of the price of places that one op is charged: as many may share it as ``ops`` says.

    A pair is charged together, and not here.

    Args:
        ops: size → how many ops of the phase may number as many indices.
    """
    total = 0.0
    for each in places:
        if ops[each.size] == PAIR:
            continue
        total += price_of_places(chains, [("", each)]) / ops[each.size]
    return math.floor(total * 2**20) / 2**20
