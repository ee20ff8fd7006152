"""Transitions: the sequence of transfers from one Layout to another that brings the worst rank the fewest bytes.

Between splits no search is needed. What a rank needs and does not hold is a lower bound, and one ``redistribute`` (on one
mesh) or one ``send`` and ``recv`` (between two) reaches it; a chain of slices, all-to-alls and gathers is taken where it
reaches it too, as it does wherever no axis has to make room for another. Only two things are chosen: to what splits a
pending value is reduced on the way, and of what splits a pending one is made. Results are cached by content.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar import transfers
from autopar.boxes import most_lacked
from autopar.errors import TransitionError
from autopar.layout import Axes, Dim, DistAttr, Layout, align, finest
from autopar.mesh import Mesh
from autopar.record import TensorType
from autopar.text.printer import print_type

Move = tuple[Any, dict[str, Any]]  # a transfer and its arguments after the operand
MANY = 16  # choices of places, above which several axes take the same one


@dataclass(frozen=True)
class Step:
    """One transfer of a sequence: its function, its arguments after the operand, what it leads to, and what it moves.

    ``bytes`` are those that the worst rank receives.
    """

    function: Any
    arguments: tuple[tuple[str, Any], ...]
    type: TensorType
    bytes: int


def transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    """The transfers that turn ``source`` into ``target``, a value of the same shape; ``()`` when they are equal.

    Types in between, and the last, are in normal form. A pending value is never narrowed: it is reduced first.

    Raises:
        TransitionError: the shapes differ, one has no Layout, or a kind of pending would become another.
    """
    if source.shape != target.shape:
        raise TransitionError(f"a transition keeps the shape; {source.shape} is not {target.shape}")
    return _transitions(source, target)


def cost(source: TensorType, target: TensorType) -> int:
    """Bytes the worst rank receives."""
    return sum(step.bytes for step in transitions(source, target))


@lru_cache(maxsize=65536)
def _transitions(source: TensorType, target: TensorType) -> tuple[Step, ...]:
    if source.layout is None or target.layout is None:
        raise TransitionError("a transition leads between placed values; one of these has no Layout")
    start, goal = _normal(source), _normal(target)
    if start == goal:
        return ()
    _refuse(start, goal)
    steps = _cheapest(start, goal)
    assert steps[-1].type == goal, (steps[-1].type, goal)
    return steps


def _normal(type: TensorType) -> TensorType:
    assert type.layout is not None
    mesh = type.layout.mesh
    return replace(type, layout=Layout(mesh, type.attr.normalize(type.shape, mesh)))


# -- refusals -----------------------------------------------------------------------------------------------------


def _refuse(start: TensorType, goal: TensorType) -> None:
    """What has no meaning: two kinds at once, a kind that becomes another, a kind that the dtype has not."""

    def no(why: str) -> TransitionError:
        return TransitionError(f"no transfers lead from {print_type(start)} to {print_type(goal)}: {why}")

    for type in (start, goal):
        kinds = sorted({kind for _, kind in type.attr.pending})
        if len(kinds) > 1:
            raise no(f"{print_type(type)} is pending {' and '.join(kinds)} at once, and these do not commute; reduce one first")
        for kind in kinds:
            try:
                transfers.check_kind(kind, type.dtype)
            except transfers.LayoutMismatch as error:
                raise no(str(error)) from None
    if start.layout.mesh != goal.layout.mesh:  # type: ignore[union-attr]
        return
    held = dict(start.attr.pending)
    for axis, kind in goal.attr.pending:
        if held.get(axis, kind) != kind:
            raise no(
                f"over {axis} the ranks hold {PARTIAL[held[axis]]} (pending {held[axis]}), and would have to hold "
                f"{PARTIAL[kind]} (pending {kind}); reduce the value over {axis} first"
            )


PARTIAL = {"sum": "addends", "avg": "values to be averaged", "max": "candidates for the largest",
           "min": "candidates for the smallest", "prod": "factors"}  # fmt: skip


# -- what is chosen -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """Transfers from a type on, with what the worst rank receives."""

    type: TensorType
    steps: tuple[Step, ...] = ()
    bytes: int = 0

    def then(self, *moves: Move, meshes: transfers.Meshes = {}) -> _Way:  # noqa: B006
        way = self
        for function, given in moves:
            type = transfers.BY_FUNCTION[function].infer(way.type, given, meshes)
            if type == way.type and function is not transfers.send:
                continue
            paid = transfers.received(function, way.type, given, type)
            way = _Way(type, (*way.steps, Step(function, tuple(given.items()), type, paid)), way.bytes + paid)
        return way


def _cheapest(start: TensorType, goal: TensorType) -> tuple[Step, ...]:
    casts = start.dtype != goal.dtype
    linear = not casts or _widens(start.dtype, goal.dtype)  # a cast that a pending value may pass
    same = start.layout.mesh == goal.layout.mesh  # type: ignore[union-attr]
    held = dict(start.attr.pending)
    kept = {axis: kind for axis, kind in goal.attr.pending if same and linear and axis in held}
    new = [(axis, kind) for axis, kind in goal.attr.pending if axis not in kept]
    best: tuple[tuple[int, int], _Way, TensorType, list[Move]] | None = None
    for before, last in _made_pending(goal, new):
        for reduced in _reduced(start, before, [axis for axis in held if axis not in kept]):
            lacked = most_lacked(reduced.type.layout, before.layout, goal.shape)  # type: ignore[arg-type]
            paid = reduced.bytes + lacked * min(start.dtype.itemsize, goal.dtype.itemsize)
            key = paid, len(reduced.steps) + len(last) + (lacked > 0)
            if best is None or key < best[0]:
                best = key, reduced, before, last
            if not lacked:
                break  # whatever else it is reduced to, a gather would have to follow, which brings as much
        assert best is not None
        if not best[0][0]:
            break
    _, reduced, before, last = best  # type: ignore[misc]
    return _relaid(reduced, before).then(*last).steps


def _widens(a: torch.dtype, b: torch.dtype) -> bool:
    """Every value of ``a`` is one of ``b``, and sums of them come out alike."""
    return a.is_floating_point and b.is_floating_point and a.itemsize < b.itemsize


def _made_pending(goal: TensorType, new: list[tuple[str, str]]) -> Iterator[tuple[TensorType, list[Move]]]:
    """What the goal can be made of, with the transfers that make it so: whole over its new pending axes, or split."""
    mesh, attr = goal.layout.mesh, goal.attr  # type: ignore[union-attr]
    rest = DistAttr(attr.dims, tuple(pair for pair in attr.pending if pair not in new))
    sizes = transfers.part_sizes(attr, goal.shape)
    places = [None, *range(sum(map(len, sizes)))] if all(kind in transfers.MERGES for _, kind in new) else [None]
    for chosen in itertools.product(places, repeat=len(new)) if len(places) ** len(new) <= MANY else ([k] * len(new) for k in places):
        axes = [list(axes) for _, axes in attr.parts(goal.shape)]
        last: list[Move] = []
        for (axis, kind), place in zip(new, chosen, strict=True):
            given: dict[str, Any] = {"axis": axis, **_op(kind)}
            if place is not None:
                axes[place].append(axis)
                given |= {"dim": place, **_parts(sizes)}
            last.insert(0, (transfers.pend, given))
        flat = iter(axes)
        dims = tuple(tuple((size, tuple(next(flat))) for size in dim) for dim in sizes)
        before = replace(goal, layout=Layout(mesh, replace(rest, dims=dims).normalize(goal.shape, mesh)))
        yield before, last


def _reduced(start: TensorType, goal: TensorType, axes: list[str]) -> Iterator[_Way]:
    """Ways to reduce a value over ``axes``: to splits that the goal has, the others at once or to splits of their own."""
    here = _Way(start)
    if not axes:
        yield here
        return
    kinds = dict(start.attr.pending)
    op = _op(kinds[axes[0]])
    left = list(axes)
    if goal.layout.mesh == start.layout.mesh:  # type: ignore[union-attr]
        view = next(_views(start, goal), None)
        if view is not None:
            parts, own, wanted = view
            while (move := _onward(own, wanted, parts, left, op, start)) is not None:
                here = here.then(move)
    parts = transfers.part_sizes(here.type.attr, here.type.shape)
    yield here.then(*([(transfers.all_reduce, {"axis": left[0] if len(left) == 1 else tuple(left), **op})] if left else []))
    places = range(sum(map(len, parts)))
    choices = itertools.product(places, repeat=len(left)) if len(places) ** len(left) <= MANY else ([k] * len(left) for k in places)
    for chosen in choices if left else ():
        yield here.then(*((transfers.reduce_scatter, {"dim": place, "axis": axis, **op, **_parts(parts)})
                          for place, axis in zip(chosen, left, strict=True)))  # fmt: skip


def _onward(own: list[Axes], wanted: list[Axes], parts: Any, left: list[str], op: dict[str, Any], start: TensorType) -> Move | None:
    """The next split of the goal that costs nothing, or that a reduction can end in; ``own`` and ``left`` are brought up to it."""
    used = {axis for axes in own for axis in axes} | {axis for axis, _ in start.attr.pending}
    for function, ready in ((transfers.slice, lambda axis: axis not in used), (transfers.reduce_scatter, left.__contains__)):
        for place, (have, want) in enumerate(zip(own, wanted, strict=True)):
            if len(have) < len(want) and have == want[: len(have)] and ready(want[len(have)]):
                axis = want[len(have)]
                own[place] = (*have, axis)
                if function is transfers.slice:
                    return function, {"dim": place, "axis": axis, **_parts(parts)}
                left.remove(axis)
                return function, {"dim": place, "axis": axis, **op, **_parts(parts)}
    return None


def _op(kind: str) -> dict[str, Any]:
    return {} if kind == "sum" else {"op": kind}


def _parts(sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {"parts": sizes} if any(len(dim) > 1 for dim in sizes) else {}


# -- between splits -----------------------------------------------------------------------------------------------


def _relaid(way: _Way, goal: TensorType) -> _Way:
    """On to the splits of ``goal``, and to its dtype, with the cast where fewer bytes move; what is pending stays so."""
    here = way.type
    assert here.layout is not None and goal.layout is not None
    narrow = here.dtype.itemsize >= goal.dtype.itemsize
    cast: list[Move] = [(transfers.cast, {"dtype": goal.dtype})] if here.dtype != goal.dtype else []
    if here.layout.mesh != goal.layout.mesh:
        splits, parts = transfers.flat_splits(goal.attr, goal.shape)
        stage = goal.layout.mesh.name
        between: list[Move] = [
            (transfers.send, {"stage": stage}),
            (transfers.recv, {"stage": stage, "splits": splits, **({} if parts is None else {"parts": parts})}),
        ]
        return way.then(*([*cast, *between] if narrow else [*between, *cast]), meshes={stage: goal.layout.mesh})
    moves = _exchange(replace(here, dtype=torch.uint8), replace(goal, dtype=torch.uint8))
    first = next((k for k, (function, _) in enumerate(moves) if transfers.BY_FUNCTION[function].collective), len(moves))
    at = first if narrow else len(moves)
    return way.then(*moves[:at], *cast, *moves[at:])


@lru_cache(maxsize=65536)
def _exchange(here: TensorType, goal: TensorType) -> tuple[Move, ...]:
    """Slices with one exchange, or with gathers, if nothing brings a rank less; else one redistribute.

    Several gathers send what several ranks need over a slow link only once; several exchanges of another kind are one.
    """
    if here.layout == goal.layout:
        return ()
    assert here.layout is not None and goal.layout is not None
    least = most_lacked(here.layout, goal.layout, here.shape)
    chains = []
    for parts, own, wanted in _views(here, goal):
        moves = _chain(own, wanted, _parts(parts))
        if moves is not None:
            way = _Way(here).then(*moves)
            exchanges = [step.function for step in way.steps if transfers.BY_FUNCTION[step.function].collective]
            simple = len(exchanges) < 2 or set(exchanges) == {transfers.all_gather}
            if way.type == goal and way.bytes <= least and simple:
                chains.append(tuple((step.function, dict(step.arguments)) for step in way.steps))
    if chains:
        return min(chains, key=len)
    splits, parts = transfers.flat_splits(goal.attr, goal.shape)
    return ((transfers.redistribute, {"splits": splits, **({} if parts is None else {"parts": parts})}),)


def _chain(own: list[Axes], wanted: list[Axes], parts: dict[str, Any]) -> list[Move] | None:
    """Slices, then all-to-alls, then gathers, as far as they go; ``None`` where a gathered axis would be split again."""
    moves: list[Move] = []
    homes = {axis: place for place, axes in enumerate(wanted) for axis in axes}
    while own != wanted:
        used = {axis for axes in own for axis in axes}
        move: Move | None = None
        for place, (have, want) in enumerate(zip(own, wanted, strict=True)):
            if len(have) < len(want) and have == want[: len(have)] and want[len(have)] not in used:
                move, own[place] = (transfers.slice, {"dim": place, "axis": want[len(have)], **parts}), want[: len(have) + 1]
                break
        if move is None:
            loose = [k for k, (have, want) in enumerate(zip(own, wanted, strict=True)) if have != want[: len(have)]]
            for place in loose:
                axis = own[place][-1]
                home = homes.get(axis, place)
                if home != place and (*own[home], axis) == wanted[home][: len(own[home]) + 1]:
                    move = (transfers.all_to_all, {"source": place, "target": home, "axis": axis, **parts})
                    own[place], own[home] = own[place][:-1], (*own[home], axis)
                    break
            if move is None:
                free = [place for place in loose if own[place][-1] not in homes]
                if not free:
                    return None
                move = (transfers.all_gather, {"dim": free[0], "axis": own[free[0]][-1], **parts})
                own[free[0]] = own[free[0]][:-1]
        moves.append(move)
    return moves


View = tuple[tuple[tuple[int, ...], ...], list[Axes], list[Axes]]  # part sizes; the axes of every part, here and there


def _views(here: TensorType, goal: TensorType) -> Iterator[View]:
    """Parts in which both can be seen, dim by dim: the goal's, its own, or the finest common ones; and the finest.

    In the finest parts every axis is the minor-most split of a part: ``8/dp/tp`` is ``2/dp 2/tp 2``.
    """
    assert here.layout is not None
    mesh = here.layout.mesh
    dims = [_views_of(dim, want, size, mesh) for size, dim, want in zip(here.shape, here.attr.dims, goal.attr.dims, strict=True)]
    if not all(dims):
        return
    picks = [[views[0] for views in dims], [views[-1] for views in dims]]
    for pick in picks if picks[0] != picks[1] else picks[:1]:
        yield (tuple(sizes for sizes, _, _ in pick), [a for _, own, _ in pick for a in own], [a for _, _, there in pick for a in there])


@lru_cache(maxsize=65536)
def _views_of(dim: Dim, want: Dim, size: int, mesh: Mesh) -> list[tuple[tuple[int, ...], list[Axes], list[Axes]]]:
    own, wanted = _sized(dim, size), _sized(want, size)
    smallest = [_sizes(finest(parts, mesh)) for parts in (own, wanted)]
    found = []
    for sizes in dict.fromkeys((_sizes(wanted), _sizes(own), _common(*smallest))):
        if sizes:
            here, there = align(own, sizes, mesh), align(wanted, sizes, mesh)
            if here is not None and there is not None:
                found.append((sizes, here, there))
    return found


def _common(*sides: tuple[int, ...]) -> tuple[int, ...]:
    """Parts that both sides are made of: ``(2 6)`` and ``(4 3)`` are of ``(2 2 3)``; ``()`` where there are none."""
    ends = sorted({end for sizes in sides for end in itertools.accumulate(sizes, operator.mul)} - {0, 1})
    steps = [divmod(b, a) for a, b in itertools.pairwise((1, *ends))]
    return () if any(rest for _, rest in steps) else tuple(size for size, _ in steps)


def _sized(dim: Dim, size: int) -> list[tuple[int, Axes]]:
    return [(size if part is None else part, axes) for part, axes in dim]


def _sizes(parts: Sequence[tuple[int, Axes]]) -> tuple[int, ...]:
    return tuple(size for size, _ in parts)
