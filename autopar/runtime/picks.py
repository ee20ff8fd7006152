"""Pick values by name from a row of values; the places of the names are looked up once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

Pick = Callable[[Sequence[Any]], list[Any]]


def pick(names: Sequence[str], row: Sequence[str]) -> Pick:
    """Return a function from the values of a row to those with the given names, in the order of the names.

    Args:
        row: the names of the values in the row. Of equal names the first counts. A missing name gives ``None``.

    Raises:
        ValueError: from the returned function: the row has another number of values.
    """
    places: dict[str, int] = {}
    for place, name in enumerate(row):
        places.setdefault(name, place)
    wanted, length = [places.get(name, len(row)) for name in names], len(row)
    # ``itemgetter`` gives a tuple only for two places or more
    getter = operator.itemgetter(*wanted) if len(wanted) > 1 else lambda values: [values[place] for place in wanted]

    def picked(values: Sequence[Any]) -> list[Any]:
        if len(values) != length:
            raise ValueError(f"{len(values)} values, and {length} names: {', '.join(row)}")
        return list(getter((*values, None)))

    return picked
