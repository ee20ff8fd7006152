"""Price ops and transfers for sizes that are expressions: the closed forms of ``op_prices`` and ``prices`` in sympy.

A split dim has pieces of ``size / ranks`` where its size at the capture has equal pieces, else ``⌈size / ranks⌉``.
Prices are in seconds, not rounded to nanoseconds. The bandwidths of the machine are symbols; its latencies, its peaks,
and the fits to measurements are numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.node import Target

from autopar.costs.machine import Machine
from autopar.costs.op_prices import LOOK_UPS, UNREAD, VIEWS, dtype_of_work
from autopar.costs.prices import FORMS, MEASURED_AS, SYMBOLS, exchange_on, group_places, scaled_parts
from autopar.ir import transfers
from autopar.ir.layout import Dim
from autopar.ir.mesh import Mesh
from autopar.ir.record import TensorType
from autopar.rules.strategies import Bound, Dims

Size: TypeAlias = sympy.Expr  # of a dim or a factor
Sizes = Sequence[Size]

BANDWIDTHS = ("memory_bandwidth", "inside_bandwidth", "outside_bandwidth")  # bytes a second
MEMORY, INSIDE, OUTSIDE = (sympy.Symbol(name, positive=True) for name in BANDWIDTHS)


class NoExpression(Exception):
    """A price has no closed form in the symbols; the text says why."""


def bandwidths(machine: Machine) -> dict[sympy.Symbol, float]:
    """Return the machine's values of the symbols of bandwidths."""
    return {MEMORY: machine.memory.bandwidth, INSIDE: machine.inside.bandwidth, OUTSIDE: machine.outside.bandwidth}


