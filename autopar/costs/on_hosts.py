"""Put a machine's levels where a job's hosts are: how many ranks share a host is a fact of the job."""

from __future__ import annotations

from dataclasses import replace

from autopar.costs.machine import Machine
from autopar.ir.hosts import Hosts


def on_hosts(machine: Machine, hosts: Hosts | None) -> Machine:
    """Return a machine with the hosts of a job in the place of those that it describes; without a job, the machine.

    A rack has as many hosts as before. Where hosts have different numbers of ranks, or their ranks do not follow each
    other, each rank counts as alone: then the slowest link prices all that more than one rank does together.
    """
    if hosts is None:
        return machine
    per_host = hosts.ranks_per_host
    if per_host is None:
        return replace(machine.across(len(machine.borders)), ranks_per_node=1, levels=())
    if len(hosts) == 1:
        per_host = max(per_host, machine.ranks_per_node)
    if per_host == machine.ranks_per_node:
        return machine
    levels = [replace(level, ranks=level.ranks // machine.ranks_per_node * per_host) for level in machine.levels]
    return replace(machine, ranks_per_node=per_host, levels=tuple(levels))
