"""Simulate all ranks in one process, without a process group.

Each rank is a generator that runs its local or scheduled program and stops at every collective. The scheduler runs a
collective when all members of its group have arrived; a rank that only starts one goes on, and stops where it waits for
it (``in_flight``). Ranks may run different programs. Ranks that wait for each other forever are reported, with the
collective in which each waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import SimulationError, at_line
from autopar.ir import transfers
from autopar.ir.nodes import behind, called_op, is_getitem, name_of, operands, record_of, tensor_type
from autopar.ir.ops import local_map
from autopar.ir.program import Program
from autopar.ir.record import TensorType
from autopar.ir.text.printer import print_op
from autopar.ir.transfers import Meshes
from autopar.runtime import current_op
from autopar.runtime.lowering.packing import Packing, new_piece, packing, take
from autopar.runtime.simulation.effects import COLLECTIVE, LOCAL, RankPosition, chunk
from autopar.runtime.simulation.in_flight import InFlight, Ticket
from autopar.runtime.simulation.pieces import agree
from autopar.torch_private import OpOverload, aten

Values = dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """One node, ready to run: ``values[name] = function(*args, **kwargs)`` with names looked up."""

    name: str
    node: fx.Node
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axis: Any = None  # the axis or axes of a collective; ``BETWEEN`` for an exchange between stages
    stage: str | None = None  # the stage whose mesh has the axes
    started: bool = False  # the collective is only started
    span: tuple[int, int] | None = None  # the elements that a chunk of it sends
    program: Program | None = None  # the program of the node, for errors that quote its line


BETWEEN = "between stages"
WAIT = "wait"  # for a collective that was started


# a piece may have other strides than the whole value had at capture
ANY_STRIDES: dict[OpOverload, Callable[..., Any]] = {aten.view.default: torch.reshape}


class _Name(str):
    """A reference to a value in the arguments of an instruction."""


@dataclass(frozen=True)
class Arrival:
    """A rank at a collective, with its operand; at a wait, with the ticket of what was started."""

    instruction: Instruction
    operand: Any
    meshes: Meshes

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the collective at which a rank has arrived."""
        return self.meshes[self.instruction.stage].group(rank, self.instruction.axis)


@dataclass(frozen=True)
class Until:
    """A rank that waits for other ranks.

    Attributes:
        ready: returns whether it can go on.
        words: what it waits for.
        ranks: the ranks that it waits for.
    """

    ready: Callable[[], bool]
    words: str
    ranks: tuple[int, ...]


Run = Generator[Arrival | Until, Any, None]


def compile_whole(program: Program) -> list[Instruction]:
    """Return the instructions of a local or scheduled program that runs as one function, in its order."""
    return [_instruction(program, node) for node in program.nodes if node.op not in ("placeholder", "output")]


def compile_phases(program: Program) -> dict[str, list[Instruction]]:
    """Return the instructions of a local or scheduled program, by phase."""
    phases: dict[str, list[Instruction]] = {}
    for step in compile_whole(program):
        phases.setdefault(record_of(step.node).phase, []).append(step)
    return phases


def _instruction(program: Program, node: fx.Node) -> Instruction:
    if node.op == "get_attr":
        constant = program.constants[str(node.target)]
        if constant.tensor is None:
            raise SimulationError(
                f"the constant {node.name} was read from a dump by its hash; its values are not known"
            )
        return Instruction(node.name, node, constant.tensor.clone, (), {})
    args: Any
    kwargs: Any
    args, kwargs = (fx.map_arg(a, lambda n: _Name(n.name)) for a in (node.args, dict(node.kwargs)))
    row = transfers.BY_FUNCTION.get(node.target)
    if axes := _same_along(program, node):
        about = {"index": args[1], "line": line_of(program, operands(node)[0])}
        return Instruction(node.name, node, _same_results, (args[0],), {"arguments": about}, axes, program=program)
    if row is None:
        return Instruction(
            node.name, node, ANY_STRIDES.get(called_op(node), called_op(node)), args, kwargs, program=program
        )
    arguments = transfers.arguments(node.target, args, kwargs)
    if node.target in (transfers.send, transfers.recv):
        about = {"arguments": arguments, "dtype": tensor_type(node).dtype}
        return Instruction(node.name, node, row.function, (args[0],), about, BETWEEN)
    if node.target is transfers.wait:
        return Instruction(node.name, node, row.function, (args[0],), {}, WAIT)
    if row.collective and arguments["axis"]:
        return Instruction(
            node.name,
            node,
            COLLECTIVE[node.target],
            (args[0],),
            {"arguments": arguments},
            arguments["axis"],
            arguments.get("stage"),
            record_of(node).started,
            record_of(node).span,
        )
    return Instruction(
        node.name, node, LOCAL[node.target], (args[0],), {"arguments": arguments}, None, arguments.get("stage")
    )


