"""Say which axes of a mesh cross hosts, and why collectives between hosts run at once where they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.costs.machine import Machine
from autopar.ir.hosts import Hosts
from autopar.ir.mesh import Mesh

SHOWN = 8  # the most hosts in a sentence


def about_hosts(mesh: Mesh, machine: Machine, hosts: Hosts | None = None) -> list[str]:
    """Return which axes cross hosts, and racks; nothing if none does.

    Args:
        hosts: those of a job; without one, the machine tells where ranks are.
    """
    notes = []
    for k, (name, ranks) in enumerate(machine.borders):
        of_job = hosts if k == 0 else None
        place = hosts.of_rank.__getitem__ if of_job and hosts else ranks.__rfloordiv__
        if sentence := _crossing(mesh, name, place):
            notes.append(sentence)
    if notes and hosts is not None and (why := _why_at_once(hosts)):
        notes.append(why)
    return notes


def crosses_hosts(mesh: Mesh, machine: Machine, hosts: Hosts | None = None) -> bool:
    """Return whether a mesh has ranks on several hosts."""
    return bool(about_hosts(mesh, machine, hosts))


def _crossing(mesh: Mesh, name: str, place: Callable[[int], int]) -> str:
    axes = [axis for axis, size in mesh.axes if size > 1]
    far = [axis for axis in axes if any(len({*map(place, group)}) > 1 for group in mesh.groups((axis,)))]
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
    return f"{why}: collectives run at once, and count as between hosts; {remedy}, so that they can run within hosts first"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
