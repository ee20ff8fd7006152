"""Check the communication of local programs, and list it as tasks with their payloads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.errors import ChannelError
from autopar.ir import transfers
from autopar.ir.mesh import ranks_by_group
from autopar.ir.messages import messages
from autopar.ir.nodes import node_at, record_of, tensor_type
from autopar.ir.program import Program
from autopar.ir.record import DTYPE_NAMES, PHASES, TensorType
from autopar.ir.streams import DEFAULT, Stream, stream_of
from autopar.ir.subaxes import index_along
from autopar.ir.text.printer import print_node
from autopar.verify.channels.check import check_tasks
from autopar.verify.channels.tasks import ALL, Channels, Collective, Group, Ranks, Receive, Send, Task

# -- payloads ----------------------------------------------------------------------------------------------------------
#
# Describe the payload of a transfer in a local program.
#
# It is the facts on which all members of a group, or both ends of a message, must agree.
#
#     y : f32[16 256] = all_gather(h, 1, tp, sizes=[128, 128])
#     →   dtype f32 · dim 1 · piece sizes [128 128] · shape [16 256]
#
# Pieces of different ranks may differ in size. So the shape in the payload is that of the whole value, and each rank's
# own piece is compared with the size that the members state for it.


Payload = tuple[tuple[str, str], ...]  # (name, value), for comparison and for errors
# the size of the rank's piece, the stated sizes of all members, and their axis
Piece = tuple[int, tuple[int, ...], str]

# transfer → (name in an error, argument, default)
AGREED: dict[Any, tuple[tuple[str, str, Any], ...]] = {
    transfers.all_reduce: (("reduction", "op", "sum"),),
    transfers.all_gather: (("dim", "dim", None), ("piece sizes", "sizes", None)),
    transfers.reduce_scatter: (("reduction", "op", "sum"), ("dim", "dim", None), ("piece sizes", "sizes", None)),
    transfers.all_to_all: (("source dim", "source", None), ("target dim", "target", None),
                           ("piece sizes", "sizes", None), ("new piece sizes", "new_sizes", None)),
    transfers.redistribute: tuple((name, name, None) for name in ("axis", "kept")),
}  # fmt: skip
ENDS = (("source splits", "source"), ("source parts", "source_parts"), ("splits", "splits"), ("parts", "parts"))
# the argument with the dim along which pieces are concatenated
JOINED = {transfers.all_gather: "dim", transfers.all_to_all: "source"}


def payload_of(function: Any, arguments: Mapping[str, Any], operand: TensorType) -> Payload:
    """Return the facts on which all members of a collective must agree."""
    facts = [("dtype", DTYPE_NAMES[operand.dtype])]
    if function in (transfers.all_reduce, transfers.reduce_scatter):
        facts.append(
            ("dtype of the reduction", DTYPE_NAMES[transfers.reduced_as(arguments.get("op", "sum"), operand.dtype)])
        )
    facts += [(label, _text(arguments.get(name, default))) for label, name, default in AGREED[function]]
    if function is transfers.redistribute:
        return (*facts, *_ends(arguments))
    view = _view(arguments, operand)
    if tuple(map(math.prod, view)) != operand.shape:
        return (*facts, ("shape", f"{_text(operand.shape)}, which the parts {_text(view)} do not make"))
    if (name := JOINED.get(function)) is not None and arguments.get("sizes"):
        dim, place = _place(view, arguments[name])
        view[dim][place] = sum(arguments["sizes"])
    if arguments.get("parts"):
        facts.append(("parts", _text(view)))
    return (*facts, ("shape", _text([math.prod(dim) for dim in view] if function in JOINED else operand.shape)))


def message_payload(arguments: Mapping[str, Any], type: TensorType) -> Payload:
    """Return the facts on which both ends of a ``send`` and a ``recv`` must agree."""
    return (("dtype", DTYPE_NAMES[type.dtype]), *_ends(arguments))


def piece_of(function: Any, arguments: Mapping[str, Any], operand: TensorType) -> Piece | None:
    """Return the size of the rank's own piece, if the members state the sizes of all pieces; else ``None``."""
    if (name := JOINED.get(function)) is None or not arguments.get("sizes"):
        return None
    view = _view(arguments, operand)
    dim, place = _place(view, arguments[name])
    return view[dim][place], tuple(arguments["sizes"]), arguments["axis"]


def _ends(arguments: Mapping[str, Any]) -> Payload:
    return ("shape", _text(arguments.get("shape"))), *((label, _text(arguments.get(name))) for label, name in ENDS)


def _view(arguments: Mapping[str, Any], operand: TensorType) -> list[list[int]]:
    """Return the part sizes of the operand, dim by dim."""
    return [list(dim) for dim in arguments.get("parts") or [(n,) for n in operand.shape]]


