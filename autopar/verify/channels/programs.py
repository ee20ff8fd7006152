"""The communication of local programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.errors import ChannelError
from autopar.ir import transfers
from autopar.ir.messages import messages
from autopar.ir.nodes import record_of
from autopar.ir.program import Program
from autopar.ir.record import PHASES, TensorType
from autopar.ir.text.printer import print_node
from autopar.verify.channels.check import check_tasks
from autopar.verify.channels.payloads import Payload, Piece, message_payload, payload_of, piece_of
from autopar.verify.channels.tasks import ALL, Channels, Collective, Group, Ranks, Receive, Send, Task

Axis = str | tuple[str, ...]
Place = tuple[str | None, Axis]  # a stage, and one or more of its axes


@dataclass(frozen=True, slots=True)
class _Communication:
    """A communicating node; equal ones are the same collective. ``node`` is there where it is messages instead.

    ``payload`` is the same in one group, and not in all of them; ``piece`` is the rank's own piece, which need not be of the same size on all.
    """

    value: str
    op: str
    place: Place
    node: fx.Node | None = None
    payload: Payload = field(default=(), compare=False)
    piece: Piece | None = field(default=None, compare=False)


def check_programs(programs: Mapping[int, Program], channels: Iterable[Channels] = ALL) -> None:
    """Check the local programs of all ranks, given by rank; linear, and one walk where ranks share a graph.

    Raises:
        ChannelError: as ``check``, with the lines of the programs; or a program is not that of its rank.
    """
    given = dict(programs)
    for rank, program in given.items():
        if (found := _rank_of(program)) != rank:
            raise ChannelError(f"the program given as that of rank {rank} is at {program.coordinates}, which is rank {found}")
    walks = {id(program.graph): walk for program, walk in _by_graph(given.values())}
    uneven = {graph: [one for one in walk if one.piece and len(set(one.piece[1])) > 1] for graph, walk in walks.items()}
    looked_at = set[int]()
    for rank, program in given.items():
        walk = walks[id(program.graph)]
        if id(program.graph) in looked_at:  # pieces of one size are those of all ranks
            walk = uneven[id(program.graph)]
        looked_at.add(id(program.graph))
        _check_pieces(rank, program, walk)
    if given and not (_alike(given, list(walks.values())) and _of_one_payload(given, walks)):
        made: dict[Any, Collective] = {}
        tasks = {rank: _tasks(program, walks[id(program.graph)], made) for rank, program in given.items()}
        check_tasks(tasks, channels, lambda rank, value: _quoted(given[rank], value))


def tasks_of(program: Program) -> list[Task]:
    """What the rank of a local program communicates, phase by phase, in the order of the graph."""
    return _tasks(program, _walk(program), {})


def creation_order(programs: Iterable[Program]) -> list[Ranks]:
    """The groups that the local programs need, in one order, in which all ranks may create them.

    A job makes every group of its mesh beforehand; stages are meshes of their own, whose groups follow from the
    programs. The order depends on the graphs alone and not on whose programs these are: a rank may ask with its own where all share a
    graph. Groups of one rank are left out.
    """
    groups: set[Ranks] = set()
    for program, walk in _by_graph(programs):
        for stage, axis in {one.place for one in walk if one.node is None}:
            mesh = program.meshes[stage]
            groups.update(mesh.group(rank, axis) for rank in mesh.ranks)
    return sorted(group for group in groups if len(group) > 1)


def _messages(program: Program, node: fx.Node) -> Group:
    """The messages of a ``send`` or ``recv`` on the program's rank, in the one order that all ranks keep."""
    ends = transfers.Ends.of(transfers.arguments(node.target, node.args, node.kwargs), program.meshes)  # type: ignore[arg-type]
    rank, type = program.rank, record_of(node).type
    assert isinstance(type, TensorType)
    width = type.dtype.itemsize
    payload = message_payload(transfers.arguments(node.target, node.args, node.kwargs), type)  # type: ignore[arg-type]
    return Group(tuple(
        Send(node.name, one.receiver, one.elements * width, payload) if one.sender == rank
        else Receive(node.name, one.sender, one.elements * width, payload)
        for one in messages(ends.source, ends.target, ends.shape) if rank in (one.sender, one.receiver)
    ))  # fmt: skip


def _by_graph(programs: Iterable[Program]) -> list[tuple[Program, list[_Communication]]]:
    """One program of each graph, and its communicating nodes."""
    one_each = {id(program.graph): program for program in programs}
    return [(program, _walk(program)) for program in one_each.values()]


