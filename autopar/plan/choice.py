"""Choosing one of an op's strategies, for operands that lie as they do: greedy, one op at a time.

Best is, in this order: to take away the fewest splits over axes on which an operand should stay, to lie as a firm aim
asks, to move the fewest bytes, to lie as any other aim asks, to change the fewest operands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from autopar.ir.layout import UNDECIDED, WHOLE, Dim, DistAttr, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.rules.binding import Bound, Strategy, axes_of
from autopar.transitions import cost

OPEN: Dim = ((None, (UNDECIDED,)),)

Opened = tuple[tuple[str, int], ...]  # factors that may be split for once, where they have at least so many elements


@dataclass(frozen=True)
class Aim:
    """How the first result of an op should lie.

    Attributes:
        attr: dims that are undecided (``?``) may lie as they will.
        firm: it comes before the bytes that are moved.
    """

    attr: DistAttr
    firm: bool = False

    def missed(self, attr: DistAttr) -> int:
        """How many axes do not lie as the aim says; an axis that it does not name may split what is undecided."""
        count = 0
        for axis in {*self.attr.axes, *attr.axes} - {UNDECIDED}:
            there, here = place_of(axis, self.attr), place_of(axis, attr)
            count += there != here and (there is not None or (here is not None and self.attr.dims[here[0]] != OPEN))
        return count

    def given(self, attr: DistAttr) -> DistAttr:
        """The aim, where ``attr`` says how undecided dims lie; nothing is pending."""
        taken = set(self.attr.axes)
        dims = [
            tuple((size, tuple(a for a in axes if a not in taken)) for size, axes in own) if aim == OPEN else aim
            for aim, own in zip(self.attr.dims, attr.dims, strict=True)
        ]
        return DistAttr(tuple(dims))


def opened(attr: DistAttr, axes: frozenset[str]) -> DistAttr:
    """``attr`` over ``axes`` alone; dims that they do not split are undecided."""
    dims = (tuple((size, tuple(a for a in own if a in axes)) for size, own in dim) for dim in attr.dims)
    return DistAttr(tuple(dim if any(own for _, own in dim) else OPEN for dim in dims))


def place_of(axis: str, attr: DistAttr) -> tuple[int, int] | None:
    """The dim and part that ``axis`` splits."""
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
) -> tuple[tuple[DistAttr, ...], tuple[DistAttr | None, ...]]:
    """The best strategy for operands that lie as ``homes``: what it asks of them, and how the results then lie.

    Args:
        staying: for each operand, the axes on which it should stay as it is.
        opened: factors that may be split, although the op needs them whole.
        waits: operands whose pending sum may pass, because what follows makes less of it; of an addition, those that may be made pending.
    """
    held = [
        {f: dim for row in bound.factor_splits(dims, shape, home, mesh) if row for f, dim in row.items()}
        for dims, shape, home in zip(bound.operands, bound.operand_shapes, homes, strict=True)
    ]
    first, shape = bound.results[0], bound.result_shapes[0]
    aim = None if first is None or shape is None else aim
    if aim is not None:
        settled = DistAttr(tuple(WHOLE if dim == OPEN else dim for dim in aim.attr.dims)).normalize(shape, mesh)  # type: ignore[arg-type]
        held.append({f: dim for row in bound.factor_splits(first, shape, settled, mesh) if row for f, dim in row.items()})  # type: ignore[arg-type]
    named = {axis for home in homes for axis in home.axes} | {axis for row in held for dim in row.values() for axis in axes_of(dim)}
    axes = [axis for axis in mesh.names if axis in named]
    whole = bound.whole - {factor for factor, least in opened if bound.sizes.get(factor, 0) >= least}
    options = [_options(bound, whole, waits, homes, held, axis) for axis in axes]
    best = None
    for combination in itertools.product(*options):
        strategy = _strategy(dict(zip(axes, combination, strict=True)), held, mesh)
        if not all(bound.takes(factor, dim, mesh) for factor, dim in strategy.split):
            continue
        needs, gives = bound.place(strategy, mesh)
        lost = paid = changed = 0
        if any(dict(home.pending).get(axis, kind) != kind for need, home in zip(needs, homes, strict=True) for axis, kind in need.pending):
            continue  # no transfers make addends of the candidates for a maximum
        for need, home, size, dtype, stays in zip(needs, homes, bound.operand_shapes, dtypes, staying, strict=True):
            if need != home:
                lost += sum(place_of(axis, need) != place_of(axis, home) for axis in stays if place_of(axis, home))
                paid += cost(TensorType(size, dtype, Layout(mesh, home)), TensorType(size, dtype, Layout(mesh, need)))
                changed += 1
        passing = dict(strategy.pending)
        for whole_shape, give in zip(bound.result_shapes, gives, strict=True):  # what the split leaves pending is reduced later
            if give is not None and whole_shape is not None and any(axis not in passing for axis, _ in give.pending):
                reduced = Layout(mesh, give.without_pending())
                paid += cost(TensorType(whole_shape, dtypes[0], Layout(mesh, give)), TensorType(whole_shape, dtypes[0], reduced))
        missed = 0 if aim is None or gives[0] is None else aim.missed(gives[0])
        firm = missed if aim is not None and aim.firm else 0
        price = (lost, firm, paid, missed, changed)
        if best is None or price < best[0]:
            best = (price, needs, gives)
    assert best is not None
    return best[1], best[2]


Option = tuple[str, object] | None


def _options(bound: Bound, whole: frozenset[str], waiting: frozenset[int], homes: tuple[DistAttr, ...], held: Sequence[Mapping[str, Dim]], axis: str) -> list[Option]:
    """What an axis may do: split a factor that a value has split over it, pass a pending sum, or nothing."""
    found: dict[Option, None] = {}
    for row in held:
        for factor, dim in row.items():
            if axis in axes_of(dim) and factor not in whole:
                found[("split", factor)] = None
    for index, alternative in enumerate(bound.linear):
        waits = _regroups(bound) or len(alternative) > 1 or waiting.issuperset(alternative)
        pending = {position for position in alternative if (axis, "sum") in homes[position].pending}
        others = set(alternative) - pending
        if waits and pending and (not others or (waiting >= others and all(axis not in homes[position].axes for position in others))):
            found[("pass", index)] = None
    found[None] = None
    return list(found)


def _regroups(bound: Bound) -> bool:
    """Whether an op gives all elements of its operand, and no other."""
    shape = bound.result_shapes[0]
    return bound.rule.view and (len(bound.result_shapes) > 1 or (shape is not None and math.prod(shape) == math.prod(bound.operand_shapes[0])))


def _strategy(chosen: Mapping[str, Option], held: Sequence[Mapping[str, Dim]], mesh: Mesh) -> Strategy:
    split: dict[str, list[str]] = {}
    passing = []
    for axis, option in chosen.items():
        if option is None:
            continue
        if option[0] == "split":
            split.setdefault(str(option[1]), []).append(axis)
        else:
            passing.append((axis, option[1]))
    chosen_split = {factor: _restricted(factor, axes, held, mesh) for factor, axes in split.items()}
    return Strategy(tuple(sorted(chosen_split.items())), tuple(sorted(passing)))  # type: ignore[arg-type]


def _restricted(factor: str, axes: list[str], held: Sequence[Mapping[str, Dim]], mesh: Mesh) -> Dim:
    """The factor split over just ``axes``: as the value with most of them has it, the others last."""
    best = max((row[factor] for row in held if factor in row), key=lambda dim: len({*axes_of(dim)} & {*axes}))
    kept = tuple((size, tuple(axis for axis in own if axis in axes)) for size, own in best)
    missing = tuple(axis for axis in mesh.names if axis in axes and axis not in axes_of(best))
    return ((kept[0][0], kept[0][1] + missing), *kept[1:])
