"""Run a function on the ranks of new gloo processes, on the emulated wire where a machine says so."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import distributed

import autopar
from autopar.costs.machine import Link, Machine

Hosts = tuple[int, Link, Link]  # ranks of an emulated host, its links, and those between hosts


def on_ranks(
    count: int, function: Callable[..., Any], *args: Any, wire: Machine | None = None, hosts: Hosts | None = None
) -> Any:
    """Call a function on all ranks of new processes with one thread each; what rank 0 returns.

    Args:
        wire: the machine whose link the wire has, and that paces computing; without it groups are plain.
        hosts: the wire has several hosts, and computing is not paced.
    """
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (count, function, args, wire, hosts, os.path.join(folder, "store"), results)
        processes = multiprocessing.spawn(_rank, given, count, join=False)
        while not processes.join():  # it raises what a rank has raised
            pass
        return results.get()  # it is short, so that its sender has not waited for us


def _rank(
    rank: int, count: int, function: Callable[..., Any], args: Any, wire: Machine | None, hosts: Hosts | None,
    store: str, results: Any,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    if hosts is not None:
        per_host, inside, between = hosts
        autopar.emulate(inside.latency, inside.bandwidth, "axis", ranks_per_host=per_host, between=between)
    if wire is not None:
        autopar.emulate(wire.inside.latency, wire.inside.bandwidth, links="axis", pace=wire)
    distributed.init_process_group(init_method=f"file://{store}", rank=rank, world_size=count)
    found = function(*args)
    if rank == 0:
        results.put(found)
    distributed.barrier()
    distributed.destroy_process_group()


def together(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values