def _place(view: Sequence[Sequence[int]], number: int) -> tuple[int, int]:
    """Return (dim, part) of a part whose number counts the parts of all dims."""
    return [(dim, k) for dim, parts in enumerate(view) for k in range(len(parts))][number]


def _text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        numbers = set(map(type, value)) == {int}
        return f"[{' '.join(map(str if numbers else _text, value))}]"
    return "none" if value is None else str(value)


# -- programs ----------------------------------------------------------------------------------------------------------


Axis = str | tuple[str, ...]
Place = tuple[str | None, Axis]  # a stage, and one or more of its axes


@dataclass(frozen=True, slots=True)
class Communication:
    """A communicating node. Equal ones are the same collective; only messages have a ``node``.

    ``payload`` must be the same in one group, but may differ between groups; ``piece`` describes the rank's own piece.
    """

    value: str
    op: str
    place: Place
    stream: str = DEFAULT
    node: fx.Node | None = None
    payload: Payload = field(default=(), compare=False)
    piece: Piece | None = field(default=None, compare=False)


def check_programs(programs: Mapping[int, Program], channels: Iterable[Channels] = ALL) -> None:
    """Check the local programs of all ranks, given by rank. Linear; ranks that share a graph share one walk.

    Raises:
        ChannelError: as ``check``, with the lines of the programs; or a program has the coordinates of another rank.
    """
    by_rank = dict(programs)
    for rank, program in by_rank.items():
        if (actual := _rank_of(program)) != rank:
            raise ChannelError(
                f"the program given as that of rank {rank} is at {program.coordinates}, which is rank {actual}"
            )
    walks = {id(program.graph): walk for program, walk in _by_graph(by_rank.values())}
    uneven = {
        graph: [item for item in walk if item.piece and len(set(item.piece[1])) > 1] for graph, walk in walks.items()
    }
    checked_graphs = set[int]()
    for rank, program in by_rank.items():
        walk = walks[id(program.graph)]
        # this graph has been checked; only pieces of different sizes differ between its ranks
        if id(program.graph) in checked_graphs:
            walk = uneven[id(program.graph)]
        checked_graphs.add(id(program.graph))
        _check_pieces(rank, program, walk)
    if by_rank and not (_alike(by_rank, list(walks.values())) and _of_one_payload(by_rank, walks)):
        collectives: dict[Any, Collective] = {}
        tasks = {rank: _tasks(program, walks[id(program.graph)], collectives) for rank, program in by_rank.items()}
        check_tasks(tasks, channels, lambda rank, value: _quoted(by_rank[rank], value))


def tasks_of(program: Program) -> list[Task]:
    """Return the tasks of the rank of a local program, phase by phase, or of a scheduled one in its order."""
    return _tasks(program, communication_of(program), {})


def creation_order(programs: Iterable[Program]) -> list[Stream]:
    """Return the streams that the local programs need, in one order, in which all ranks may create their groups.

    A job makes the default stream of every group of its mesh beforehand. Stages are meshes of their own, whose groups
    follow from the programs, as do further streams. The order depends only on the graphs, not on the ranks of the
    programs: if all ranks share a graph, a rank may call this with its own program. Groups of one rank are left out.
    Messages use the group of all ranks; without a stream, the default group.
    """
    streams: set[Stream] = set()
    for program, walk in _by_graph(programs):
        for (stage, axis), stream in {(item.place, item.stream) for item in walk if item.node is None}:
            groups = ranks_by_group(program.meshes[stage], transfers.axes_of(axis))
            streams.update((tuple(sorted(ranks)), stream) for ranks in groups)
        every = tuple(sorted(program.meshes[None].ranks))
        streams.update((every, item.stream) for item in walk if item.node is not None and item.stream != DEFAULT)
    return sorted(stream for stream in streams if len(stream[0]) > 1)


def _messages(program: Program, node: fx.Node) -> Group:
    """Return the messages of a ``send`` or ``recv`` on the program's rank, in the order that all ranks use."""
    ends = transfers.Ends.of(transfers.arguments(node.target, node.args, node.kwargs), program.meshes)
    rank, type = program.rank, record_of(node).type
    assert isinstance(type, TensorType)
    width, stream = type.dtype.itemsize, stream_of(record_of(node).stream, None)
    payload = message_payload(transfers.arguments(node.target, node.args, node.kwargs), type)
    return Group(tuple(
        Send(node.name, message.receiver, message.elements * width, payload, stream) if message.sender == rank
        else Receive(node.name, message.sender, message.elements * width, payload, stream)
        for message in messages(ends.source, ends.target, ends.shape) if rank in (message.sender, message.receiver)
    ))  # fmt: skip


def _by_graph(programs: Iterable[Program]) -> list[tuple[Program, list[Communication]]]:
    """Return one program of each graph, with its communicating nodes."""
    by_graph = {id(program.graph): program for program in programs}
    return [(program, communication_of(program)) for program in by_graph.values()]