def _same_along(program: Program, node: fx.Node) -> tuple[str, ...]:
    """Return the axes along which the ranks have promised one value of a result of local_map's function."""
    if not is_getitem(node):
        return ()
    made: fx.Node = node.args[0]  # type: ignore[assignment]
    if made.target not in (local_map.local_map, local_map.local_map_backward):
        return ()
    name, *wanted = made.args[1:] if made.target is local_map.local_map else made.args[2:]
    key = made.target, name, *map(tuple, wanted), program.mesh  # type: ignore[arg-type]
    promised = local_map.ALIKE.get(key)
    return promised[node.args[1]] if promised else ()  # type: ignore[index]


def _same_results(
    xs: list[list[torch.Tensor]], arguments_by_rank: list[Mapping[str, Any]], positions: list[RankPosition]
) -> list[torch.Tensor]:
    """Return a result of a function of the user's on ranks that hold the same piece.

    Raises:
        SimulationError: they have other values.
    """
    about = arguments_by_rank[0]
    results = [x[about["index"]] for x in xs]
    for result, position in zip(results, positions, strict=True):
        if not agree(results[0], result):
            raise SimulationError(
                f"ranks {positions[0].rank} and {position.rank} have different values of the same piece, which a "
                f"function of local_map returns\n    {about['line']}\n"
                f"  give its placements each axis along which they compute different parts: Partial() where they add up"
            )
    return results


def line_of(program: Program, node: fx.Node) -> str:
    """Describe an op for an error: its line, the user's line, and the arguments that its indices come from."""
    record = record_of(node)
    sources = {
        name_of(source)
        for value in operands(node)
        if _is_index(value) and value.op != "placeholder"
        for source in behind([value])
        if _is_input(source)
    }
    suffix = f"   of {', '.join(sorted(sources))}" if sources else ""
    return f"{print_op(program, node).strip()}   {at_line(record.source, record.module).strip()}{suffix}"


def _is_index(node: fx.Node) -> bool:
    type = record_of(node).type
    return isinstance(type, TensorType) and not type.dtype.is_floating_point


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and record_of(node).role == "input"


def _load(value: Any, values: Values) -> Any:
    if isinstance(value, _Name):
        return values[value]
    if isinstance(value, (list, tuple)):
        return type(value)(_load(v, values) for v in value)
    return value


def run_rank(code: Sequence[Instruction], values: Values, meshes: Meshes, rank: int, during: str = "") -> Run:
    """Run instructions on one rank's values; stop at each exchange, and go on with its result.

    Args:
        during: the slot of a schedule that they belong to, in errors.
    """
    here = f"on rank {rank}, in {during}" if during else f"on rank {rank}"
    for step in code:
        if step.axis is not None:
            values[step.name] = yield Arrival(step, _load(step.args[0], values), meshes)
        elif "arguments" in step.kwargs:
            position = RankPosition(meshes, rank, meshes[step.stage].coordinates(rank))
            values[step.name] = step.function(_load(step.args[0], values), step.kwargs["arguments"], position)
        else:
            args = [_load(a, values) for a in step.args]
            kwargs = {key: _load(v, values) for key, v in step.kwargs.items()} if step.kwargs else {}
            try:
                values[step.name] = step.function(*args, **kwargs)
            except Exception as error:
                if step.program is not None:
                    current_op.add_op(error, f"{here}: {line_of(step.program, step.node)}")
                raise


def run_ranks(meshes: Meshes, code: Mapping[int, Sequence[Instruction]], values: Mapping[int, Values]) -> None:
    """Run instructions on all ranks to the end; ``values`` receives the values of each.

    Args:
        meshes: the whole mesh, under the name ``None``, and the stages.

    Raises:
        SimulationError: ranks of one group meet in different collectives, or wait forever.
    """
    in_flight = run_together({rank: run_rank(code[rank], values[rank], meshes, rank) for rank in meshes[None].ranks})
    in_flight.complete(values)


def run_together(runs: Mapping[int, Run]) -> InFlight:
    """Run generators, one a rank, to their ends. Returns the collectives, with the results that nobody has taken.

    Raises:
        SimulationError: as ``run_ranks``.
    """
    running = dict(runs)
    waiting: dict[int, Arrival | Until] = {}
    ready: dict[int, Any] = dict.fromkeys(runs)
    mail: dict[tuple[int, int], deque[tuple[str, torch.Tensor]]] = {}
    in_flight = InFlight(_collective)
    while running:
        for rank, result in ready.items():
            try:
                arrival = running[rank].send(result)
                while isinstance(arrival, Arrival) and arrival.instruction.started:
                    stream = record_of(arrival.instruction.node).stream
                    arrival = running[rank].send(in_flight.start(rank, arrival.group(rank), stream, arrival))
            except StopIteration:
                del running[rank]
                continue
            waiting[rank] = arrival
            if isinstance(arrival, Arrival) and arrival.instruction.axis is BETWEEN:
                _post(rank, arrival, mail)
        arrivals = {rank: at for rank, at in waiting.items() if isinstance(at, Arrival)}
        ready = _meet(arrivals) | _deliver(arrivals, mail) | _finish(arrivals, in_flight)
        ready |= {rank: None for rank, at in waiting.items() if isinstance(at, Until) and at.ready()}
        if running and not ready:
            raise SimulationError(
                "the ranks wait for each other forever:\n" + _waits(runs, waiting, running, in_flight)
            )
        for rank in ready:
            del waiting[rank]
    in_flight.check_empty()
    if left := [(pair, queue[0][0]) for pair, queue in mail.items() if queue]:
        (sender, receiver), name = left[0]
        raise SimulationError(f"rank {receiver} never receives {name}, which rank {sender} has sent to it")
    return in_flight


