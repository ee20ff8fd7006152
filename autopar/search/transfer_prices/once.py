"""Choose how a pending value is reduced: once, so that all that read it read one value.

Two reductions of the same addends may add them in different orders, and differ in the last bit. So if the cheapest
transfers before the uses of a value reduce it in different ways, the value is first reduced in one way, and the other
layouts come from the result. It is reduced to a layout that a use needs, or keeps the splits that it has; which, the
price of all transfers decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.layout import DistAttr
from autopar.plan.shared_transfers import REDUCTIONS
from autopar.search.transfer_prices.chains import Chain

Find = Callable[[Any, Any], Chain]  # from one state to another, the cheapest transfers


def once(find: Find, have: Any, needs: Sequence[Any], price: Callable[[Sequence[Chain]], Any]) -> list[Chain]:
    """Return the transfers to each of the states that uses need, of which each pending axis is reduced at most once.

    Args:
        find: from one state to another, the cheapest transfers.
        have: the state of the value: a type, or an attribute and a dtype.
        price: of the transfers before all uses, with shared ones paid once. Of equal prices the first way is taken: the
            cheapest transfers before each use, then the ways of ``ways_of``.
    """
    direct = [find(have, need) for need in needs]
    if len({begins for chain in direct if (begins := reduction(chain))}) < 2:
        return direct
    options = [direct, *(through(find, have, needs, begins) for begins in ways_of(find, have, needs, direct))]
    return min([option for option in options if is_once(have, option)], key=price)


def ways_of(find: Find, have: Any, needs: Sequence[Any], direct: Sequence[Chain]) -> dict[Chain, None]:
    """Return the ways to reduce a value: each leads to a layout that a use needs, or leaves the splits as they are.

    The cheapest transfers to a use may reduce to yet other layouts. There are many of those, and to begin all uses at
    one of them hardly ever costs less.

    Args:
        direct: the cheapest transfers to each of the states that uses need.
    """
    attrs = {_attr(need) for need in needs}
    ways = {begins: None for chain in direct if (begins := reduction(chain)) and _attr(begins[-1].state) in attrs}
    return ways | {find(have, _without_pending(have)): None}


def through(find: Find, have: Any, needs: Sequence[Any], begins: Chain) -> list[Chain]:
    """Return the transfers to some states, where those that reduce begin alike."""
    middle = begins[-1].state
    direct = [find(have, need) for need in needs]
    return [
        (*begins, *find(middle, need)) if reduction(chain) else chain for need, chain in zip(needs, direct, strict=True)
    ]


def reduction(chain: Chain) -> Chain:
    """Return the beginning of a chain, up to its last reduction; ``()`` if it reduces nothing."""
    last = max((k for k, hop in enumerate(chain) if hop.function in REDUCTIONS), default=-1)
    return chain[: last + 1]


def is_once(have: Any, chains: Sequence[Chain]) -> bool:
    """Return whether the chains from a state reduce no axis in two ways."""
    ways: dict[str, Chain] = {}
    for chain in chains:
        before = have
        for k, hop in enumerate(chain):
            if hop.function in REDUCTIONS:
                gone = dict(_attr(before).pending).keys() - dict(_attr(hop.state).pending).keys()
                if any(ways.setdefault(axis, chain[: k + 1]) != chain[: k + 1] for axis in gone):
                    return False
            before = hop.state
    return True


def _attr(state: Any) -> DistAttr:
    return state[0] if isinstance(state, tuple) else state.attr


def _without_pending(state: Any) -> Any:
    if isinstance(state, tuple):
        return state[0].without_pending(), state[1]
    return replace(state, layout=replace(state.layout, attr=state.attr.without_pending()))
