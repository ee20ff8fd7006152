"""Lower a scheduled program to one Python function per phase, of ATen ops and functional collectives.

    scheduled                                              lowered, forward
    h : f32[16 128] = relu(mm)                      →      relu = torch.ops.aten.relu.default(mm);  mm = None
    y_start : f32[16 256] = start all_gather(h, …) on tp   y_start = start_all_gather(h, (16, 128), 1, (128, 128), '3')
    z : f32[64 256] = t(w)                                 z = torch.ops.aten.t.default(w)
    y : f32[16 256] = wait(y_start)                        y = finish_all_gather(y_start, …);  y_start = None
    u : f32[16 64] = mm(y, z)                              u = torch.ops.aten.mm.default(y, z);  y = z = None

The lines are written in the order of the program. The program decides when a collective starts, with which others it
shares a message, and when it is waited for; nothing is decided here. Arguments come in a list that the function
empties, so that a tensor is freed after its last reader, as in eager PyTorch. The joint graph is split by phase: the
forward also returns the values that the backward reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import is_getitem, node_at, record_of
from autopar.ir.program import Program
from autopar.ir.streams import Groups
from autopar.report.progress import doing
from autopar.runtime.anomaly import Hunt
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.communication import Communication
from autopar.runtime.lowering.in_place import adds_product, write_overwritten, write_sum, write_updates
from autopar.runtime.lowering.local_transfers import call_of
from autopar.runtime.lowering.regions import Regions, with_regions
from autopar.runtime.lowering.source import Run, compiled
from autopar.runtime.wire.pacing import Pacing
from autopar.scheduling.programs.apply import communicates
from autopar.scheduling.programs.donated import Donated
from autopar.scheduling.programs.functions import MESSAGES, Function, functions_of


@dataclass(frozen=True)
class Lowered:
    """The function of one phase on one rank.

    Attributes:
        run: takes a list of tensors, which it empties, and returns a list.
        takes: the names of the values that it takes.
        gives: the names of the values that it returns.
        graph: the FX graph of the function, which other compilers accept too.
        origins: name of a value of the function → the node of the program that it is, or is a part of.
    """

    run: Run
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    graph: fx.Graph
    origins: Mapping[str, fx.Node]


def lower(
    program: Program,
    groups: Groups,
    device: torch.device | None = None,
    donated: Donated | None = None,
    hunt: Hunt | None = None,
    regions: Regions | None = None,
) -> dict[str, Lowered]:
    """Lower the phases of a rank's scheduled or local program. The arguments are those of ``lower_function``."""
    return {
        function.phases[0]: lower_function(function, program, groups, device, donated, hunt, regions)
        for function in functions_of(program, False)
    }


def lower_function(
    function: Function,
    program: Program,
    groups: Groups,
    device: torch.device | None = None,
    donated: Donated | None = None,
    hunt: Hunt | None = None,
    regions: Regions | None = None,
    gate: Callable[[], None] | None = None,
    pacing: Pacing | None = None,
) -> Lowered:
    """Lower a function of a rank's scheduled or local program; linear in the graph.

    Args:
        groups: the names of the process groups.
        device: the device for values from another stage; the default is the CPU.
        donated: the memory that the function may write to; it puts the next values of these placeholders there.
        hunt: checks each value for NaN after the op that computes it.
        regions: compiles what is computed between exchanges; not with ``hunt``, which looks at each value.
        gate: called before the first collective.
        pacing: writes the paces of an emulated wire, so that computing takes its seconds.
    """
    donated = donated or Donated()
    body = Body(program, gate, hunt, donated.placeholders)
    takes = [node for node in function.takes if node not in donated.zeros]
    body.take(takes)
    body.values |= {value: body.values[home] for value, home in function.replaced.items() if home in body.values}
    communication = Communication(body, groups, device or torch.device("cpu"))
    communication.take_under_way(takes)
    title = f"{' and '.join(function.phases)} of rank {program.rank}"
    with doing(lambda: f"compile, {title}: {'' if body.at is None else record_of(body.at).module}".removesuffix(": ")):
        _write(body, function.nodes, communication, donated.within(function.nodes), pacing)
        body.give(function.gives)
        graph = body.graph
        if regions is not None and hunt is None:
            fresh = frozenset(body.values[node].name for node in body.fresh if node in body.values)
            graph = with_regions(graph, body.origins, program, fresh, regions)
        run = compiled(graph, title, program, body.origins)
    gives = tuple(node.name for node in function.gives)
    return Lowered(run, tuple(node.name for node in takes), gives, graph, body.origins)


def _write(
    body: Body, nodes: Sequence[fx.Node], communication: Communication, donated: Donated, pacing: Pacing | None
) -> None:
    """Write the lines in their order."""
    if pacing is not None:
        pacing.start(body.graph)
    for members in _lines(nodes):
        body.at = first = members[0]
        waits = first.target is transfers.wait or first.target in MESSAGES
        communicating = waits or record_of(first).started
        if pacing is not None and communicating:
            pacing.end(body.graph)
        _write_line(body, members, communication, donated)
        if pacing is not None and waits:
            pacing.start(body.graph)
        elif pacing is not None and not communicating:
            pacing.add(first)
    if pacing is not None:
        pacing.end(body.graph)


def _lines(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Yield the nodes of each line: one node, or the starts or the waits of one message."""
    for _, members in itertools.groupby(nodes, _message):
        yield list(members)


def _write_line(body: Body, members: Sequence[fx.Node], communication: Communication, donated: Donated) -> None:
    """Write one line: the starts or the waits of a message, a transfer, an update, or an op."""
    first, updates = members[0], donated.updates
    if record_of(first).started:
        communication.start(members)
    elif first.target is transfers.wait:
        communication.finish([node_at(node) for node in members], members)
    elif first.op != "call_function":
        return
    elif first.target in MESSAGES:
        communication.between_stages(first)
    elif communicates(first):  # a local program has no starts: it waits at once
        communication.start(members)
        communication.finish(members, members)
    elif first.target in transfers.BY_FUNCTION:
        body.apply(first, *call_of(body.program, first))
    elif adds_product(body, donated, first):
        return  # the next line computes it
    elif first in donated.sums:
        write_sum(body, donated, first)
    elif first in updates or (is_getitem(first) and first.args[0] in updates):
        write_overwritten(body, first)
        if first in donated.buckets:
            write_updates(body, donated, donated.buckets[first])
    else:
        body.compute(first)


def _message(node: fx.Node) -> object:
    """Return a key that neighbouring starts, or waits, of one message have in common; any other node is its own key."""
    started = node_at(node) if node.target is transfers.wait else node
    message = record_of(started).message
    return (node.target is transfers.wait, message) if message else node
