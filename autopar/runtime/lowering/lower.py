"""Lower a local program to one Python function per phase, of ATen ops and functional collectives.

    local                                                  lowered, forward
    h : f32[16 128] = relu(mm)                      →      relu = torch.ops.aten.relu.default(mm);  mm = None
    y : f32[16 256] = all_gather(h, 1, tp, sizes=…)        y_start = start_all_gather(h, (16, 128), 1, (128, 128), '3')
    z : f32[64 256] = t(w)                                 z = torch.ops.aten.t.default(w)
    u : f32[16 64] = mm(y, z)                              y = finish_all_gather(y_start, …);  y_start = None
                                                           u = torch.ops.aten.mm.default(y, z);  y = z = None

The joint graph is split by phase: the forward also returns the values that the backward reads. ``order`` decides when
each line runs, and here each is written as it says. Arguments come in a list that the function empties, so that a
tensor is freed after its last reader, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir import transfers
from autopar.ir.nodes import operands, record_of
from autopar.ir.program import Program
from autopar.ir.streams import Groups
from autopar.report.progress import doing
from autopar.runtime.anomaly import Hunt
from autopar.runtime.lowering.body import Body
from autopar.runtime.lowering.buckets import Buckets
from autopar.runtime.lowering.communication import Communication
from autopar.runtime.lowering.donated import Donated
from autopar.runtime.lowering.in_place import write_overwritten, write_sum, write_updates
from autopar.runtime.lowering.local_transfers import write_local_transfer
from autopar.runtime.lowering.order import Line, LineKind, order_of
from autopar.runtime.lowering.source import Run, compiled


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


@doing("lower")
def lower(
    program: Program,
    groups: Groups,
    gate: Callable[[], None] | None = None,
    bytes: Mapping[str, int] | None = None,
    device: torch.device | None = None,
    hunt: Hunt | None = None,
) -> dict[str, Lowered]:
    """Lower the phases of a rank's local program; linear in the graph.

    Args:
        groups: the names of the process groups.
        gate: called before the first collective of each phase.
        bytes: name of a reduction or gather → the bytes that it adds to a bucket; others have no bucket.
        device: the device for values from another stage; the default is the CPU.
        hunt: checks each value for NaN after the op that computes it.
    """
    values: dict[str, list[fx.Node]] = {"forward": []}
    for node in program.nodes:
        if node.op in ("call_function", "get_attr"):
            values.setdefault(record_of(node).phase, []).append(node)
    rows = list(zip(operands(program.output), record_of(program.output).results, strict=True))
    results = {
        "forward": [node for node, result in rows if result.kind != "grad"],
        "backward": [node for node, result in rows if result.kind == "grad"],
    }
    saved = _read_from_outside(values.get("backward", []), results["backward"])
    results["forward"] += [node for node in saved if record_of(node).phase == "forward" and node.op == "call_function"]
    lowered = {}
    for phase, nodes in values.items():
        buckets = Buckets.of(program, nodes, bytes or {})
        body = Body(program, gate, hunt)
        lowered[phase] = _function(phase, nodes, results[phase], body, groups, device, buckets, Donated())
    return lowered


def lower_whole(
    program: Program,
    groups: Groups,
    gate: Callable[[], None] | None = None,
    bytes: Mapping[str, int] | None = None,
    device: torch.device | None = None,
    donated: Donated | None = None,
    hunt: Hunt | None = None,
) -> Lowered:
    """Lower all phases of a rank's local program to one function, which returns the program's results.

    Args:
        donated: the memory that the function may write to; it puts the next values of these placeholders there.

    The other arguments are those of ``lower``.
    """
    nodes = [node for node in program.nodes if node.op in ("call_function", "get_attr")]
    phases = " and ".join(dict.fromkeys(record_of(node).phase for node in nodes))
    donated = donated or Donated()
    buckets = Buckets.of(program, nodes, bytes or {}, donated.sums)
    body = Body(program, gate, hunt, donated.placeholders)
    return _function(phases, nodes, operands(program.output), body, groups, device, buckets, donated)


def _read_from_outside(nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the values that a phase reads and does not compute."""
    computed = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in operands(node))
    return [value for value in {**read, **dict.fromkeys(results)} if value not in computed]


def _function(
    phases: str,
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
    body: Body,
    groups: Groups,
    device: torch.device | None,
    buckets: Buckets,
    donated: Donated,
) -> Lowered:
    """Write and compile the function of one phase, or of several."""
    program, gives = body.program, list(dict.fromkeys(results))
    constants = [node for node in nodes if node.op == "get_attr"]
    takes = [*constants, *(node for node in _read_from_outside(nodes, gives) if node not in donated.zeros)]
    body.take(takes)
    order = order_of(nodes, gives, takes, buckets, donated)
    _write(body, order, Communication(body, groups, device or torch.device("cpu")), donated)
    body.give(gives)
    run = compiled(body.graph, f"{phases} of rank {program.rank}", program, body.origins)
    return Lowered(run, tuple(n.name for n in takes), tuple(n.name for n in gives), body.graph, body.origins)


def _write(body: Body, order: Sequence[Line], communication: Communication, donated: Donated) -> None:
    """Write the lines in their order."""
    for kind, nodes in order:
        match kind:
            case LineKind.COMPUTE if nodes[0].target in (transfers.send, transfers.recv):
                communication.between_stages(nodes[0])
            case LineKind.COMPUTE if nodes[0].target in transfers.BY_FUNCTION:
                write_local_transfer(body, nodes[0])
            case LineKind.COMPUTE:
                body.compute(nodes[0])
            case LineKind.START:
                communication.start(nodes)
            case LineKind.FINISH:
                communication.finish(nodes)
            case LineKind.ADD:
                write_sum(body, donated, nodes[0])
            case LineKind.OVERWRITE:
                write_overwritten(body, nodes[0])
            case LineKind.UPDATE:
                write_updates(body, donated, nodes)
