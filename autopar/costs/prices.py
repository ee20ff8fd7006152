"""Price every transfer in seconds, as the minimum over the closed forms of all algorithms for it.

``n`` is the bytes on the rank that has most: of the operand of an all-reduce or reduce-scatter, of the result of an
all-gather, of either side of an all-to-all (each ``p`` times a piece, so that ``(p-1)/p · n`` travels); of what one
rank sends or receives, whichever is more, in a redistribute, send or recv; of all that is read and written by a local
op. ``p`` ranks are on ``m`` nodes, ``k`` on each; where nodes have different numbers of ranks, all count as the
fullest. Where a machine has further levels, ranks in different racks have the links between racks.

Prices grow with ``n``, with ``p`` on nodes of a given size, and with ``m``: every form does, so their minimum does. For
this, rounds are ``⌈log₂ p⌉``: some algorithms need only so many rounds for any ``p``, whereas the textbook's algorithms
fold a remainder and make three ranks dearer than four. Data that leaves a node costs no less than data that stays,
since it crosses the node too. And every form over several nodes costs at least as much as some form on one node. With
``k`` alone a price may fall: more ranks on a node are more links to the outside. The arithmetic of a reduction is not
counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import sympy
from sympy.codegen.cfunctions import log2
from torch.fx.node import Target

from autopar.costs.exchanges import Exchange, busiest
from autopar.costs.machine import Machine, Measured
from autopar.ir import transfers
from autopar.ir.hosts import Hosts
from autopar.ir.layout import Axes, Layout
from autopar.ir.mesh import Mesh, ranks_by_group
from autopar.ir.record import TensorType

n, p, k, m = sympy.symbols("n p k m", positive=True)
a, b = sympy.symbols("a b", nonnegative=True)  # latency, seconds a byte: of the slowest link between the ranks
a_i, b_i = sympy.symbols("a_i b_i", nonnegative=True)  # the same of links inside a node
# of links between nodes, for one rank while all ranks of its node send
a_e, b_e = sympy.symbols("a_e b_e", nonnegative=True)
a_l, b_l = sympy.symbols("a_l b_l", nonnegative=True)  # of an op on the rank's own memory
SYMBOLS = (n, p, k, m, a, b, a_i, b_i, a_e, b_e, a_l, b_l)

rounds = sympy.ceiling(log2(p))
part = (p - 1) / p  # of n


@dataclass(frozen=True)
class Form:
    """One algorithm: its name, its seconds, and the source of the form."""

    algorithm: str
    seconds: sympy.Expr
    source: str


THAKUR = "Thakur, Rabenseifner, Gropp, Int. J. High Perform. Comput. Appl. 19 (2005)"
RING = "Patarasuk, Yuan, J. Parallel Distrib. Comput. 69 (2009)"
BRUCK = "Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE Trans. Parallel Distrib. Syst. 8 (1997)"
CENSUS = "Bar-Noy, Kipnis, Schieber, Parallel Process. Lett. 3 (1993)"
ANY = "Träff, Optimal, non-pipelined reduce-scatter and allreduce algorithms (2024)"
HOCKNEY = "Hockney, Parallel Comput. 20 (1994)"

LOCAL = (Form("local", a_l + n * b_l, "overhead and memory traffic"),)
DIRECT = (Form("direct", a + n * b, HOCKNEY),)
GATHER = (
    Form("ring", (p - 1) * a + part * n * b, RING),
    Form("doubling", rounds * a + part * n * b, f"{THAKUR}; any p: {BRUCK}"),
)

# the first form scales measurements to other numbers of ranks
FORMS: dict[str, tuple[Form, ...]] = {
    "all_reduce": (
        Form("ring", 2 * (p - 1) * a + 2 * part * n * b, RING),
        Form("doubling", rounds * (a + n * b), f"{THAKUR}; any p: {CENSUS}"),
        Form("halving-doubling", 2 * rounds * a + 2 * part * n * b, f"{THAKUR}; any p: {ANY}"),
    ),
    "all_gather": GATHER,
    "reduce_scatter": (GATHER[0], Form("halving", GATHER[1].seconds, f"{THAKUR}; any p: {ANY}")),
    "all_to_all": (
        Form("pairwise", (k - 1) * a_i + (m - 1) * k * a_e + ((k - 1) * b_i + (m - 1) * k * b_e) / (k * m) * n, THAKUR),
        Form("bruck", rounds * (a + n / 2 * b), f"{BRUCK}; no more than half of the blocks travel in a round"),
    ),
    "redistribute": (Form("pairwise", (p - 1) * a + n * b, f"{HOCKNEY}, for the rank that sends or receives most"),),
    "send": DIRECT,
    "recv": DIRECT,
    "slice": LOCAL,
    "pend": LOCAL,
    "cast": LOCAL,
    "wait": (Form("local", sympy.Integer(0), "the collective is paid where it starts"),),
    "fold_in": (Form("local", sympy.Integer(0), "one number"),),
    "join_chunks": LOCAL,
}  # fmt: skip

MEASURED_AS = {"redistribute": "all_to_all", "recv": "send"}
WITHOUT_GROUP = ("cast", "wait", "fold_in")  # all others cost nothing on one rank


# -- prices ------------------------------------------------------------------------------------------------------------


def price(function: Callable[..., Any] | str, bytes: Any, ranks: Any, machine: Machine, *, shape: Any = None) -> Any:
    """Return the seconds of a transfer; numbers or arrays, which are broadcast.

    Args:
        function: the transfer or its name.
        bytes: ``n`` as in the module's docstring.
        ranks: the number of ranks; one rank exchanges nothing.
        machine: the machine; its measured fits replace the forms within a node.
        shape: ``(k, m)``, ranks on a node and nodes; without it, ranks fill one node after the other.

    Raises:
        ValueError: no such transfer, negative bytes, no ranks, or a shape that does not hold the ranks.
    """
    seconds = np.min(_candidates(_name(function), bytes, ranks, machine, shape), axis=0)
    return float(seconds) if seconds.ndim == 0 else seconds


def startup(function: Callable[..., Any] | str, ranks: Any, machine: Machine, *, shape: Any = None) -> Any:
    """Return the seconds that a transfer takes before its first byte: the price of no bytes, θ.

    It is the latency of the form with the fewest messages, so it is never more than the price of some bytes.
    Arguments and errors are those of ``price``.
    """
    return price(function, 0, ranks, machine, shape=shape)


def algorithm(
    function: Callable[..., Any] | str,
    bytes: int,
    ranks: int,
    machine: Machine,
    *,
    shape: tuple[int, int] | None = None,
) -> str:
    """Return the name of the cheapest form, the first one among equals.

    It is ``measured`` for a fit, or ``none`` if nothing is done.
    """
    name = _name(function)
    seconds = _candidates(name, bytes, ranks, machine, shape)
    if not seconds.min():
        return "none"
    inside = ranks <= machine.ranks_per_node if shape is None else shape[1] == 1
    return "measured" if inside and _fit(name, machine) else FORMS[name][int(seconds.argmin())].algorithm


def _name(function: Callable[..., Any] | str) -> str:
    name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
    if name not in FORMS:
        raise ValueError(f"{name} is no transfer with a price; there are {', '.join(FORMS)}")
    return name


def _candidates(name: str, bytes: Any, ranks: Any, machine: Machine, shape: Any) -> np.ndarray:
    """Return the seconds of every form: ``[forms, ...]``."""
    size, count = np.asarray(bytes, dtype=float), np.asarray(ranks, dtype=float)
    per_node, nodes = (
        _default_shape(count, machine) if shape is None else (np.asarray(entry, dtype=float) for entry in shape)
    )
    size, count, per_node, nodes = np.broadcast_arrays(size, count, per_node, nodes)
    if not np.all(size >= 0):
        raise ValueError(f"{name}: bytes are ≥ 0, not {bytes}")
    if not np.all(count >= 1):
        raise ValueError(f"{name}: ranks are ≥ 1, not {ranks}")
    if not np.all(
        (per_node >= 1) & (nodes >= 1) & (np.maximum(per_node, nodes) <= count) & (count <= per_node * nodes)
    ):
        raise ValueError(f"{name}: {ranks} ranks do not fit on nodes of the shape {shape}, (ranks on a node, nodes)")
    inside, outside, memory = _figures(machine)
    slowest = (np.where(nodes > 1, far, near) for near, far in zip(inside, outside, strict=True))
    values = (size, count, per_node, nodes, *slowest, *inside, *outside, *memory)
    prices = np.stack([np.broadcast_to(seconds(*values), size.shape) for seconds in _compiled(name)])
    fit = _fit(name, machine)
    # over several nodes it is a lower bound, so that a group never gets cheaper by outgrowing a node
    if fit is not None:
        within = _scaled(fit, name, size, np.where(nodes > 1, per_node, count))
        prices = np.where(nodes > 1, np.maximum(prices, within), within)
    return prices if name in WITHOUT_GROUP else np.where(count > 1, prices, 0.0)


def _default_shape(count: np.ndarray, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    return np.minimum(count, machine.ranks_per_node), np.ceil(count / machine.ranks_per_node)


@cache
def _compiled(name: str, module: str = "numpy") -> tuple[Callable[..., Any], ...]:
    """Return the forms of a transfer as functions of arrays, or of numbers with ``math``.

    They have one argument for each of ``SYMBOLS``.
    """
    return tuple(sympy.lambdify(SYMBOLS, form.seconds, module) for form in FORMS[name])


def _fit(name: str, machine: Machine) -> Measured | None:
    return machine.fit(MEASURED_AS.get(name, name))


def _scaled(fit: Measured, name: str, size: np.ndarray, count: Any) -> np.ndarray:
    """Scale a fit to another number of ranks."""
    floor, fixed, slope = scaled_parts(fit, name, count)
    return np.maximum(floor, fixed + slope * size)


def scaled_parts(fit: Measured, name: str, count: Any) -> tuple[Any, Any, Any]:
    """Return the floor, the fixed seconds and the seconds a byte of a fit that is scaled to a number of ranks.

    Fixed costs are scaled by the first form's messages, the rest by its bytes.
    """

    def first(name: str, count: Any) -> tuple[Any, Any]:
        seconds = _compiled(name)[0]
        return tuple(seconds(1.0, count, count, 1.0, x, y, x, y, 0, 0, 0, 0) for x, y in ((1.0, 0.0), (0.0, 1.0)))

    (steps, volume), (base_steps, base_volume) = first(name, count), first(fit.operation, float(fit.ranks))
    fixed = steps / base_steps
    return (
        fixed * fit.floor, fixed * (fit.latency + fit.half / fit.bandwidth), volume / base_volume / fit.bandwidth
    )  # fmt: skip


# -- of a transfer in a program ----------------------------------------------------------------------------------------


def shape_of_group(ranks: Any, ranks_per_node: int) -> tuple[int, int]:
    """Return ``(k, m)``: the most ranks that are on one node, and the number of nodes."""
    nodes, counts = np.unique(np.asarray(tuple(ranks)) // ranks_per_node, return_counts=True)
    return int(counts.max()), len(nodes)


def step_price(
    function: Target,
    source: TensorType,
    arguments: Mapping[str, Any],
    result: TensorType,
    machine: Machine,
    *,
    empty: bool = False,
) -> float:
    """Return the seconds of one transfer on its mesh, for the group that takes longest.

    A message is priced where it is received; its send is free, so that the prices of a program may be added up.

    Args:
        function, source, given, result: the transfer, its operand's type, its arguments by name, and its result's type.
        empty: whether to price the transfer without bytes: its start-up seconds.

    Raises:
        ValueError: the transfer exchanges data, and a type has no Layout.
    """
    name = _name(function)
    before, after = _held(source), _held(result)
    if name in ("wait", "send", "fold_in"):
        return 0.0
    if name == "cast":
        return _cached_price(name, before + after, 1, machine)
    if source.layout is None or result.layout is None:
        raise ValueError(
            f"{name} exchanges values on a mesh; {source if source.layout is None else result} has no Layout"
        )
    if name in ("redistribute", "recv"):
        exchange = exchange_on(source.layout, result.layout, source.shape, machine)
        exchange = (0, *exchange[1:]) if empty else exchange
        return exchange_price(name, exchange, source.dtype.itemsize, machine)
    if name in ("all_reduce", "reduce_scatter"):
        wider = transfers.reduced_as(arguments.get("op", "sum"), source.dtype).itemsize // source.dtype.itemsize
        before, after = before * wider, after * wider
    mesh, axes = source.layout.mesh, transfers.axes_of(arguments["axis"])
    count = mesh.count(axes)
    size = {"all_gather": count * before, "reduce_scatter": count * after, "slice": 2 * after, "pend": after}.get(
        name, max(before, after)
    )
    return group_price(name, 0 if empty else size, axes, mesh, machine)


def group_price(name: str, size: int, axes: Axes, mesh: Mesh, machine: Machine) -> float:
    """Return the seconds of a transfer over ``axes`` for the group that takes longest; ``size`` is ``n``."""
    count = mesh.count(axes)
    places = group_places(mesh, axes, machine.borders)
    return max([_cached_price(name, size, count, machine.across(borders), shape) for shape, borders in places])


def exchange_price(name: str, exchange: Exchange, itemsize: int, machine: Machine) -> float:
    """Return the seconds of a redistribute or recv whose busiest rank is known."""
    elements, count, borders = exchange
    name = name if count <= 2 else "redistribute"  # several messages from several ranks
    shape = (1, count) if borders else (count, 1)
    return _cached_price(name, elements * itemsize, count, machine.across(borders), shape)


def fastest_rates(machine: Machine) -> tuple[float, float]:
    """Return seconds a received byte that no transfer is faster than: inside a node, and between nodes."""
    inside, outside, _ = _figures(machine)
    rates = [inside[1]]
    for fit in machine.measured:
        ranks = float(fit.ranks)
        volume = _compiled(fit.operation)[0](1.0, ranks, ranks, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
        rates.append(1 / (float(volume) * fit.bandwidth))
    return min(rates), outside[1]


@lru_cache(maxsize=65536)  # a program has few different sizes
def _cached_price(name: str, bytes: float, ranks: int, machine: Machine, shape: tuple[int, int] | None = None) -> float:
    """Return ``price`` of numbers, which needs no arrays."""
    if ranks == 1 and name not in WITHOUT_GROUP:
        return 0.0
    if shape is None:
        shape = min(ranks, machine.ranks_per_node), -(-ranks // machine.ranks_per_node)
    size, count, per_node, nodes = float(bytes), float(ranks), float(shape[0]), float(shape[1])
    fit = _fit(name, machine)
    within = 0.0
    if fit is not None:
        within = float(_scaled(fit, name, np.asarray(size), per_node if nodes > 1 else count))
        if nodes == 1:
            return within
    near, far, local = _figures(machine)
    values = (size, count, per_node, nodes, *(far if nodes > 1 else near), *near, *far, *local)
    return min([max(within, float(seconds(*values))) for seconds in _compiled(name, "math")])


@lru_cache(maxsize=64)
def _figures(machine: Machine) -> tuple[tuple[float, float], ...]:
    """Return latency and seconds a byte of links inside a node, of links between nodes, and of memory."""
    inside = machine.inside.latency, 1 / machine.inside.bandwidth
    outside = max(inside[0], machine.outside.latency), max(inside[1], 1 / machine.outside.bandwidth)
    return inside, outside, (machine.memory.latency, 1 / machine.memory.bandwidth)


@lru_cache(maxsize=4096)
def group_shapes(mesh: Mesh, axes: Axes, ranks_per_node: int) -> tuple[tuple[int, int], ...]:
    """Return ``shape_of_group`` of all groups over ``axes``, each shape once."""
    return tuple(sorted({shape_of_group(group, ranks_per_node) for group in ranks_by_group(mesh, axes)}))


@lru_cache(maxsize=4096)
def group_places(
    mesh: Mesh, axes: Axes, borders: tuple[tuple[str, int], ...]
) -> tuple[tuple[tuple[int, int], int], ...]:
    """Return ``shape_of_group`` and how many borders separate its ranks, of all groups over ``axes``; no pair twice."""
    found = set()
    for group in ranks_by_group(mesh, axes):
        found.add((shape_of_group(group, borders[0][1]), crossed(group, borders)))
    return tuple(sorted(found))


def crossed(ranks: Iterable[int], borders: tuple[tuple[str, int], ...]) -> int:
    """Return how many borders of ``Machine.borders`` separate some ranks; 0 if they share a host."""
    ranks = tuple(ranks)
    apart = [k for k, (_, size) in enumerate(borders, 1) if len({rank // size for rank in ranks}) > 1]
    return max(apart, default=0)


def crosses_hosts(mesh: Mesh, machine: Machine, hosts: Hosts | None = None) -> bool:
    """Return whether a mesh has ranks on several hosts, or racks.

    Args:
        hosts: those of a job; without one, the machine tells where ranks are.
    """
    if hosts is None:
        return crossed(mesh.ranks, machine.borders) > 0
    return len({hosts.of_rank[rank] for rank in mesh.ranks}) > 1 or crossed(mesh.ranks, machine.borders[1:]) > 0


def exchange_on(source: Layout, target: Layout, shape: tuple[int, ...], machine: Machine) -> Exchange:
    """Return ``busiest`` of an exchange on a machine; the last value counts the borders that messages cross."""
    elements, count, borders = busiest(source, target, shape, machine.ranks_per_node)
    for k, level in enumerate(machine.levels if borders else ()):
        borders = k + 2 if busiest(source, target, shape, level.ranks)[2] else borders
    return elements, count, int(borders)


def _held(type: TensorType) -> int:
    """Return the bytes of the largest piece."""
    if type.layout is None:
        return math.prod(type.shape) * type.dtype.itemsize
    mesh = type.layout.mesh
    return math.prod(type.attr.local_shape(type.shape, mesh, dict.fromkeys(mesh.sizes, 0))) * type.dtype.itemsize
