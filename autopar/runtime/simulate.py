"""Simulation: all ranks in one process, without a process group.

Each rank is a generator that runs its local program and stops at every collective; the scheduler carries out a
collective when all members of its group have arrived. Ranks may run different programs, and ranks that wait for each
other for ever are reported with what each waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar import transfers
from autopar.errors import SimulationError
from autopar.mesh import Mesh
from autopar.program import Program, record_of

Values = dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """One node, ready to run: ``values[name] = function(*args, **kwargs)`` with names looked up."""

    name: str
    node: fx.Node
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axis: str | None  # of a collective


# a piece may have other strides than the whole value had at capture
ANY_STRIDES = {torch.ops.aten.view.default: torch.reshape}


class _Name(str):
    """A reference to a value in the arguments of an instruction."""


@dataclass(frozen=True)
class Arrival:
    """A rank waits in a collective with its operand."""

    instruction: Instruction
    operand: torch.Tensor


def compile_phases(program: Program) -> dict[str, list[Instruction]]:
    """The instructions of a local program, by phase."""
    phases: dict[str, list[Instruction]] = {}
    for node in program.nodes:
        if node.op in ("placeholder", "output"):
            continue
        phases.setdefault(record_of(node).phase, []).append(_instruction(program, node))
    return phases


def _instruction(program: Program, node: fx.Node) -> Instruction:
    if node.op == "get_attr":
        constant = program.constants[str(node.target)]
        if constant.tensor is None:
            raise SimulationError(f"the constant {node.name} was read from a dump by its hash; its values are not known")
        return Instruction(node.name, node, constant.tensor.clone, (), {}, None)
    args, kwargs = (fx.map_arg(a, lambda n: _Name(n.name)) for a in (node.args, dict(node.kwargs)))
    row = transfers.BY_FUNCTION.get(node.target)
    if row is None:
        return Instruction(node.name, node, ANY_STRIDES.get(node.target, node.target), args, kwargs, None)  # type: ignore[arg-type]
    given = transfers.arguments(node.target, args, kwargs)
    if not row.collective:
        return Instruction(node.name, node, LOCAL[node.target], (args[0],), {"given": given}, None)
    if node.target not in COLLECTIVE:
        raise SimulationError(f"{row.name} needs a pipeline runtime; the simulator runs collectives")
    return Instruction(node.name, node, COLLECTIVE[node.target], (args[0],), {"given": given}, given["axis"])


def _load(value: Any, values: Values) -> Any:
    if isinstance(value, _Name):
        return values[value]
    if isinstance(value, (list, tuple)):
        return type(value)(_load(v, values) for v in value)
    return value


def run_rank(code: Sequence[Instruction], values: Values, at: Mapping[str, int]) -> Generator[Arrival, Any, None]:
    """Run instructions on one rank's values; stops at each collective and is resumed with its result."""
    for step in code:
        if step.axis is not None:
            values[step.name] = yield Arrival(step, _load(step.args[0], values))
        elif "given" in step.kwargs:
            values[step.name] = step.function(_load(step.args[0], values), step.kwargs["given"], at)
        else:
            args = [_load(a, values) for a in step.args]
            kwargs = {key: _load(v, values) for key, v in step.kwargs.items()} if step.kwargs else {}
            values[step.name] = step.function(*args, **kwargs)


def run_ranks(mesh: Mesh, code: Mapping[int, Sequence[Instruction]], values: Mapping[int, Values]) -> None:
    """Run all ranks to the end; ``values`` receives what each computed.

    Raises:
        SimulationError: ranks of one group meet in different collectives, or wait for ever.
    """
    running = {rank: run_rank(code[rank], values[rank], mesh.coordinates(rank)) for rank in mesh.ranks}
    waiting: dict[int, Arrival] = {}
    ready: dict[int, Any] = dict.fromkeys(mesh.ranks)
    while running:
        for rank, result in ready.items():
            try:
                waiting[rank] = running[rank].send(result)
            except StopIteration:
                del running[rank]
        ready = _meet(mesh, waiting)
        if running and not ready:
            raise SimulationError("the ranks wait for each other for ever:\n" + _waits(mesh, waiting, running))