def _walk(program: Program) -> list[_Communication]:
    phases: dict[str, list[_Communication]] = {phase: [] for phase in PHASES}
    for node in program.nodes:
        row = transfers.BY_FUNCTION.get(node.target)  # type: ignore[arg-type]
        if row is not None and row.collective:
            given = transfers.arguments(row.function, node.args, node.kwargs)
            axis = given.get("axis")
            place = given.get("stage"), axis if isinstance(axis, str) else tuple(axis or ())
            payload, piece = (), None
            if axis is not None:
                operand = record_of(node.args[0]).type  # type: ignore[arg-type]
                assert isinstance(operand, TensorType)
                payload, piece = payload_of(row.function, given, operand), piece_of(row.function, given, operand)
            found = _Communication(node.name, row.name, place, node if axis is None else None, payload, piece)
            phases[record_of(node).phase].append(found)
    return [one for phase in phases.values() for one in phase]


def _alike(programs: Mapping[int, Program], walks: Sequence[Sequence[_Communication]]) -> bool:
    """Whether all ranks run the same collectives and nothing else, each on a mesh of all ranks: then they finish."""
    first, *others = walks
    meshes, *more = [program.meshes for program in programs.values()]
    return (
        all(one == first for one in others)
        and all(one == meshes for one in more)
        and not any(one.node for one in first)
        and all(stage in meshes and programs.keys() == set(meshes[stage].ranks) for stage in {one.place[0] for one in first})
    )


def _of_one_payload(programs: Mapping[int, Program], walks: Mapping[int, Sequence[_Communication]]) -> bool:
    """Whether the members of each group put the same on the wire, where all ranks run the same collectives."""
    for number, row in enumerate(zip(*walks.values(), strict=True)):
        one, *others = row
        if all(other.payload == one.payload for other in others):
            continue
        stage, axis = one.place
        along, said = transfers.axes_of(axis), {}
        for program in programs.values():
            group = tuple(place for name, place in program.coordinates_on(stage).items() if name not in along)
            payload = walks[id(program.graph)][number].payload
            if said.setdefault(group, payload) != payload:
                return False
    return True


def _tasks(program: Program, walk: Sequence[_Communication], made: dict[Any, Collective]) -> list[Task]:
    """``made`` shares equal collectives between ranks, so that they compare fast."""
    rank, groups, tasks = _rank_of(program), {}, []
    for one in walk:
        if one.node is not None:
            tasks.append(_messages(program, one.node))
            continue
        if (ranks := groups.get(one.place)) is None:
            ranks = groups[one.place] = _group(program, rank, one)
        key = one.value, one.op, ranks, one.payload
        if key not in made:
            made[key] = Collective(*key)
        tasks.append(made[key])
    return tasks


def _check_pieces(rank: int, program: Program, walk: Sequence[_Communication]) -> None:
    """The rank's own pieces are as long as the sizes say that all members have."""
    for one in walk:
        if one.piece is not None and one.place[0] in program.meshes and rank in program.meshes[one.place[0]]:
            own, sizes, axis = one.piece
            place = program.coordinates_on(one.place[0])[axis]
            if place >= len(sizes) or sizes[place] != own:
                said = f"that it is {sizes[place]} long" if place < len(sizes) else f"the sizes of {len(sizes)} pieces alone"
                raise ChannelError(
                    f"the piece of rank {rank} is {own} long, and the collective says {said}:\n  rank {rank}: {_quoted(program, one.value)}\n"
                    f"give it the size of the piece that each member has"
                )


def _group(program: Program, rank: int, one: _Communication) -> Ranks:
    stage, axis = one.place
    try:
        return program.meshes[stage].group(rank, axis)
    except (KeyError, ValueError) as error:
        why = f"there is no stage {stage!r}" if isinstance(error, KeyError) else str(error)
        raise ChannelError(f"rank {rank} cannot take part in a collective:\n  {_quoted(program, one.value)}\n{why}") from None


def _rank_of(program: Program) -> int:
    if program.coordinates is None or program.mesh is None:
        raise ChannelError(f"channels are checked in the local programs of all ranks; this one is {program.level}")
    return program.mesh.rank(program.coordinates)


def _quoted(program: Program, value: str) -> str:
    try:
        return print_node(program, program.node(value)).strip()
    except KeyError:
        return ""
