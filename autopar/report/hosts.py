"""Say which axes of a mesh cross hosts, count the bytes between hosts, and say why collectives run at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autopar.costs.machine import Machine
from autopar.costs.prices import exchange_on
from autopar.ir import transfers
from autopar.ir.hosts import Hosts
from autopar.ir.layout import Axes, largest
from autopar.ir.mesh import Mesh, ranks_by_group
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.record import TensorType

SHOWN = 8  # the most hosts in a sentence


def about_hosts(mesh: Mesh, machine: Machine, hosts: Hosts | None = None) -> list[str]:
    """Return which axes cross hosts, and racks; nothing if none does.

    Args:
        hosts: those of a job; without one, the machine tells where ranks are.
    """
    notes = []
    for k, (name, ranks) in enumerate(machine.borders):
        place = _place(machine, hosts) if k == 0 else ranks.__rfloordiv__
        if sentence := _crossing(mesh, name, place):
            notes.append(sentence)
    why = "" if hosts is None else _why_at_once(hosts)
    if notes and (why := why or _why_over_axes(mesh, _place(machine, hosts))):
        notes.append(why)
    return notes


def bytes_between_hosts(program: Program, machine: Machine, hosts: Hosts | None = None) -> int:
    """Return the bytes of a rank's collectives and messages between hosts, in one step of an explicit program.

    Of a collective whose ranks are on several hosts, the bytes are those of its largest side: what a rank gives to a
    reduction, or gets from a gather. An all-reduce counts twice, because it is both. Of a message, or a redistribute,
    they are those that the worst rank receives.
    """
    place, known, total = _place(machine, hosts), dict[tuple[Mesh, Axes], bool](), 0
    for node in program.nodes:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is None or not row.collective or node.target is transfers.send:
            continue
        source, result = record_of(operands(node)[0]).type, record_of(node).type
        if not isinstance(source, TensorType) or not isinstance(result, TensorType):
            continue
        if source.layout is None or result.layout is None:
            continue
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        if "axis" not in arguments:  # a message, or a redistribute
            if exchange_on(source.layout, result.layout, source.shape, machine)[2]:
                total += transfers.received(node.target, source, arguments, result)
            continue
        mesh, axes = source.layout.mesh, transfers.axes_of(arguments["axis"])
        if (mesh, axes) not in known:
            known[mesh, axes] = any(len({*map(place, group)}) > 1 for group in ranks_by_group(mesh, axes))
        if known[mesh, axes]:
            total += _largest_side(node.target, source, arguments, result)
    return total


def _largest_side(function: Any, source: TensorType, arguments: Mapping[str, Any], result: TensorType) -> int:
    width = source.dtype.itemsize * (2 if function is transfers.all_reduce else 1)
    if function in (transfers.all_reduce, transfers.reduce_scatter):
        width *= transfers.reduced_as(arguments.get("op", "sum"), source.dtype).itemsize // source.dtype.itemsize
    return max(largest(type.attr, type.shape, type.mesh) for type in (source, result)) * width


def _place(machine: Machine, hosts: Hosts | None) -> Callable[[int], int]:
    """Return what tells the host of a rank."""
    return machine.ranks_per_node.__rfloordiv__ if hosts is None else hosts.of_rank.__getitem__


def _crossing(mesh: Mesh, name: str, place: Callable[[int], int]) -> str:
    axes = [axis for axis, size in mesh.axes if size > 1]
    far = [axis for axis in axes if any(len({*map(place, group)}) > 1 for group in ranks_by_group(mesh, (axis,)))]
    near = [axis for axis in axes if axis not in far]
    if not far:
        return ""
    ranks: dict[int, int] = {}
    for rank in mesh.ranks:
        ranks[place(rank)] = ranks.get(place(rank), 0) + 1
    counts = sorted(set(ranks.values()))
    each = f"{counts[0]} rank{'s' * (counts[0] > 1)}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} ranks"
    stay = f"; {_listed(near)} stay{'s' * (len(near) == 1)} within a {name}" if near else ""
    return f"{_listed(far)} cross{'es' * (len(far) == 1)} {name}s ({len(ranks)} {name}s of {each}){stay}"


def _why_at_once(hosts: Hosts) -> str:
    """Return why no collective goes level by level on the hosts of a job; nothing if it may."""
    if hosts.ranks_per_host is not None:
        return ""
    rows = [(name, hosts.ranks(k)) for k, name in enumerate(hosts.names)]
    if len({len(ranks) for _, ranks in rows}) > 1:
        shown = _listed([f"{name} has {len(ranks)}" for name, ranks in rows[:SHOWN]])
        why = f"hosts have different numbers of ranks ({shown}{', …' * (len(rows) > SHOWN)})"
        remedy = "start equally many processes on each host"
    else:
        shown = _listed([f"{name} has {' '.join(map(str, ranks))}" for name, ranks in rows[:SHOWN]])
        why = f"the ranks of a host do not follow each other ({shown}{', …' * (len(rows) > SHOWN)})"
        remedy = "number them host by host, as torchrun does"
    return (
        f"{why}: collectives run at once, and count as between hosts; {remedy}, so that they can run within hosts first"
    )


def _why_over_axes(mesh: Mesh, place: Callable[[int], int]) -> str:
    """Return why collectives over some axes do not go level by level; nothing if all may.

    All groups need equally many ranks within each host that they reach.
    """
    uneven = []
    for axis, size in mesh.axes:
        groups = [Counter(map(place, group)) for group in ranks_by_group(mesh, (axis,))] if size > 1 else []
        if any(len(group) > 1 for group in groups) and len({count for group in groups for count in group.values()}) > 1:
            uneven.append(axis)
    if not uneven:
        return ""
    return (
        f"the groups along {_listed(uneven)} have unequal numbers of ranks on their hosts: their collectives run at "
        f"once; give the mesh sizes that fill the hosts, so that they can run within hosts first"
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
