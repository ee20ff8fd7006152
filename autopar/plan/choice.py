"""Choose one of an op's strategies for the layouts of its operands, greedily, one op at a time.

The criteria are, in this order: the fewest lost splits over axes on which an operand should stay, the distance to a
firm aim, the fewest moved bytes (nanoseconds, for a machine), the distance to any other aim, the fewest changed
operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from autopar.costs.machine import Machine
from autopar.ir.layout import UNDECIDED, WHOLE, Dim, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.plan.boundary import OPEN
from autopar.rules.strategies import Bound, Strategy, axes_of
from autopar.transitions import price as price_of

# (factor that may be split although the op needs it whole, the fewest elements for that)
Opened = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Aim:
    """The desired layout of the first result of an op.

    Attributes:
        attr: the layout; undecided dims (``?``) are free.
        firm: whether the aim is more important than the moved bytes.
    """

    attr: DistAttr
    firm: bool = False

    def missed(self, attr: DistAttr) -> int:
        """Return the number of axes that differ from the aim.

        An axis that it does not name may split an undecided dim.
        """
        count = 0
        for axis in {*self.attr.axes, *attr.axes} - {UNDECIDED}:
            desired, actual = place_of(axis, self.attr), place_of(axis, attr)
            count += desired != actual and (
                desired is not None or (actual is not None and self.attr.dims[actual[0]] != OPEN)
            )
        return count


def opened(attr: DistAttr, axes: frozenset[str]) -> DistAttr:
    """Return ``attr`` with the splits over ``axes`` only; dims that these do not split are undecided."""
    dims = (tuple((size, tuple(a for a in names if a in axes)) for size, names in dim) for dim in attr.dims)
    return DistAttr(tuple(dim if any(names for _, names in dim) else OPEN for dim in dims))


def place_of(axis: str, attr: DistAttr) -> tuple[int, int] | None:
    """Return the dim and the part that ``axis`` splits, or ``None``."""
    return next(((d, k) for d, dim in enumerate(attr.dims) for k, (_, axes) in enumerate(dim) if axis in axes), None)


@lru_cache(maxsize=65536)
def cheapest(
    bound: Bound,
    homes: tuple[DistAttr, ...],
    dtypes: tuple[torch.dtype, ...],
    staying: tuple[frozenset[str], ...],
    mesh: Mesh,
    aim: Aim | None = None,
    opened: Opened = (),
    waits: frozenset[int] = frozenset(),
    machine: Machine | None = None,
) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
    """Return the best strategy for operands with the layouts ``homes``.

    It is the layouts that it requires of them, and the layouts of the results.

    Args:
        staying: for each operand, the axes on which its splits should stay.
        opened: factors that may be split although the op needs them whole.
        waits: operands whose pending sum may pass, because fewer elements are reduced later; for an addition, operands
            that may become pending.
        machine: the machine whose nanoseconds are compared; without one moved bytes are.
    """
    present = [
        {f: dim for row in bound.factor_splits(dims, shape, home, mesh) if row for f, dim in row.items()}
        for dims, shape, home in zip(bound.operands, bound.operand_shapes, homes, strict=True)
    ]
    first, shape = bound.results[0], bound.result_shapes[0]
    if first is None or shape is None:
        aim = None
    if aim is not None and first is not None and shape is not None:
        settled = DistAttr(tuple(WHOLE if dim == OPEN else dim for dim in aim.attr.dims)).normalize(shape, mesh)
        present.append(
            {f: dim for row in bound.factor_splits(first, shape, settled, mesh) if row for f, dim in row.items()}
        )
    named = {axis for home in homes for axis in home.axes} | {
        axis for row in present for dim in row.values() for axis in axes_of(dim)
    }
    axes = [axis for axis in mesh.names if axis in named]
    whole = bound.whole - {factor for factor, least in opened if bound.sizes.get(factor, 0) >= least}
    options = [_options(bound, whole, waits, homes, present, axis) for axis in axes]
    best = None
    for combination in itertools.product(*options):
        strategy = _strategy(dict(zip(axes, combination, strict=True)), present, mesh)
        if not all(bound.takes(factor, dim, mesh) for factor, dim in strategy.split):
            continue
        needs, gives = bound.place(strategy, mesh)
        lost = paid = changed = 0
        if any(
            dict(home.pending).get(axis, kind) != kind
            for need, home in zip(needs, homes, strict=True)
            for axis, kind in need.pending
        ):
            continue  # no transfers turn a pending maximum into a pending sum
        for need, home, size, dtype, stays in zip(needs, homes, bound.operand_shapes, dtypes, staying, strict=True):
            if need != home:
                lost += sum(place_of(axis, need) != place_of(axis, home) for axis in stays if place_of(axis, home))
                here, there = (TensorType(size, dtype, Layout(mesh, attr)) for attr in (home, need))
                paid += price_of(here, there, machine)
                changed += 1
        passing = dict(strategy.pending)
        # a result that the split leaves pending is reduced later
        for whole_shape, give in zip(bound.result_shapes, gives, strict=True):
            if give is not None and whole_shape is not None and any(axis not in passing for axis, _ in give.pending):
                reduced = Layout(mesh, give.without_pending())
                given = TensorType(whole_shape, dtypes[0], Layout(mesh, give))
                paid += price_of(given, TensorType(whole_shape, dtypes[0], reduced), machine)
        missed = 0 if aim is None or gives[0] is None else aim.missed(gives[0])
        firm = missed if aim is not None and aim.firm else 0
        price = (lost, firm, paid, missed, changed)
        if best is None or price < best[0]:
            best = (price, needs, gives)
    assert best is not None
    return best[1], best[2]


Option = tuple[str, str | int] | None


def _options(
    bound: Bound,
    whole: frozenset[str],
    waiting: frozenset[int],
    homes: tuple[DistAttr, ...],
    present: Sequence[Mapping[str, Dim]],
    axis: str,
) -> list[Option]:
    """Return the options of an axis.

    It may split a factor that a value has split over it, pass a pending sum, or do nothing (``None``).
    """
    options: dict[Option, None] = {}
    for row in present:
        for factor, dim in row.items():
            if axis in axes_of(dim) and factor not in whole:
                options[("split", factor)] = None
    for index, alternative in enumerate(bound.linear):
        waits = _regroups(bound) or len(alternative) > 1 or waiting.issuperset(alternative)
        pending = {position for position in alternative if (axis, "sum") in homes[position].pending}
        others = set(alternative) - pending
        if (
            waits
            and pending
            and (not others or (waiting >= others and all(axis not in homes[position].axes for position in others)))
        ):
            options[("pass", index)] = None
    options[None] = None
    return list(options)


def _regroups(bound: Bound) -> bool:
    """Return whether the results of an op have exactly the elements of its operand."""
    shape = bound.result_shapes[0]
    return bound.rule.view and (
        len(bound.result_shapes) > 1 or (shape is not None and math.prod(shape) == math.prod(bound.operand_shapes[0]))
    )


def _strategy(chosen: Mapping[str, Option], present: Sequence[Mapping[str, Dim]], mesh: Mesh) -> Strategy:
    split: dict[str, list[str]] = {}
    passing: list[tuple[str, int]] = []
    for axis, option in chosen.items():
        if option is None:
            continue
        if option[0] == "split":
            split.setdefault(str(option[1]), []).append(axis)
        elif isinstance(option[1], int):
            passing.append((axis, option[1]))
    chosen_split = {factor: _restricted(factor, axes, present, mesh) for factor, axes in split.items()}
    return Strategy(tuple(sorted(chosen_split.items())), tuple(sorted(passing)))


def _restricted(factor: str, axes: list[str], present: Sequence[Mapping[str, Dim]], mesh: Mesh) -> Dim:
    """Return the split of a factor over exactly ``axes``.

    The order is as in the value that has most of them, with the other axes last.
    """
    best = max((row[factor] for row in present if factor in row), key=lambda dim: len({*axes_of(dim)} & {*axes}))
    parts = tuple((size, tuple(axis for axis in names if axis in axes)) for size, names in best)
    missing = tuple(axis for axis in mesh.names if axis in axes and axis not in axes_of(best))
    return ((parts[0][0], parts[0][1] + missing), *parts[1:])
