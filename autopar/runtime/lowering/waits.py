"""Name the ranks that a line of a local program waits for.

x_start : f32[8 4] = start all_reduce(x, dp) on dp         the other ranks along dp, in the collective x_start
x_dp : f32[8 4] = wait(x_start)                            the same
y : f32[8 4] = recv(…)                                     the ranks that send a part of it
"""

from __future__ import annotations

from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import node_at, record_of
from autopar.ir.program import Program
from autopar.ir.streams import Ranks
from autopar.ir.value_names import started_states
from autopar.runtime.current_slot import Wait
from autopar.runtime.lowering.packing import packing


def wait_of(program: Program, node: fx.Node) -> Wait | None:
    """Return the wait of a line; ``None`` if it waits for no rank.

    A start counts too: NCCL connects the ranks of a group in their first collective.
    """
    if node.target in (transfers.send, transfers.recv):
        arguments = transfers.arguments(node.target, node.args, node.kwargs)
        plan = packing(transfers.Ends.of(arguments, program.meshes), program.rank)
        return Wait(tuple(sorted({rank for rank, _ in (*plan.sends, *plan.receives)})))
    started = node_at(node) if node.target is transfers.wait else node
    if started.op == "placeholder":  # the run before has started it
        started = started_states(program).get(started, started)
    if started.op == "placeholder" or not record_of(started).started:
        return None
    others = tuple(rank for rank in members(program, started) if rank != program.rank)
    return Wait(others, record_of(started).message or started.name)


def members(program: Program, node: fx.Node) -> Ranks:
    """Return the ranks of a collective, in the order of its axes."""
    arguments = transfers.arguments(node.target, node.args, node.kwargs)
    return program.meshes[arguments.get("stage")].group(program.rank, arguments["axis"])