def _meet(mesh: Mesh, waiting: dict[int, Arrival]) -> dict[int, Any]:
    """Carry out every collective whose group is complete."""
    ready: dict[int, Any] = {}
    for rank in list(waiting):
        if rank not in waiting:
            continue
        axis = waiting[rank].instruction.axis
        assert axis is not None
        group = mesh.group(rank, axis)
        if not all(member in waiting and waiting[member].instruction.axis == axis for member in group):
            continue
        arrivals = [waiting.pop(member) for member in group]
        first = arrivals[0].instruction
        for member, arrival in zip(group, arrivals, strict=True):
            other = arrival.instruction
            if (other.name, other.function) != (first.name, first.function):
                raise SimulationError(
                    f"ranks of one group over {axis} meet in different collectives:\n"
                    f"    rank {group[0]}: {first.name} = {first.node.format_node()}\n"
                    f"    rank {member}: {other.name} = {other.node.format_node()}"
                )
        results = first.function([a.operand for a in arrivals], [a.instruction.kwargs["given"] for a in arrivals])
        ready.update(zip(group, results, strict=True))
    return ready


def _waits(mesh: Mesh, waiting: Mapping[int, Arrival], running: Mapping[int, Any]) -> str:
    lines = []
    for rank in mesh.ranks:
        if rank in waiting:
            step = waiting[rank].instruction
            lines.append(f"    rank {rank} waits in {step.name} for ranks {', '.join(map(str, mesh.group(rank, step.axis or '')))}")
        elif rank not in running:
            lines.append(f"    rank {rank} has ended")
    return "\n".join(lines)


# -- what transfers do to pieces ---------------------------------------------------------------------------------

Given = Mapping[str, Any]

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


def _in_parts(x: torch.Tensor, given: Given) -> torch.Tensor:
    parts = given.get("parts")
    return x if parts is None else x.reshape([n for dim in parts for n in dim])


def _result(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return x.reshape(list(shape)).contiguous()


def _local_shape(function: Any, x: torch.Tensor, given: Given, at: Mapping[str, int]) -> tuple[int, ...]:
    return transfers.local_shape(function, x.shape, given, at)


def _slice(x: torch.Tensor, given: Given, at: Mapping[str, int]) -> torch.Tensor:
    sizes, index = given["sizes"], at[given["axis"]]
    piece = _in_parts(x, given).narrow(given["dim"], sum(sizes[:index]), sizes[index])
    return _result(piece, _local_shape(transfers.slice, x, given, at))


def _pend(x: torch.Tensor, given: Given, at: Mapping[str, int]) -> torch.Tensor:
    return x if at[given["axis"]] == 0 else torch.zeros_like(x)


def _all_gather(xs: list[torch.Tensor], givens: list[Given]) -> list[torch.Tensor]:
    whole = torch.cat([_in_parts(x, g) for x, g in zip(xs, givens, strict=True)], dim=givens[0]["dim"])
    return [_result(whole, _local_shape(transfers.all_gather, xs[0], givens[0], {}))] * len(xs)


def _reduced(xs: list[torch.Tensor], givens: list[Given]) -> torch.Tensor:
    op = givens[0].get("op", "sum")
    if op == "avg":
        return functools.reduce(torch.add, xs) / len(xs)
    return functools.reduce(_REDUCE[op], xs)


def _all_reduce(xs: list[torch.Tensor], givens: list[Given]) -> list[torch.Tensor]:
    return [_reduced(xs, givens)] * len(xs)


def _reduce_scatter(xs: list[torch.Tensor], givens: list[Given]) -> list[torch.Tensor]:
    given = givens[0]
    pieces = _in_parts(_reduced(xs, givens), given).split(list(given["sizes"]), dim=given["dim"])
    shapes = [_local_shape(transfers.reduce_scatter, xs[0], given, {given["axis"]: k}) for k in range(len(xs))]
    return [_result(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _all_to_all(xs: list[torch.Tensor], givens: list[Given]) -> list[torch.Tensor]:
    given = givens[0]
    rows = [_in_parts(x, g).split(list(given["new_sizes"]), dim=given["target"]) for x, g in zip(xs, givens, strict=True)]
    columns = [torch.cat(column, dim=given["source"]) for column in zip(*rows, strict=True)]
    shapes = [_local_shape(transfers.all_to_all, xs[0], given, {given["axis"]: k}) for k in range(len(xs))]
    return [_result(column, shape) for column, shape in zip(columns, shapes, strict=True)]


LOCAL: dict[Any, Callable[..., torch.Tensor]] = {
    transfers.slice: _slice,
    transfers.pend: _pend,
    transfers.cast: lambda x, given, at: x.to(given["dtype"]),
    transfers.wait: lambda x, given, at: x,
}

COLLECTIVE: dict[Any, Callable[..., list[torch.Tensor]]] = {
    transfers.all_gather: _all_gather,
    transfers.all_reduce: _all_reduce,
    transfers.reduce_scatter: _reduce_scatter,
    transfers.all_to_all: _all_to_all,
}
