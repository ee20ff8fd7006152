"""Choose the cheapest transfers from one Layout to another; refuse the impossible, and cache the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from autopar.costs.machine import Machine
from autopar.errors import TransitionError
from autopar.ir import transfers
from autopar.ir.boxes import lacked_between, most_lacked
from autopar.ir.layout import DistAttr, Layout, largest
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_type
from autopar.transitions import reductions
from autopar.transitions.chain import Draft, Reduced, TransferChain, TransferStep, append_relayout, relayouts
from autopar.transitions.fastest import Fastest, fastest_of_even, fastest_path, nanoseconds
from autopar.transitions.reductions import Precursor, precursors_of


def transitions(source: TensorType, target: TensorType, machine: Machine | None = None) -> tuple[TransferStep, ...]:
    """Return the transfers that turn ``source`` into ``target``, a value of the same shape; ``()`` when they are equal.

    Types in between, and the last, are in normal form. A pending value is reduced before it is cast to a narrower
    dtype.

    Args:
        machine: the machine whose nanoseconds are to be few, and after these the transfers. Without one the worst rank
            receives the fewest bytes.

    Raises:
        TransitionError: the shapes differ, a value has no Layout, or one kind of pending would become another.
    """
    if source.shape != target.shape:
        raise TransitionError(f"a transition keeps the shape; {source.shape} is not {target.shape}")
    return _transitions(source, target) if machine is None else _transitions(source, target, machine)


def cost(source: TensorType, target: TensorType) -> int:
    """Return the bytes that the worst rank receives."""
    return sum(step.bytes for step in transitions(source, target))


@lru_cache(maxsize=65536)
def duration(source: TensorType, target: TensorType, machine: Machine) -> int:
    """Return the nanoseconds that the transfers take on a machine; each is rounded to a whole number."""
    steps = transitions(source, target, machine)
    return nanoseconds(_normal(source), steps, machine) if steps else 0


def price(source: TensorType, target: TensorType, machine: Machine | None = None) -> int:
    """Return ``duration`` on a machine, and ``cost`` without one."""
    return cost(source, target) if machine is None else duration(source, target, machine)


@lru_cache(maxsize=65536)
def _transitions(source: TensorType, target: TensorType, machine: Machine | None = None) -> tuple[TransferStep, ...]:
    if source.layout is None or target.layout is None:
        raise TransitionError("a transition leads between placed values; one of these has no Layout")
    for type in (source, target):
        if len(type.attr.dims) != len(type.shape):
            raise TransitionError(f"a Layout of {len(type.attr.dims)} dims is given to a value of {len(type.shape)}")
        if (why := _malformed(type)) is not None:
            raise _refused(source, target, why)
    start, goal = _normal(source), _normal(target)
    _check_kinds(start, goal)
    if start == goal:
        return ()
    steps = _cheapest(start, goal) if machine is None else _fastest(start, goal, machine)
    assert steps[-1].type == goal, (steps[-1].type, goal)
    return steps


def _normal(type: TensorType) -> TensorType:
    assert type.layout is not None
    mesh = type.layout.mesh
    return replace(type, layout=Layout(mesh, type.attr.normalize(type.shape, mesh)))


# -- refusals -----------------------------------------------------------------------------------------------------


def _refused(start: TensorType, goal: TensorType, why: str) -> TransitionError:
    return TransitionError(f"no transfers lead from {print_type(start)} to {print_type(goal)}: {why}")


def _malformed(type: TensorType) -> str | None:
    """Return why no value has this Layout; ``None`` if it is valid."""
    assert type.layout is not None
    mesh, dims, axes = type.layout.mesh, type.attr.dims, type.attr.axes
    if any(n < 0 for n in type.shape):
        return f"a value has no shape {list(type.shape)}"
    for n, dim in zip(type.shape, dims, strict=True):
        if len(dim) > 1 and math.prod(size for size, _ in dim if size is not None) != n:
            return f"the parts of {print_type(type)} do not make a dim of {n}"
    for axis in axes:
        if axis not in mesh.sizes:
            return f"{print_type(type)} names the axis {axis}; the mesh has {', '.join(mesh.names)}"
        if axes.count(axis) > 1:
            return f"{print_type(type)} uses the axis {axis} twice"
    return None


def _check_kinds(start: TensorType, goal: TensorType) -> None:
    """Refuse two kinds of pending at once, a kind that becomes another, and a kind that the dtype does not have."""
    for type in (start, goal):
        kinds = sorted({kind for _, kind in type.attr.pending})
        if len(kinds) > 1:
            reason = (
                f"{print_type(type)} is pending {' and '.join(kinds)} at once, and these do not commute; reduce one "
                f"first"
            )
            raise _refused(start, goal, reason)
        for kind in kinds:
            try:
                transfers.check_kind(kind, type.dtype)
            except transfers.LayoutMismatch as error:
                raise _refused(start, goal, str(error)) from None
    if start.mesh != goal.mesh:
        return
    pending = dict(start.attr.pending)
    for axis, kind in goal.attr.pending:
        if pending.get(axis, kind) != kind:
            raise _refused(start, goal, (
                f"over {axis} the ranks hold {PARTIAL[pending[axis]]} (pending {pending[axis]}), and would have to "
                f"hold {PARTIAL[kind]} (pending {kind}); reduce the value over {axis} first"
            ))  # fmt: skip


PARTIAL = {"sum": "addends", "avg": "values to be averaged", "max": "candidates for the largest",
           "min": "candidates for the smallest", "prod": "factors"}  # fmt: skip


# -- choices ------------------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """A draft of the reduction, and the precursor of the goal that follows it. The least ``key`` is chosen."""

    key: tuple[int, int, int]
    draft: Draft
    precursor: Precursor


class _Task(NamedTuple):
    """What has to be done.

    Attributes:
        value: the value, and the axes over which it is reduced.
        new: the axes that become pending, with their kinds.
        linear: whether a pending value may be cast.
    """

    value: Reduced
    new: list[tuple[str, str]]
    linear: bool

    @staticmethod
    def of(start: TensorType, goal: TensorType, keep: bool = True) -> _Task:
        """Return the task; ``keep``: what is pending at both ends stays so."""
        linear = _is_linear(start.dtype, goal.dtype)
        pending = dict(start.attr.pending)
        stays = keep and start.mesh == goal.mesh and linear
        staying = {axis: kind for axis, kind in goal.attr.pending if stays and axis in pending}
        new = [(axis, kind) for axis, kind in goal.attr.pending if axis not in staying]
        axes = [axis for axis in start.mesh.names if axis in pending and axis not in staying]
        return _Task(Reduced.of(start, axes), new, linear)


def _cheapest(start: TensorType, goal: TensorType) -> tuple[TransferStep, ...]:
    task = _Task.of(start, goal)
    choice = _chosen(task.value, precursors_of(start, goal, task.new), goal, [axis for axis, _ in task.new])
    return (
        append_relayout(TransferChain(start).then(*choice.draft.transfers()), choice.precursor.type)
        .then(*choice.precursor.transfers())
        .steps
    )


EXACT = 3  # on a mesh of more axes the search for even pieces may end early


def even_path(start: TensorType, goal: TensorType, machine: Machine) -> Fastest | None:
    """Return the path of ``transitions`` between two types in normal form; ``None`` if it compares other chains too.

    Raises:
        TransitionError: one kind of pending would become another.
    """
    _check_kinds(start, goal)
    if start.mesh != goal.mesh or not has_room(start.shape, start.mesh):
        return None
    return fastest_path(start, goal, _is_linear(start.dtype, goal.dtype), machine)


def has_room(shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Return whether the fastest path of even pieces is taken; where dims are small, uneven ones may be faster."""
    return len(mesh.names) <= EXACT and any(n and n % mesh.size == 0 for n in shape)