def piece(size: Size, whole: int, dim: Dim, mesh: Mesh) -> Size:
    """Return the size of the largest piece of a dim or factor, whose size at the capture is ``whole``."""
    split: list[tuple[int, int]] = [(whole if part is None else part, mesh.count(axes)) for part, axes in dim]
    if not size.free_symbols:
        return sympy.Integer(math.prod(-(-part // count) for part, count in split))
    counts = [count for _, count in split if count > 1]
    if all(part % count == 0 for part, count in split):
        return size / math.prod(counts)
    if len(split) == 1:
        return sympy.ceiling(size / split[0][1])
    raise NoExpression(f"a dim of {whole} has uneven pieces of its parts, {dim}")


def product(sizes: Sizes) -> Size:
    return sympy.Mul(*sizes)


# -- ops ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpSizes:
    """The sizes of one call of an op as expressions.

    Attributes:
        factors: factor → size.
        operands, results: the sizes of the dims of each value.
    """

    factors: Mapping[str, Size]
    operands: Sequence[Sizes]
    results: Sequence[Sizes | None]


def op_seconds(bound: Bound, sizes: OpSizes, split: Mapping[str, Dim], mesh: Mesh | None, reads: Sequence[torch.dtype],
               writes: Sequence[torch.dtype | None], machine: Machine) -> Size:  # fmt: skip
    """Return the seconds of an op on the rank with the largest pieces, as ``OpPrices.price`` has them."""
    if bound.rule.op in VIEWS:
        return sympy.Integer(0)
    factors = dict(sizes.factors)
    for factor, dim in split.items():
        assert mesh is not None
        if factor not in bound.whole:
            factors[factor] = piece(factors[factor], bound.sizes[factor], dim, mesh)

    def elements(dims: Dims, shape: Sizes) -> Size:
        loose = [size for dim, size in zip(dims, shape, strict=True) if not dim]
        return product([*loose, *(factors[factor] for dim in dims for factor in dim)])

    work = sympy.Add(*(sympy.Rational(t.times, t.over) * product([factors[f] for f in t.factors]) for t in bound.terms))
    values = [
        elements(dims, shape) * dtype.itemsize
        for dims, shape, dtype in zip(bound.operands, sizes.operands, reads, strict=True)
    ]
    made = [
        elements(dims, shape) * dtype.itemsize
        for dims, shape, dtype in zip(bound.results, sizes.results, writes, strict=True)
        if dims is not None and shape is not None and dtype is not None
    ]
    if bound.rule.op in UNREAD and values:
        values = values[1:]
    elif bound.rule.op in LOOK_UPS:
        first = next(dtype for dtype in writes if dtype is not None)
        values[0] = sympy.Min(values[0], made[0] / first.itemsize * reads[0].itemsize)
    bytes = sympy.Add(*values, *made)
    return machine.memory.latency + sympy.Max(work / _flops(bound, reads, machine), bytes / MEMORY)


def _flops(bound: Bound, reads: Sequence[torch.dtype], machine: Machine) -> Any:
    if not bound.terms:
        return 1
    flops = machine.flops(dtype_of_work(bound, reads))
    return flops if machine.peak else flops / machine.memory.bandwidth * MEMORY


# -- transfers ---------------------------------------------------------------------------------------------------------


def transfer_seconds(function: Target, source: TensorType, arguments: Mapping[str, Any], result: TensorType,
                     sizes: Sizes, machine: Machine) -> Size:  # fmt: skip
    """Return the seconds of a transfer, as ``step_price`` has them, for a value with dims of these sizes."""
    name = getattr(function, "__name__", str(function))
    if name in ("wait", "send", "fold_in"):
        return sympy.Integer(0)
    before, after = _held(source, sizes), _held(result, sizes)
    if name == "cast":
        return _seconds(name, before + after, 1, machine, (1, 1))
    assert source.layout is not None and result.layout is not None
    mesh = source.layout.mesh
    if name in ("redistribute", "recv"):
        elements, count, far = exchange_on(source.layout, result.layout, source.shape, machine)
        _require_even(source, result)
        moved = product(sizes) * sympy.Rational(elements, max(math.prod(source.shape), 1)) * source.dtype.itemsize
        shape = (1, count) if far else (count, 1)
        return _seconds(name if count <= 2 else "redistribute", moved, count, machine, shape, far)
    if name in ("all_reduce", "reduce_scatter"):
        wider = transfers.reduced_as(arguments.get("op", "sum"), source.dtype).itemsize // source.dtype.itemsize
        before, after = before * wider, after * wider
    axes = transfers.axes_of(arguments["axis"])
    count = mesh.count(axes)
    sizes_of = {"all_gather": count * before, "reduce_scatter": count * after, "slice": 2 * after, "pend": after}
    size = sizes_of.get(name, sympy.Max(before, after))
    return sympy.Max(
        *(_seconds(name, size, count, machine, *place) for place in group_places(mesh, axes, machine.borders))
    )


def _held(type: TensorType, sizes: Sizes) -> Size:
    """Return the bytes of the largest piece."""
    if type.layout is None:
        return product(sizes) * type.dtype.itemsize
    mesh = type.layout.mesh
    pieces = [piece(size, whole, dim, mesh) for size, whole, dim in zip(sizes, type.shape, type.attr.dims, strict=True)]
    return product(pieces) * type.dtype.itemsize


def _require_even(*types: TensorType) -> None:
    for type in types:
        assert type.layout is not None
        for whole, dim in zip(type.shape, type.attr.dims, strict=True):
            if any((whole if part is None else part) % type.layout.mesh.count(axes) for part, axes in dim):
                raise NoExpression(f"a redistribute of uneven pieces of {list(type.shape)}")


def _seconds(name: str, size: Size, count: int, machine: Machine, shape: tuple[int, int], borders: int = 0) -> Size:
    """Return the seconds of the cheapest algorithm of a transfer of ``size`` bytes over ``count`` ranks.

    ``borders`` separate them: of nodes, and of what is around these.
    """
    if count == 1 and name != "cast":
        return sympy.Integer(0)
    per_node, nodes = shape
    fit = machine.fit(MEASURED_AS.get(name, name))
    within: Size | None = None
    if fit is not None:
        floor, fixed, slope = scaled_parts(fit, name, float(per_node if nodes > 1 else count))
        within = sympy.Max(floor, fixed + slope * size)
        if nodes == 1:
            return within
    near = machine.inside.latency, 1 / INSIDE
    slowest = machine.across(borders).outside
    further = [1 / slowest.bandwidth] if borders > 1 else []
    far = max(machine.inside.latency, slowest.latency), sympy.Max(1 / INSIDE, 1 / OUTSIDE, *further)
    values = (
        size, count, per_node, nodes, *(far if nodes > 1 else near), *near, *far, machine.memory.latency, 1 / MEMORY
    )  # fmt: skip
    forms = [form.seconds.subs(dict(zip(SYMBOLS, values, strict=True)), simultaneous=True) for form in FORMS[name]]
    cheapest = sympy.Min(*forms)
    return cheapest if within is None else sympy.Max(within, cheapest)
