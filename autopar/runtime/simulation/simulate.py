"""Simulate all ranks in one process, without a process group.

Each rank is a generator that runs its local or scheduled program and stops where it must wait for others. A collective
runs when all members of its group have started it (``in_flight``). Ranks may run different programs. Ranks that wait
for each other forever are reported, with the collective in which each waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
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
from autopar.runtime.lowering.local_transfers import CALLS
from autopar.runtime.lowering.packing import new_piece, packing, take
from autopar.runtime.simulation.effects import COLLECTIVE, RankPosition
from autopar.runtime.simulation.in_flight import InFlight, Instruction, Ticket, Until
from autopar.runtime.simulation.pieces import agree
from autopar.torch_private import OpOverload, aten

Values = dict[str, Any]


BETWEEN = "between stages"
WAIT = "wait"  # for a collective that was started


# a piece may have other strides than the whole value had at capture
ANY_STRIDES: dict[OpOverload, Callable[..., Any]] = {aten.view.default: torch.reshape}


class _Name(str):
    """A reference to a value in the arguments of an instruction."""


Run = Generator[Until, None, None]


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
        function = ANY_STRIDES.get(called_op(node), called_op(node))
        return Instruction(node.name, node, function, args, kwargs, program=program)
    arguments, record = transfers.arguments(node.target, args, kwargs), record_of(node)
    about, function, axis = {"arguments": arguments}, row.function, None
    if node.target in (transfers.send, transfers.recv):
        about["dtype"], axis = tensor_type(node).dtype, BETWEEN
    elif node.target is transfers.wait:
        axis = WAIT
    elif row.collective and arguments["axis"]:
        function, axis = COLLECTIVE[node.target], arguments["axis"]
    else:
        function = CALLS[node.target]
    return Instruction(
        node.name, node, function, (args[0],), about, axis, arguments.get("stage"), record.started, record.span
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


def run_rank(
    code: Sequence[Instruction], values: Values, meshes: Meshes, rank: int, in_flight: InFlight, during: str = ""
) -> Run:
    """Run instructions on one rank's values; stop where it must wait for other ranks.

    Args:
        in_flight: what is under way between the ranks.
        during: the slot of a schedule that they belong to, in errors.
    """
    here = f"on rank {rank}, in {during}" if during else f"on rank {rank}"
    for step in code:
        if step.axis is BETWEEN:
            operand = _load(step.args[0], values)
            values[step.name] = yield from _between_stages(step, operand, meshes, rank, in_flight)
        elif step.axis is not None:
            operand = _load(step.args[0], values)
            values[step.name] = yield from _collective(step, operand, meshes, rank, in_flight)
        elif "arguments" in step.kwargs:
            x, position = _load(step.args[0], values), RankPosition(meshes, rank, meshes[step.stage].coordinates(rank))
            piece = x[0] if isinstance(x, (list, tuple)) else x  # of chunks that are joined, the first
            function, args = step.function(step.kwargs["arguments"], position, piece.shape)
            values[step.name] = function(x, *args)
        else:
            args = [_load(a, values) for a in step.args]
            kwargs = {key: _load(v, values) for key, v in step.kwargs.items()} if step.kwargs else {}
            try:
                values[step.name] = step.function(*args, **kwargs)
            except Exception as error:
                if step.program is not None:
                    current_op.add_op(error, f"{here}: {line_of(step.program, step.node)}")
                raise


def _collective(
    step: Instruction, operand: Any, meshes: Meshes, rank: int, in_flight: InFlight
) -> Generator[Until, None, Any]:
    """Start a collective, wait for one that was started, or both. Returns the result, or the ticket of a start."""
    waits = step.axis is WAIT
    ticket = operand if waits else in_flight.start(rank, step, operand, meshes)
    if step.started or not isinstance(ticket, Ticket):  # it may have ended with the run before
        return ticket
    late = partial(in_flight.late, ticket) if waits else ticket.group[0]
    yield Until(partial(in_flight.has_run, rank, ticket), step.name, late)  # the first rank goes on first
    return in_flight.result(rank, ticket)


def _between_stages(
    step: Instruction, operand: Any, meshes: Meshes, rank: int, in_flight: InFlight
) -> Generator[Until, None, Any]:
    """Send the boxes of a rank in an exchange between stages, and receive those of others."""
    plan = packing(transfers.Ends.of(step.kwargs["arguments"], meshes), rank)
    for receiver, places in plan.sends:
        in_flight.send((rank, receiver, None), take(operand, places), step.name)
    senders = [sender for sender, _ in plan.receives]
    yield Until(lambda: all(in_flight.has_come((other, rank, None)) for other in senders), step.name, senders)
    boxes = []
    for sender in senders:
        name, box = in_flight.receive((sender, rank, None))
        if name != step.name:
            raise SimulationError(f"rank {rank} receives in {step.name} what rank {sender} has sent in {name}")
        boxes.append(box)
    if step.function is transfers.send:
        return operand
    device = operand.device if operand is not None else torch.device("cpu")
    return new_piece(plan, step.kwargs["dtype"], device, operand, boxes)


def run_ranks(meshes: Meshes, code: Mapping[int, Sequence[Instruction]], values: Mapping[int, Values]) -> None:
    """Run instructions on all ranks to the end; ``values`` receives the values of each.

    Args:
        meshes: the whole mesh, under the name ``None``, and the stages.

    Raises:
        SimulationError: ranks of one group meet in different collectives, or wait forever.
    """
    in_flight = InFlight()
    runs = {rank: run_rank(code[rank], values[rank], meshes, rank, in_flight) for rank in meshes[None].ranks}
    run_together(runs)
    in_flight.check_empty()
    in_flight.complete(values)


def run_together(runs: Mapping[int, Run]) -> None:
    """Run generators, one a rank, to their ends; a rank goes on when it need not wait any more.

    Raises:
        SimulationError: ranks of one group meet in different collectives, or wait forever.
    """
    running = dict(runs)
    waiting: dict[int, Until] = {}
    while running:
        ready = [rank for rank in running if rank not in waiting or waiting[rank].ready()]
        if not ready:
            lines = [f"    rank {rank} {waiting.get(rank, 'has ended')}" for rank in runs]
            raise SimulationError("the ranks wait for each other forever:\n" + "\n".join(lines))
        for rank in ready:
            waiting.pop(rank, None)
            try:
                waiting[rank] = next(running[rank])
            except StopIteration:
                del running[rank]