def communication_of(program: Program) -> list[Communication]:
    """Return the communicating lines of a local program: phase by phase, or of a scheduled one in its order."""
    phases: dict[str, list[Communication]] = {phase: [] for phase in PHASES}
    for node in program.nodes:
        row = transfers.BY_FUNCTION.get(node.target)
        if row is not None and row.collective:
            arguments = transfers.arguments(row.function, node.args, node.kwargs)
            axis = arguments.get("axis")
            place = arguments.get("stage"), axis if isinstance(axis, str) else tuple(axis or ())
            payload: Payload = ()
            piece: Piece | None = None
            if axis is not None:
                operand = tensor_type(node_at(node))
                payload, piece = (
                    payload_of(row.function, arguments, operand),
                    piece_of(row.function, arguments, operand),
                )
            message = node if axis is None else None
            record = record_of(node)
            if record.started:
                payload += ("message", record.message), ("elements", str(record.span))
            stream = stream_of(record.stream, axis)
            item = Communication(node.name, row.name, place, stream, message, payload, piece)
            # a scheduled program runs in its own order, another phase by phase
            phases[PHASES[0] if program.level == "scheduled" else record.phase].append(item)
    return [item for phase in phases.values() for item in phase]


def _alike(programs: Mapping[int, Program], walks: Sequence[Sequence[Communication]]) -> bool:
    """Return whether all ranks run the same collectives on meshes of all ranks, and no messages: then they finish."""
    first, *others = walks
    meshes, *more = [program.meshes for program in programs.values()]
    return (
        all(other == first for other in others)
        and all(other == meshes for other in more)
        and not any(other.node for other in first)
        and all(
            stage in meshes and programs.keys() == set(meshes[stage].ranks)
            for stage in {other.place[0] for other in first}
        )
    )


def _of_one_payload(programs: Mapping[int, Program], walks: Mapping[int, Sequence[Communication]]) -> bool:
    """Return whether the members of each group have the same payload, given that all ranks run the same collectives."""
    for number, row in enumerate(zip(*walks.values(), strict=True)):
        first, *others = row
        if all(other.payload == first.payload for other in others):
            continue
        stage, axis = first.place
        payloads = dict[Ranks, Payload]()
        for rank, program in programs.items():
            group = program.meshes[stage].group(rank, axis)
            payload = walks[id(program.graph)][number].payload
            if payloads.setdefault(group, payload) != payload:
                return False
    return True


def _tasks(program: Program, walk: Sequence[Communication], collectives: dict[Any, Collective]) -> list[Task]:
    """Return a rank's tasks; ``collectives`` shares equal collectives between ranks, so that they compare fast."""
    rank, groups, tasks = _rank_of(program), dict[Place, Ranks](), list[Task]()
    for item in walk:
        if item.node is not None:
            tasks.append(_messages(program, item.node))
            continue
        if (ranks := groups.get(item.place)) is None:
            ranks = groups[item.place] = _group(program, rank, item)
        key = item.value, item.op, ranks, item.payload, item.stream
        if key not in collectives:
            collectives[key] = Collective(*key)
        tasks.append(collectives[key])
    return tasks


def _check_pieces(rank: int, program: Program, walk: Sequence[Communication]) -> None:
    """Check that the rank's own pieces have the sizes that the collectives state."""
    for item in walk:
        if item.piece is not None and item.place[0] in program.meshes and rank in program.meshes[item.place[0]]:
            size, sizes, axis = item.piece
            place = index_along(axis, program.coordinates_on(item.place[0]))
            if place >= len(sizes) or sizes[place] != size:
                stated = (
                    f"that it is {sizes[place]} long"
                    if place < len(sizes)
                    else f"the sizes of {len(sizes)} pieces alone"
                )
                raise ChannelError(
                    f"the piece of rank {rank} is {size} long, but the collective says {stated}:\n  rank {rank}: "
                    f"{_quoted(program, item.value)}\n"
                    f"list the actual size of each member's piece"
                )


def _group(program: Program, rank: int, item: Communication) -> Ranks:
    stage, axis = item.place
    try:
        return program.meshes[stage].group(rank, axis)
    except (KeyError, ValueError) as error:
        why = f"there is no stage {stage!r}" if isinstance(error, KeyError) else str(error)
        raise ChannelError(
            f"rank {rank} cannot take part in a collective:\n  {_quoted(program, item.value)}\n{why}"
        ) from None


def _rank_of(program: Program) -> int:
    if program.coordinates is None or program.mesh is None:
        raise ChannelError(f"channels are checked in the local programs of all ranks; this program is {program.level}")
    return program.mesh.rank(program.coordinates)


def _quoted(program: Program, value: str) -> str:
    try:
        return print_node(program, program.node(value)).strip()
    except KeyError:
        return ""