def _fastest(start: TensorType, goal: TensorType, machine: Machine) -> tuple[TransferStep, ...]:
    task = _Task.of(start, goal)
    even = fastest_of_even(start, goal, task.linear, machine) if start.mesh == goal.mesh else None
    if even is not None and has_room(start.shape, start.mesh):
        return even.steps
    best = _cheapest(start, goal)
    key = nanoseconds(start, best, machine), len(best)
    tasks = [task, _Task.of(start, goal, keep=False)] if start.mesh == goal.mesh else [task]
    for chain in (chain for task in tasks for chain in _chains(start, goal, task)) if even is None else [even]:
        if chain.type == goal and (other := (nanoseconds(start, chain.steps, machine), len(chain.steps))) < key:
            best, key = chain.steps, other
    return best


def _chains(start: TensorType, goal: TensorType, task: _Task) -> Iterator[TransferChain]:
    """Yield every chain of a draft, a relayout and a precursor."""
    value, is_same_mesh = task.value, start.mesh == goal.mesh
    drafts = reductions.StartingDrafts(value, [axis for axis in value.mesh.names if axis in value.replicated])
    for precursor in precursors_of(start, goal, task.new):
        for draft in drafts if value.axes else [value.draft]:
            dims = precursor.dims if is_same_mesh else None
            for reduced in reductions.draft_reductions(draft, dims, value.axes, padded=0):
                chain = TransferChain(start).then(*reduced.transfers())
                for relaid in relayouts(chain, precursor.type):
                    yield relaid.then(*precursor.transfers())


