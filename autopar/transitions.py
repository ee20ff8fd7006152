"""Transitions: the sequence of transfers from one Layout to another that brings the worst rank the fewest bytes.

Between splits no search is needed. What a rank needs and does not hold is a lower bound, and one ``redistribute`` (on one
mesh) or one ``send`` and ``recv`` (between two) reaches it; a chain of slices, all-to-alls and gathers is taken where it
reaches it too, as it does wherever no axis has to make room for another. Only two things are chosen: to what splits a
pending value is reduced on the way, and of what splits a pending one is made. Results are cached by content.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar import transfers
from autopar.boxes import most_lacked
from autopar.errors import TransitionError
from autopar.layout import Axes, Dim, DistAttr, Layout, align, in_common, sized
from autopar.mesh import Mesh
from autopar.record import TensorType
from autopar.text.printer import print_type

Move = tuple[Any, dict[str, Any]]  # a transfer and its arguments after the operand
MANY = 16  # choices of places, above which several axes take the same one
REDUCTIONS = (transfers.all_reduce, transfers.reduce_scatter)
STARTED = 2**20  # bytes that a link moves while an exchange starts: what one that replicas are borrowed for has to save


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
    extra: int = 0  # that it has to save

    def then(self, *moves: Move, meshes: transfers.Meshes = {}) -> _Way:  # noqa: B006
        way = self
        for function, given in moves:
            type = transfers.BY_FUNCTION[function].infer(way.type, given, meshes)
            if type == way.type and function is not transfers.send:
                continue
            paid = transfers.received(function, way.type, given, type)
            way = _Way(type, (*way.steps, Step(function, tuple(given.items()), type, paid)), way.bytes + paid, way.extra)
        return way


def _cheapest(start: TensorType, goal: TensorType) -> tuple[Step, ...]:
    casts = start.dtype != goal.dtype
    linear = not casts or _widens(start.dtype, goal.dtype)  # a cast that a pending value may pass
    same = start.layout.mesh == goal.layout.mesh  # type: ignore[union-attr]
    held = dict(start.attr.pending)
    kept = {axis: kind for axis, kind in goal.attr.pending if same and linear and axis in held}
    new = [(axis, kind) for axis, kind in goal.attr.pending if axis not in kept]
    best: tuple[tuple[int, int, int], _Way, TensorType, list[Move]] | None = None
    axes = [axis for axis in held if axis not in kept]
    free = _free(start, axes)
    itemsize = min(start.dtype.itemsize, goal.dtype.itemsize)
    least = _least(start, axes, -(-_largest(goal) // goal.layout.mesh.count(axis for axis, _ in new)), itemsize)  # type: ignore[union-attr]
    for before, last in _made_pending(start, goal, new):
        for way in _begun(start, free):
            for reduced in _reduced(way, before, axes):
                lacked = most_lacked(reduced.type.layout, before.layout, goal.shape)  # type: ignore[arg-type]
                paid = reduced.bytes + reduced.extra + lacked * itemsize
                key = paid, _far(reduced, axes), len(reduced.steps) + len(last) + (lacked > 0)
                if best is None or key < best[0]:
                    best = key, reduced, before, last
                if not lacked:
                    break  # whatever else it is reduced to, a gather would have to follow, which brings as much
            if not free or best[0][0] <= STARTED + _least(start, axes, _largest(before), itemsize):  # type: ignore[index]
                break
        assert best is not None
        if best[0][0] <= least:
            break
    _, reduced, before, last = best  # type: ignore[misc]
    return _relaid(reduced, before).then(*last).steps


def _widens(a: torch.dtype, b: torch.dtype) -> bool:
    """Every value of ``a`` is one of ``b``, and sums of them come out alike."""
    return a.is_floating_point and b.is_floating_point and a.itemsize < b.itemsize


def _made_pending(start: TensorType, goal: TensorType, new: list[tuple[str, str]]) -> Iterator[tuple[TensorType, list[Move]]]:
    """What the goal can be made of, with the transfers that make it so: whole over its new pending axes, or split.

    A split comes behind some splits that the goal has there; the rest of those are cut afterwards. First as the value is.
    """
    mesh, attr = goal.layout.mesh, goal.attr  # type: ignore[union-attr]
    rest = DistAttr(attr.dims, tuple(pair for pair in attr.pending if pair not in new))
    sizes = transfers.part_sizes(attr, goal.shape)
    splits = [axes for _, axes in attr.parts(goal.shape)]
    choices: Iterator[list[tuple[int, int] | None]] = iter([[None] * len(new)])
    if new and all(kind in transfers.MERGES for _, kind in new):
        own = _own_places(start, goal, [axis for axis, _ in new], splits)
        new = sorted(new, key=lambda pair: list(own).index(pair[0]))
        places = [None, *((k, len(axes)) for k, axes in enumerate(splits)), *((k, j) for k, axes in enumerate(splits) for j in range(len(axes)))]
        every = ([places[number] for number in numbers] for numbers in _places(len(places), len(new)))
        choices = itertools.chain([list(own.values())] if any(own.values()) else [], every)
    for chosen in choices:
        prefix = [min((place[1] for place in chosen if place and place[0] == k), default=len(axes)) for k, axes in enumerate(splits)]
        axes = [list(own[:j]) for own, j in zip(splits, prefix, strict=True)]
        last: list[Move] = []
        for (axis, kind), place in zip(new, chosen, strict=True):
            given: dict[str, Any] = {"axis": axis, **_op(kind)}
            if place is not None:
                axes[place[0]].append(axis)
                given |= {"dim": place[0], **_parts(sizes)}
            last.insert(0, (transfers.pend, given))
        last += [(transfers.slice, {"dim": k, "axis": axis, **_parts(sizes)}) for k, j in enumerate(prefix) for axis in splits[k][j:]]
        flat = iter(axes)
        dims = tuple(tuple((size, tuple(next(flat))) for size in dim) for dim in sizes)
        before = replace(goal, layout=Layout(mesh, replace(rest, dims=dims).normalize(goal.shape, mesh)))
        yield before, last


def _own_places(start: TensorType, goal: TensorType, new: list[str], splits: list[Axes]) -> dict[str, tuple[int, int] | None]:
    """Where the value is split over axes that become pending, and behind how many splits of the goal; major first."""
    found: dict[str, tuple[int, int] | None] = {}
    if start.layout.mesh == goal.layout.mesh and transfers.part_sizes(start.attr, start.shape) == transfers.part_sizes(goal.attr, goal.shape):  # type: ignore[union-attr]
        for k, ((_, axes), wanted) in enumerate(zip(start.attr.parts(start.shape), splits, strict=True)):
            for i, axis in enumerate(axes):
                if axis in new:
                    before = tuple(other for other in axes[:i] if other not in new)
                    found[axis] = (k, len(before) if before == wanted[: len(before)] else 0)
    return found | {axis: None for axis in new if axis not in found}


def _free(start: TensorType, axes: list[str]) -> list[str]:
    """Axes whose replicas a reduction over ``axes`` may borrow: those within the outermost, where links are no slower."""
    mesh = start.layout.mesh  # type: ignore[union-attr]
    outermost = min((mesh.names.index(axis) for axis in axes), default=len(mesh.names))
    return [axis for axis in mesh.names[outermost:] if mesh.sizes[axis] > 1 and axis not in start.attr.axes]


def _begun(start: TensorType, free: list[str]) -> Iterator[_Way]:
    """What is reduced: the value as it is, or a piece of it, cut at any one place for all free axes."""
    yield _Way(start)
    parts = transfers.part_sizes(start.attr, start.shape)
    for place in range(sum(map(len, parts))):
        yield _Way(start, extra=STARTED).then(*((transfers.slice, {"dim": place, "axis": axis, **_parts(parts)}) for axis in free))


def _least(start: TensorType, axes: list[str], wanted: int, itemsize: int) -> int:
    """Bytes at least, to reduce a value and leave each rank so many elements: a ring's, and what others have summed."""
    mesh = start.layout.mesh  # type: ignore[union-attr]
    replicated = [axis for axis in mesh.names if axis not in start.attr.axes]
    share = -(-_largest(start) // mesh.count((*axes, *replicated) if axes else ()))
    return (share * (mesh.count(axes) - 1) + max(0, wanted - share)) * itemsize


def _largest(type: TensorType) -> int:
    """Elements of the first piece, than which none is larger."""
    mesh = type.layout.mesh  # type: ignore[union-attr]
    return math.prod(type.attr.local_shape(type.shape, mesh, dict.fromkeys(mesh.sizes, 0)))


def _reduced(way: _Way, goal: TensorType, axes: list[str]) -> Iterator[_Way]:
    """Ways to reduce a value over ``axes``: to splits that the goal has, the others at once or to splits of their own."""
    if not axes:
        yield way
        return
    op = _op(dict(way.type.attr.pending)[axes[0]])
    here, left = _ended(way, goal, axes, op)
    inner, place = _within(way.type, goal, axes, left)
    if inner and place is not None:
        given = {"dim": place, **op, **_parts(transfers.part_sizes(way.type.attr, way.type.shape))}
        yield from _reduced(way.then(*((transfers.reduce_scatter, {**given, "axis": axis}) for axis in reversed(inner))), goal,
                            [axis for axis in axes if axis not in inner])  # fmt: skip
    parts = transfers.part_sizes(here.type.attr, here.type.shape)
    yield here.then(*([(transfers.all_reduce, {"axis": left[0] if len(left) == 1 else tuple(left), **op})] if left else []))
    for chosen in _places(sum(map(len, parts)), len(left)) if left else ():
        yield here.then(*((transfers.reduce_scatter, {"dim": place, "axis": axis, **op, **_parts(parts)})
                          for place, axis in zip(chosen, reversed(left), strict=True)))  # fmt: skip


def _within(type: TensorType, goal: TensorType, axes: list[str], left: list[str]) -> tuple[list[str], int | None]:
    """Axes that the goal has no split for, within one for which it has; and the first part that nothing splits."""
    order = type.layout.mesh.names.index  # type: ignore[union-attr]
    outermost = min((order(axis) for axis in axes if axis not in left), default=len(type.layout.mesh.names))  # type: ignore[union-attr]
    inner = [axis for axis in left if order(axis) > outermost]
    parts = [t.attr.parts(t.shape) for t in (type, goal)] if inner else []
    if not parts or len({len(each) for each in parts}) > 1:
        return inner, None
    return inner, next((k for k, ((_, own), (_, wanted)) in enumerate(zip(*parts, strict=True)) if not own and not wanted), None)


def _far(way: _Way, axes: list[str]) -> int:
    """Bytes that a way reduces over the outermost axis, whose links may be slow, in whole ``STARTED``.

    Half of an all-reduce is a gather, and those of other ways are not counted either.
    """
    mesh = way.type.layout.mesh  # type: ignore[union-attr]
    outermost = min(axes, key=mesh.names.index, default="")
    total = 0
    for step in way.steps:
        over = transfers.axes_of(dict(step.arguments)["axis"]) if step.function in REDUCTIONS else ()
        if outermost in over:
            total += step.bytes // (mesh.count(set(over) - {outermost}) * (2 if step.function is transfers.all_reduce else 1))
    return total // STARTED


def _places(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """A place for each axis; if there are too many such choices, one place for all."""
    return itertools.product(range(count), repeat=axes) if count**axes <= MANY else ((k,) * axes for k in range(count))


def _ended(way: _Way, goal: TensorType, axes: list[str], op: dict[str, Any]) -> tuple[_Way, list[str]]:
    """Slices and reduce-scatters to splits of the goal, as far as they go; and what is still to be reduced.

    The innermost axis is reduced first: the others, over slower links, have less left.
    """
    views = list(_views(way.type, goal)) if goal.layout.mesh == way.type.layout.mesh else []  # type: ignore[union-attr]
    if not views:
        return way, axes
    view = views[-1] if any(len(want) > 1 for want in views[0][2]) else views[0]  # in which each axis is met on its own
    parts, own, wanted = view
    mesh, left = goal.layout.mesh, list(axes)  # type: ignore[union-attr]
    moves: list[Move] = []
    while True:
        used = {axis for axes in own for axis in axes} | {axis for axis, _ in way.type.attr.pending}
        steps = [(place, want[len(have)]) for place, (have, want) in enumerate(zip(own, wanted, strict=True))
                 if len(have) < len(want) and have == want[: len(have)]]  # fmt: skip
        slices = [(place, axis) for place, axis in steps if axis not in used]
        ends = [(place, axis) for place, axis in steps if axis in left]
        if not slices and not ends:
            return way.then(*moves), left
        place, axis = slices[0] if slices else max(ends, key=lambda end: mesh.names.index(end[1]))
        own[place] = (*own[place], axis)
        moves.append((transfers.slice if slices else transfers.reduce_scatter, {"dim": place, "axis": axis, **({} if slices else op), **_parts(parts)}))
        if not slices:
            left.remove(axis)


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
        exchanges = [function for function, _ in moves or () if transfers.BY_FUNCTION[function].collective]
        if moves is not None and (len(exchanges) < 2 or set(exchanges) == {transfers.all_gather}):
            way = _Way(here).then(*moves)
            if way.type == goal and way.bytes <= least:
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
    own, wanted = sized(dim, size), sized(want, size)
    found = {}
    for sizes in (tuple(n for n, _ in parts) for parts in (wanted, own)):
        here, there = align(own, sizes, mesh), align(wanted, sizes, mesh)
        if here is not None and there is not None:
            found[sizes] = (sizes, here, there)
    if (seen := in_common(dim, want, size, mesh)) is not None:
        sizes, here, there = (list(column) for column in zip(*seen, strict=True))
        found[tuple(sizes)] = (tuple(sizes), here, there)
    return list(found.values())