def _meet(waiting: Mapping[int, Arrival]) -> dict[int, Any]:
    """Run every collective whose group is complete."""
    ready: dict[int, Any] = {}
    for rank, arrival in waiting.items():
        axis = arrival.instruction.axis
        if rank in ready or axis in (BETWEEN, WAIT):
            continue
        group = arrival.group(rank)
        if all(
            member in waiting and member not in ready and waiting[member].instruction.axis == axis for member in group
        ):
            ready |= _collective(group, [waiting[member] for member in group])
    return ready


def _collective(group: Sequence[int], arrivals: Sequence[Arrival]) -> dict[int, torch.Tensor]:
    """Run a collective of a group in which all its members have arrived."""
    first, meshes = arrivals[0].instruction, arrivals[0].meshes
    for member, arrival in zip(group, arrivals, strict=True):
        other = arrival.instruction
        if (other.name, other.function, other.span) != (first.name, first.function, first.span):
            raise SimulationError(
                f"ranks of one group over {first.axis} meet in different collectives:\n"
                f"    rank {group[0]}: {first.name} = {first.node.format_node()}\n"
                f"    rank {member}: {other.name} = {other.node.format_node()}"
            )
    mesh = meshes[first.stage]
    positions = [RankPosition(meshes, member, mesh.coordinates(member)) for member in group]
    operands, arguments = [a.operand for a in arrivals], [a.instruction.kwargs["arguments"] for a in arrivals]
    if first.span is None:
        results = first.function(operands, arguments, positions)
    else:
        results = chunk(first.node.target, operands, arguments, first.span, positions)
    return dict(zip(group, results, strict=True))


def _finish(waiting: Mapping[int, Arrival], in_flight: InFlight) -> dict[int, Any]:
    """Let the ranks go on that wait for a collective that has run."""
    ready: dict[int, Any] = {}
    for rank, arrival in waiting.items():
        if arrival.instruction.axis is WAIT:
            started = arrival.operand
            result = in_flight.result(rank, started) if isinstance(started, Ticket) else started
            if result is not None:
                ready[rank] = result
    return ready


def _packing(rank: int, arrival: Arrival) -> Packing:
    return packing(transfers.Ends.of(arrival.instruction.kwargs["arguments"], arrival.meshes), rank)


def _post(rank: int, arrival: Arrival, mail: dict[tuple[int, int], deque[tuple[str, torch.Tensor]]]) -> None:
    """Send the boxes of a rank in an exchange between stages."""
    for receiver, places in _packing(rank, arrival).sends:
        mail.setdefault((rank, receiver), deque()).append((arrival.instruction.name, take(arrival.operand, places)))


def _deliver(
    waiting: Mapping[int, Arrival], mail: dict[tuple[int, int], deque[tuple[str, torch.Tensor]]]
) -> dict[int, Any]:
    """Finish the exchanges between stages whose boxes have all arrived."""
    ready: dict[int, Any] = {}
    for rank, arrival in waiting.items():
        step = arrival.instruction
        if step.axis is not BETWEEN:
            continue
        plan = _packing(rank, arrival)
        if not all(mail.get((sender, rank)) for sender, _ in plan.receives):
            continue
        boxes = []
        for sender, _ in plan.receives:
            name, box = mail[sender, rank].popleft()
            if name != step.name:
                raise SimulationError(f"rank {rank} receives in {step.name} what rank {sender} has sent in {name}")
            boxes.append(box)
        if step.function is transfers.send:
            ready[rank] = arrival.operand
        else:
            device = arrival.operand.device if arrival.operand is not None else torch.device("cpu")
            ready[rank] = new_piece(plan, step.kwargs["dtype"], device, arrival.operand, boxes)
    return ready


def _waits(
    ranks: Iterable[int], waiting: Mapping[int, Arrival | Until], running: Mapping[int, Any], in_flight: InFlight
) -> str:
    lines = []
    for rank in ranks:
        if rank in waiting:
            name, others = _waits_for(rank, waiting[rank], in_flight)
            lines.append(f"    rank {rank} waits in {name} for ranks {', '.join(map(str, others))}")
        elif rank not in running:
            lines.append(f"    rank {rank} has ended")
    return "\n".join(lines)


def _waits_for(rank: int, at: Arrival | Until, in_flight: InFlight) -> tuple[str, Sequence[int]]:
    """Return in what a rank waits, and for which ranks."""
    if isinstance(at, Until):
        return at.words, at.ranks
    step = at.instruction
    if step.axis is BETWEEN:
        return step.name, [sender for sender, _ in _packing(rank, at).receives]
    return step.name, in_flight.late(at.operand) if step.axis is WAIT else list(at.group(rank))