def _chosen(value: Reduced, candidates: Iterator[Precursor], goal: TensorType, new: list[str]) -> _Choice:
    """Return the first of the best pairs of a reduction and a value from which the goal can be made.

    The lower bound of a pair is compared with the best so far before the pair is priced.
    """
    mesh, free = goal.mesh, reductions.free_axes(value)
    itemsize = min(value.itemsize, goal.dtype.itemsize)
    least = reductions.least_reduced(value, -(-largest(goal.attr, goal.shape, mesh) // mesh.count(new)), itemsize)
    best: _Choice | None = None
    drafts = reductions.StartingDrafts(value, free)
    for precursor in candidates:
        wanted = math.prod(precursor.lengths)
        bound, enough = (
            count(value, wanted, itemsize) for count in (reductions.reduction_lower_bound, reductions.least_reduced)
        )
        fewest = precursor.steps + bool(value.axes)
        if best is not None and best.key <= (bound, 0, fewest):
            continue
        for draft in drafts:
            if best is None or best.key > (bound + draft.extra, 0, fewest):
                best = _closer(draft, precursor, best, wanted, itemsize, mesh)
            assert best is not None
            if not free or best.key[0] <= reductions.STARTED + enough:
                break
        if best is not None and best.key[0] <= least:
            break
    assert best is not None
    return best


def _closer(
    draft: Draft, precursor: Precursor, best: _Choice | None, wanted: int, itemsize: int, mesh: Mesh
) -> _Choice | None:
    """Return ``best``, or a better choice that begins like ``draft``."""
    value, is_same_mesh, steps_after = draft.value, draft.value.mesh == mesh, precursor.steps
    goal = precursor.dims if is_same_mesh else None
    lacked_before = (
        _lacked(draft, precursor, is_same_mesh, mesh) if best is not None else 0
    )  # a reduction never leaves a rank with more than it had
    if best is not None:
        least, far = reductions.least_from(draft, goal, lacked_before, wanted if is_same_mesh else 0, itemsize)
        if best.key <= (least, far // reductions.STARTED, len(draft.moves) + steps_after + bool(value.axes)):
            return best
    even = reductions.PADDED * reductions.reduced_evenly(draft, value.axes, wanted)
    for reduced in reductions.draft_reductions(draft, goal, value.axes):
        bytes_paid, far, steps = (
            reduced.bytes + reduced.extra,
            reduced.far // reductions.STARTED,
            len(reduced.moves) + steps_after,
        )
        by_first = wanted - math.prod(map(min, reduced.lengths, precursor.lengths)) if is_same_mesh else 0
        missing = max(by_first, lacked_before)
        better = best is None or (bytes_paid + missing * itemsize, far, steps + (missing > 0)) < best.key
        ends = is_same_mesh and not missing and reduced.bytes <= even
        if better or ends:
            lacked = _lacked(reduced, precursor, is_same_mesh, mesh)
            key = bytes_paid + lacked * itemsize, far, steps + (lacked > 0)
            if best is None or key < best.key:
                best = _Choice(key, reduced, precursor)
            if ends and not lacked:
                break  # other reductions need a gather afterwards, which moves about as many bytes
    return best


def _lacked(draft: Draft, precursor: Precursor, is_same_mesh: bool, mesh: Mesh) -> int:
    """Return the elements that the worst rank lacks after ``draft``."""
    shape = draft.value.shape
    if is_same_mesh:
        return lacked_between(draft.dims, precursor.dims, shape, mesh)
    return most_lacked(Layout(draft.value.mesh, DistAttr(draft.dims)), Layout(mesh, DistAttr(precursor.dims)), shape)


def _is_linear(a: torch.dtype, b: torch.dtype) -> bool:
    """Return whether every value of ``a`` is one of ``b``: a cast before or after a sum gives the same."""
    return a == b or (a.is_floating_point and b.is_floating_point and a.itemsize < b.itemsize)
